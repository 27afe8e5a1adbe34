"""A convolution with weights ``w = h @ matrix`` that never exist for all edges at once, differentiable twice.

Radial networks end with such a product: h [edges, hidden] depends on an edge's length, the matrix [hidden, weights] is
shared. A row of w is 5 to 9 kB, one of h 256 bytes. Parts of the edges (:mod:`kernelgen.ops.radial.parts`) are taken
one after the other: their w is formed, used and dropped. Derivatives form it again. With F(x, y, w, g) of
``kernelgen.terms.clebsch_gordan``, and gw = dF/dw:

    first     dF/dh = gw matrix^T,  dF/dmatrix = h^T gw,  dF/dx and dF/dy as they are
    second    S = <tx, dF/dx> + <ty, dF/dy> + <tw, gw>  with  tw = th matrix + h tmatrix, so that
              dS/dh = (dS/dw) matrix^T + gw tmatrix^T,  dS/dmatrix = h^T (dS/dw) + th^T gw

Fused, the value and the gradients of x, y and h come from kernels that form w in registers, for all edges at once
(:mod:`kernelgen.ops.radial.fused`); the gradient of the matrix and second derivatives still take parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelgen.errors import InputError
from kernelgen.ops.autograd import second_gradients, used_slots
from kernelgen.ops.edges.products import full_product
from kernelgen.ops.operator import Operator
from kernelgen.ops.radial.fused import FusedRadial
from kernelgen.ops.radial.parts import Part, Parts
from kernelgen.ops.radial.products import EDGE_PRODUCTS, Multiply, multiply_by
from kernelgen.ops.radial.transformed import first_transformed, second_transformed
from kernelgen.ops.torch_ops import no_third_derivative, present
from kernelgen.runtime.allocation import empty, zeros
from kernelgen.runtime.arguments import Graph
from kernelgen.terms.directions import backward, double_backward, forward
from kernelgen.tracing import is_eager, is_transforming

Maybe = Tensor | None
# Slots of this form: x, y, h, the matrix m, and the cotangent g.
_SLOTS = "xyhm"


def radial_product(
    x: Tensor,
    y: Tensor,
    h: Tensor,
    matrix: Tensor,
    sender: Tensor,
    receiver: Tensor,
    num_out: int,
    operator: Operator,
    most_edges: int,
    product: str = "fp16x3",
    fused: FusedRadial | None = None,
) -> Tensor:
    """The convolution with weights ``h @ matrix``, by parts of at most ``most_edges`` edges.

    x, y, sender, receiver and num_out: as the operator's. h [edges, hidden], matrix [hidden, weight_numel].
    product: one of ``EDGE_PRODUCTS`` of ``kernelgen.ops.radial.products``. What torch traces or transforms is computed
    for all edges at once. fused: kernels that form the weights in registers (``kernelgen.ops.radial.fused.fused_of``),
    if they shall be used; products outside of them are still ``product``. Raises InputError for other shapes,
    dtypes and devices, and for shared weights.
    """
    if operator.shared_weights or h.dim() != 2 or matrix.shape != (h.shape[1], operator.problem.weight_numel):
        raise InputError(
            f"h is {tuple(h.shape)} and the matrix {tuple(matrix.shape)}; expected (edges, hidden) and "
            f"(hidden, {operator.problem.weight_numel}), for a convolution with weights of each edge"
        )
    if not (h.dtype is matrix.dtype is x.dtype and h.get_device() == matrix.get_device() == x.get_device()):
        raise InputError(
            f"h is {h.dtype} on {h.device} and the matrix {matrix.dtype} on {matrix.device}; expected {x.dtype} on "
            f"{x.device} for both, as x is: convert them"
        )
    if product not in EDGE_PRODUCTS:
        raise InputError(f"product is {product!r}; expected one of {', '.join(EDGE_PRODUCTS)}")
    if not is_eager(x, y, h, matrix) or is_transforming(x, y, h, matrix):
        return operator(x, y, full_product(h, matrix), sender, receiver, num_out=num_out)
    if h.shape[0] != y.shape[0]:
        raise InputError(f"h has {h.shape[0]} rows; expected {y.shape[0]}, one for each row of y")
    multiply = multiply_by(product)
    if fused is None and y.shape[0] <= most_edges:
        return operator(x, y, multiply.rows(h, matrix), sender, receiver, num_out=num_out)
    whole = operator.graph(x, y, sender, receiver, num_out, None)  # parts have orders of their own
    return _Forward.apply(x, y, h, matrix, whole, operator, Parts(operator, whole, most_edges), multiply, fused)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        x, y, h, matrix, whole, operator, parts, multiply, fused = given
        # The indices too: autograd notices writes to them.
        ctx.save_for_backward(x, y, h, matrix, *whole.saved)
        ctx.rest = whole, operator, parts, multiply, fused
        if fused is not None:
            return fused.value(x, y, h, matrix, whole)
        out = empty(whole.shapes["g"], x)
        for part in parts:
            w = multiply.rows(part.rows(h), matrix)
            operands = (x, None, part.rows(y), None, w, None, None, None)
            out[part.begin : part.end] = operator.run_on(part.graph, forward(), operands)["g"]
            del w, operands
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Maybe, ...]:
        wanted = used_slots(ctx, _SLOTS)
        if not wanted:
            return (None,) * 9
        x, y, h, matrix, *_ = ctx.saved_tensors
        if is_transforming(gradients[0]):
            found = first_transformed((x, y, h, matrix), gradients[0], _of_kernel(wanted), *ctx.rest[:2])
            return (*found, *(None,) * 5)
        found = _First.apply(x, y, h, matrix, gradients[0], wanted, *ctx.rest)
        return (*found, *(None,) * 5)


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Maybe, ...]:
        x, y, h, matrix, g, wanted, whole, operator, parts, multiply, fused = given
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y, h, matrix, g, *whole.saved)
        ctx.rest = whole, operator, parts, multiply
        slots = _of_kernel(wanted)
        if fused is not None and "m" not in wanted:
            by_slot = fused.gradients(slots, x, y, h, matrix, g, whole)
            return tuple(by_slot.get("w" if slot == "h" else slot) for slot in _SLOTS)
        sums = Sums(wanted, whole, multiply, x=x, h=h, m=matrix)
        for part in parts:
            of_h = part.rows(h)
            w = multiply.rows(of_h, matrix) if "w" in backward(slots).operands else None
            operands = (x, None, part.rows(y), None, w, None, g[part.begin : part.end], None)
            found = operator.run_on(part.graph, backward(slots), operands)
            sums.add(part, found, ((found.get("w"), matrix, of_h),))
            del w, operands, found  # before those of the next part exist
        return tuple(sums.found.get(slot) for slot in _SLOTS)

    @staticmethod
    def backward(ctx: Any, *tangents: Maybe) -> tuple[Maybe, ...]:
        wanted = used_slots(ctx, _SLOTS + "g")
        if not wanted or not any(tangent is not None for tangent in tangents):
            return (None,) * 11
        x, y, h, matrix, g, *_ = ctx.saved_tensors
        if is_transforming(*tangents):
            given = (x, y, h, matrix), g, (*tangents, None), _of_kernel(wanted)
            return (*second_transformed(*given, *ctx.rest[:2]), *(None,) * 6)
        return (*_Second.apply(x, y, h, matrix, g, *tangents, None, wanted, *ctx.rest), *(None,) * 6)


class _Second(torch.autograd.Function):
    """Second derivatives along tangents of x, y, h, m and g, which they are linear in.

    As in ``kernelgen.ops.autograd``: gradients by the tangents are second derivatives along the cotangents.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Maybe, ...]:
        x, y, h, matrix, g, tx, ty, th, tm, tg, wanted, whole, operator, parts, multiply = given
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y, h, matrix, g, *whole.saved)
        ctx.rest = whole, operator, parts, multiply
        ctx.along = "".join(
            s for s, tangent in zip(_SLOTS + "g", (tx, ty, th, tm, tg), strict=True) if tangent is not None
        )
        slots = _of_kernel(wanted)
        sums = Sums(wanted, whole, multiply, x=x, h=h, m=matrix)
        for part in parts:
            of_h, of_y, of_g = part.rows(h), part.rows(y), g[part.begin : part.end]
            of_ty, of_th = (None if tangent is None else part.rows(tangent) for tangent in (ty, th))
            w, tw = multiply.rows(of_h, matrix), None
            if of_th is not None:
                tw = multiply.rows(of_th, matrix)
            if tm is not None:
                tw = _sum(tw, multiply.rows(of_h, tm))
            primal = (x, of_y, w, of_g)
            along = (tx, of_ty, tw, None if tg is None else tg[part.begin : part.end])
            outputs = double_backward(present(*along), slots).live_outputs
            found = second_gradients(primal, along, outputs, part.graph, operator) if outputs else {}
            terms = [(found.get("w"), matrix, of_h)]
            if ("h" in wanted and tm is not None) or ("m" in wanted and of_th is not None):
                operands = (x, None, of_y, None, w, None, of_g, None)
                terms.append((operator.run_on(part.graph, backward("w"), operands)["w"], tm, of_th))
            sums.add(part, found, terms)
            del w, tw, primal, along, found, terms
        return tuple(sums.found.get(slot) for slot in _SLOTS + "g")

    @staticmethod
    def backward(ctx: Any, *cotangents: Maybe) -> tuple:
        if used_slots(ctx, _SLOTS + "g"):
            return no_third_derivative()
        wanted = used_slots(ctx, ctx.along, first=5)
        if not wanted or not any(cotangent is not None for cotangent in cotangents):
            return (None,) * 15
        x, y, h, matrix, g, *_ = ctx.saved_tensors
        if is_transforming(*cotangents):
            given = (x, y, h, matrix), g, cotangents, _of_kernel(wanted)
            return (*(None,) * 5, *second_transformed(*given, *ctx.rest[:2]), *(None,) * 5)
        return (*(None,) * 5, *_Second.apply(x, y, h, matrix, g, *cotangents, wanted, *ctx.rest), *(None,) * 5)


