"""Derivatives that torch transforms (``is_grads_batched``, vmap): for all edges at once, through the torch ops."""

from __future__ import annotations

from torch import Tensor

from kernelgen.ops.edges.products import full_product
from kernelgen.ops.operator import Operator
from kernelgen.ops.torch_ops import along_tangents, only
from kernelgen.ops.transforms import call
from kernelgen.runtime.arguments import Graph

Maybe = Tensor | None
# x, y, the hidden features h and the matrix m: the weights are w = h m.
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def first_transformed(inputs: Inputs, g: Tensor, slots: str, whole: Graph, operator: Operator) -> tuple[Maybe, ...]:
    """Gradients of x, y, h and m. slots: of the operands x, y and w, whose gradients these need."""
    x, y, h, m = inputs
    dx, dy, dw = _gradients((x, y, full_product(h, m)), g, slots, whole, operator)
    return dx, dy, None if dw is None else full_product(dw, m.t()), None if dw is None else full_product(h.t(), dw)


def second_transformed(
    inputs: Inputs, g: Tensor, tangents: tuple[Maybe, ...], slots: str, whole: Graph, operator: Operator
) -> tuple[Maybe, ...]:
    """Second derivatives by x, y, h, m and g along tangents of these; see ``kernelgen.ops.radial.convolution``."""
    (x, y, h, m), (tx, ty, th, tm, tg) = inputs, tangents
    terms = [full_product(a, b) for a, b in ((th, m), (h, tm)) if a is not None and b is not None]
    w, tw = full_product(h, m), sum(terms[1:], terms[0]) if terms else None
    dx, dy, dw, dg = along_tangents((x, y, w, g), (tx, ty, tw, tg), slots, _edges(whole), operator.text)
    gw = None
    if "w" in slots and terms:
        gw = _gradients((x, y, w), g, "w", whole, operator)[2]
    of_h = [full_product(a, b.t()) for a, b in ((dw, m), (gw, tm)) if a is not None and b is not None]
    of_m = [full_product(a.t(), b) for a, b in ((h, dw), (th, gw)) if a is not None and b is not None]
    return dx, dy, sum(of_h[1:], of_h[0]) if of_h else None, sum(of_m[1:], of_m[0]) if of_m else None, dg


def _gradients(xyw: tuple[Tensor, ...], g: Tensor, slots: str, whole: Graph, operator: Operator) -> tuple[Maybe, ...]:
    return only(call("tp_backward", *xyw, g, *_edges(whole), slots, operator.text), "xyw", slots)


def _edges(graph: Graph) -> tuple:
    return graph.sender, graph.receiver, *graph.order, graph.num_out
