"""The product ``h @ matrix`` of each edge's hidden features and a radial network's last layer, [edges, weights].

``float32`` is torch's product, with torch's settings (``torch.set_float32_matmul_precision``). ``fp16x3`` has errors of
the same class, and on a GPU takes the tensor cores' half precision: with ``a = a_hi + a_lo``, both in half precision,

    h @ m  =  h_hi m_hi + h_lo m_hi + h_hi m_lo + (h_lo m_lo, some 2**-22 of the result, left out)

as one product of three times the depth, summed in float32. Half precision has little range, so each row of h, and the
matrix as a whole, are scaled by powers of two first; edge attributes take these factors back, because the convolution
is linear in both. So an edge's weights are as accurate as float32's relative to the row's largest element of h, and a
column's as long as its largest element is more than 2**-20 of the matrix's largest. Rows below 2**-45 are
less accurate.

``tf32`` is for weights that are formed in registers: one product of halves, h_hi m_hi, whose 11 bits are TF32's.
Outside of them it is ``float32``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Accuracy class of ``kernelgen.schedule.radial`` with which weights are formed in registers, by product.
ACCURACY = {"float32": "ieee", "fp16x3": "ieee", "tf32": "tf32"}
EDGE_PRODUCTS = tuple(ACCURACY)
# The largest magnitude after scaling: half precision has 65504, and 11 bits down to 2**-14.
_LARGEST = 15


def multiply_of(product: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of one product, differentiable any number of times; for ``fp16x3``, of what :func:`scaled` gives."""
    return Fp16x3.apply if product == "fp16x3" else torch.mm


def can_split(h: Tensor, matrix: Tensor) -> bool:
    """Whether ``fp16x3`` computes this: float32, on a GPU with a torch that sums halves in float32 (2.8), or a CPU."""
    is_there = not h.is_cuda or hasattr(torch.ops.aten.mm, "dtype")
    return is_there and h.dtype == matrix.dtype == torch.float32 and h.numel() > 0


def scaled(y: Tensor, h: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Edge attributes, hidden features and matrix with the same product: rows of h and the matrix in half's range."""
    of_rows, of_matrix = _exponent(h, (1,)), _exponent(matrix, (0, 1))
    y = y * _power(of_rows) * _power(of_matrix)
    return y, h * _power(-of_rows), matrix * _power(-of_matrix)


@torch.no_grad()
def _exponent(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """e so that 2**-e brings the largest magnitude below 2**15, read from float32's bits.

    At least -60, so that no factor above leaves float32's range: magnitudes below 2**-45 lose accuracy.
    """
    bits = values.abs().amax(dims, keepdim=True).view(torch.int32)
    return ((bits >> 23) - 126 - _LARGEST).clamp_min(-60)


def _power(exponent: Tensor) -> Tensor:
    """2**exponent, exact."""
    return ((exponent + 127) << 23).view(torch.float32)


class Fp16x3(torch.autograd.Function):
    """The product of scaled matrices [rows, depth] and [depth, columns]. Gradients are products of torch's."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        a_hi, b_hi = a.half(), b.half()
        a_lo, b_lo = (a - a_hi).half(), (b - b_hi).half()
        deep = torch.cat([a_hi, a_lo, a_hi], dim=1), torch.cat([b_hi, b_hi, b_lo])
        if a.is_cuda:
            return torch.mm(*deep, out_dtype=torch.float32)
        return torch.mm(*(half.float() for half in deep))  # products of halves are exact in float32

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (a, b) = gradients, ctx.saved_tensors
        by_a, by_b = ctx.needs_input_grad
        return gradient @ b.t() if by_a else None, a.t() @ gradient if by_b else None