def _of_kernel(wanted: str) -> str:
    """The slots of the kernel's gradients that these need."""
    return "".join(slot for slot, by in (("x", "x"), ("y", "y"), ("w", "hm"), ("g", "g")) if set(by) & set(wanted))


def _sum(before: Maybe, more: Tensor) -> Tensor:
    """Their sum, in the place of the first if there is one."""
    return more if before is None else before.add_(more)


class Sums:
    """The gradients of all edges, gathered part by part; zero where no part adds."""

    def __init__(self, wanted: str, whole: Graph, multiply: Multiply, *, x: Tensor, h: Tensor, m: Tensor) -> None:
        self.multiply = multiply
        shapes = {slot: whole.shapes[slot] for slot in "xyg"} | {"h": tuple(h.shape), "m": tuple(m.shape)}
        self.found = {slot: zeros(shapes[slot], x) for slot in _SLOTS + "g" if slot in wanted}

    def add(self, part: Part, found: dict[str, Tensor], terms: Any) -> None:
        """Gradients of a part; terms: (gradient of w, what multiplies it for h, and for the matrix), None for none."""
        if "x" in self.found and "x" in found:
            self.found["x"] += found["x"]
        if "y" in self.found and "y" in found:
            part.write(self.found["y"], found["y"])
        if "g" in self.found and "g" in found:
            self.found["g"][part.begin : part.end] = found["g"]
        of_h = None
        for gw, by_h, by_m in terms:
            if "h" in self.found and gw is not None and by_h is not None:
                of_h = _sum(of_h, self.multiply.rows(gw, by_h.t()))
            if "m" in self.found and gw is not None and by_m is not None:
                self.found["m"] += self.multiply.sums(by_m, gw)
        if of_h is not None:
            part.write(self.found["h"], of_h)
