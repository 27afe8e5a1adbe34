"""The product ``h @ matrix`` of each edge's hidden features and a radial network's last layer, [edges, weights].

``fp16x3`` is three products of halves by tensor cores, with errors of float32's class: see
:mod:`kernelgen.ops.edges.tall_matrices`. It is for float32 and many edges on a GPU; elsewhere, and for ``float32``, it
is torch's product with torch's settings (``torch.set_float32_matmul_precision``). ``tf32`` is for weights that are
formed in registers: one product of halves, whose 11 bits are TF32's. Outside of them it is ``float32``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from kernelgen.ops.edges.products import edge_product, full_product, sum_product

# Accuracy class of ``kernelgen.schedule.radial`` with which weights are formed in registers, by product.
ACCURACY = {"fp16x3": "ieee", "float32": "ieee", "tf32": "tf32"}
EDGE_PRODUCTS = tuple(ACCURACY)


class Multiply(NamedTuple):
    """rows: a b for a ``[edges, depth]``. sums: a^T b for a ``[edges, left]``, b ``[edges, right]``. Differentiable."""

    rows: Callable[[Tensor, Tensor], Tensor]
    sums: Callable[[Tensor, Tensor], Tensor]


_TORCH = Multiply(full_product, lambda a, b: full_product(a.t(), b))
_HALVES = Multiply(edge_product, sum_product)


def multiply_by(product: str) -> Multiply:
    """The functions of one of ``EDGE_PRODUCTS``."""
    return _HALVES if product == "fp16x3" else _TORCH
