"""Products ``a b`` of a tall matrix, a row an edge, with a small one; and where torch's product is taken instead.

Autocast changes none of them: what comes in half precision was converted to float32 before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelgen.ops.edges import tall_matrices
from kernelgen.torch_versions import run_eagerly
from kernelgen.tracing import is_autocast, runs_eagerly, without_autocast

# With fewer rows torch's product is faster: on an H200, 64 x 1280, they meet at 8,000 (to many columns), 15,000 (to
# few) and 10,000 rows (sums).
LEAST_ROWS = 8192


def edge_product(a: Tensor, b: Tensor) -> Tensor:
    """a ``[edges, depth]`` times b ``[depth, columns]``, differentiable any number of times.

    In float32 on a GPU with many edges, by tensor cores with float32's errors (``tall_matrices``); else ``a @ b``.
    """
    if not (_may_take(a, b) and tall_matrices.multiplies(a, b)):
        return full_product(a, b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Product.apply(a, b)
    return tall_matrices.product(a, b)


def sum_product(a: Tensor, b: Tensor) -> Tensor:
    """``a^T b`` of a ``[edges, left]`` and b ``[edges, right]``: as :func:`edge_product`."""
    if not (_may_take(a, b) and tall_matrices.sums_up(a, b)):
        if _may_take(a, b) and tall_matrices.sums_up(b, a):
            return sum_product(b, a).t()
        return full_product(a.t(), b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Sums.apply(a, b)
    return tall_matrices.sums(a, b)


def full_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` by torch, for a ``[..., depth]`` and b ``[depth, columns]``, in the precision of a and b.

    Under ``torch.autocast`` too, and so are its derivatives of any order, unless torch traces or transforms them.
    """
    if not is_autocast(a):
        return torch.mm(a, b) if a.dim() == 2 else torch.matmul(a, b)
    if runs_eagerly(a, b) and torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _FullProduct.apply(a.flatten(0, -2), b).unflatten(0, a.shape[:-1])
    with without_autocast(a):
        return torch.matmul(a, b)


def _may_take(a: Tensor, b: Tensor) -> bool:
    """Whether there are many edges, of one dtype and device, and torch does not trace."""
    rows = a.shape[0]
    is_one = type(rows) is int and rows >= LEAST_ROWS and a.dtype is b.dtype and a.device == b.device
    return is_one and runs_eagerly(a, b)


def _keep(ctx: Any, a: Tensor, b: Tensor) -> None:
    """Save what gradients need: a network whose weights are frozen keeps no features of its edges."""
    by_a, by_b = ctx.needs_input_grad
    ctx.save_for_backward(a if by_b else None, b if by_a else None)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        _keep(ctx, a, b)
        return tall_matrices.product(a, b)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take torch's own")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (a, b) = gradients, ctx.saved_tensors
        by_a, by_b = ctx.needs_input_grad
        return edge_product(g, b.t()) if by_a else None, sum_product(a, g) if by_b else None


class _FullProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        _keep(ctx, a, b)
        with without_autocast(a):
            return torch.mm(a, b)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take torch's own")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (a, b) = gradients, ctx.saved_tensors
        by_a, by_b = ctx.needs_input_grad
        return full_product(g, b.t()) if by_a else None, full_product(a.t(), g) if by_b else None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        _keep(ctx, a, b)
        return tall_matrices.sums(a, b)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take torch's own")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (a, b) = gradients, ctx.saved_tensors
        by_a, by_b = ctx.needs_input_grad
        return edge_product(b, g.t()) if by_a else None, edge_product(a, g) if by_b else None
