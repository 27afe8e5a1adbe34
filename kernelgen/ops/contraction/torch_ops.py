"""The torch ops ``equitune::sc_*``, which make symmetric contractions visible to fake tensors, compile and export.

An op gets its operator as text (``ContractionOperator.text``), from which any process can rebuild it. Gradients that
``outputs`` does not name are empty tensors. See ``kernelgen.ops.contraction.operator``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernelgen.errors import UnsupportedError
from kernelgen.ops.registry import resolve
from kernelgen.ops.torch_ops import HESSIAN_PRODUCTS, define, only, sums_of, used_slots
from kernelgen.ops.transforms import call
from kernelgen.terms.contraction_statements import FORWARD, contraction_backward, contraction_double_backward

Maybe = Tensor | None


def _sc_forward(x: Tensor, w: Tensor, elements: Tensor, spec: str) -> Tensor:
    return resolve(spec).for_size(x.shape[0]).run(FORWARD, {"x": x, "w": w}, elements)["g"]


def _sc_backward(x: Tensor, w: Tensor, g: Tensor, elements: Tensor, outputs: str, spec: str) -> tuple[Tensor, ...]:
    found = resolve(spec).for_size(x.shape[0]).run(contraction_backward(outputs), {"x": x, "w": w, "g": g}, elements)
    return tuple(found.get(slot, x.new_empty(0)) for slot in "xw")


def _sc_double_backward(
    x: Tensor, w: Tensor, g: Tensor, tx: Maybe, tw: Maybe, elements: Tensor, outputs: str, spec: str
) -> tuple[Tensor, ...]:
    direction = contraction_double_backward("x" * (tx is not None) + "w" * (tw is not None), outputs)
    found = resolve(spec).for_size(x.shape[0]).run(direction, {"x": x, "w": w, "g": g, "tx": tx, "tw": tw}, elements)
    return tuple(found.get(slot, x.new_empty(0)) for slot in "xwg")


def _fake_forward(x: Tensor, w: Tensor, elements: Tensor, spec: str) -> Tensor:
    return x.new_empty((x.shape[0], resolve(spec).widths["g"]))


def _fake_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """Of both gradient ops: outputs have the shapes of x, w and, for the second one, g."""
    slots, outputs = ("xw" if len(arguments) == 6 else "xwg"), arguments[-2]
    return tuple(
        like.new_empty(like.shape if slot in outputs else (0,)) for slot, like in zip(slots, arguments, strict=False)
    )


def _setup_forward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    *saved, ctx.spec = inputs
    ctx.save_for_backward(*saved)


def _needed(ctx: Any, slots: str) -> str:
    return "".join(slot for slot, needed in zip(slots, ctx.needs_input_grad, strict=False) if needed)


def _backward_of_forward(ctx: Any, g: Maybe) -> tuple:
    outputs = _needed(ctx, "xw")
    if g is None or not outputs:
        return None, None, None, None
    x, w, elements = ctx.saved_tensors
    return (*only(call("sc_backward", x, w, g, elements, outputs, ctx.spec), "xw", outputs), None, None)


def _setup_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    *saved, ctx.outputs, ctx.spec = inputs
    ctx.save_for_backward(*saved)


def _backward_of_backward(ctx: Any, *tangents: Maybe) -> tuple:
    tx, tw = (t if slot in ctx.outputs else None for slot, t in zip("xw", tangents, strict=True))
    outputs = _needed(ctx, "xwg")
    if not outputs or (tx is None and tw is None):
        return (None,) * 6
    x, w, g, elements = ctx.saved_tensors
    found = call("sc_double_backward", x, w, g, tx, tw, elements, outputs, ctx.spec)
    return (*only(found, "xwg", outputs), None, None, None)


def _jvp_of_forward(ctx: Any, tx: Maybe, tw: Maybe, *_: None) -> Tensor:
    """The change along the tangents is the gradient of <tx, dF/dx> + <tw, dF/dw> with respect to g, for any g."""
    x, w, elements = ctx.saved_tensors
    g = x.new_zeros((x.shape[0], resolve(ctx.spec).widths["g"]))
    return call("sc_double_backward", x, w, g, tx, tw, elements, "g", ctx.spec)[2]


def _jvp_of_backward(ctx: Any, tx: Maybe, tw: Maybe, tg: Maybe, *_: None) -> tuple[Tensor, ...]:
    """The double backward of the tangents, which equals the change of the gradients by symmetry; and dF(x, w, tg)."""
    x, w, *_ = ctx.saved_tensors
    found = _along_tangents(ctx, (tx, tw, tg), ctx.outputs)
    zeros = [t.new_zeros(t.shape if slot in ctx.outputs else (0,)) for slot, t in (("x", x), ("w", w))]
    return tuple(zero if change is None else change for zero, change in zip(zeros, found, strict=True))


def _along_tangents(ctx: Any, tangents: tuple[Maybe, Maybe, Maybe], outputs: str) -> tuple[Maybe, ...]:
    """The changes of the gradients by x and w along tangents of x, w and g (None: zero), by differentiable ops."""
    x, w, g, elements = ctx.saved_tensors
    tx, tw, tg = tangents
    terms: list[tuple[Maybe, ...]] = []
    if outputs and not (tx is None and tw is None):
        found = call("sc_double_backward", x, w, g, tx, tw, elements, outputs, ctx.spec)
        terms.append(only(found[:2], "xw", outputs))
    if outputs and tg is not None:
        terms.append(only(call("sc_backward", x, w, tg, elements, outputs, ctx.spec), "xw", outputs))
    return sums_of(terms, 2)


def _setup_double_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    x, w, g, tx, tw, elements, ctx.outputs, ctx.spec = inputs
    ctx.along = "x" * (tx is not None) + "w" * (tw is not None)
    ctx.save_for_backward(x, w, g, elements)


def _backward_of_double_backward(ctx: Any, *cotangents: Maybe) -> tuple:
    """By the tangents, in which it is linear, it is the change of the first gradients along the cotangents."""
    if used_slots(ctx, "xwg"):
        return _no_third_derivative()
    tx, tw, tg = (t if slot in ctx.outputs else None for slot, t in zip("xwg", cotangents, strict=True))
    found = _along_tangents(ctx, (tx, tw, tg), used_slots(ctx, ctx.along, first=3))
    return (None, None, None, *found, None, None, None)


def _no_third_derivative(*_: Any) -> tuple:
    raise UnsupportedError(
        f"third derivatives of a symmetric contraction are not generated, {HESSIAN_PRODUCTS}; detach the second "
        "derivatives, or differentiate the package's own module instead"
    )


def _one_by_one(arguments: tuple, in_dims: tuple) -> None:
    """The rule for vmap: weights, and so their gradients, are shared by all nodes."""


_X_W_ELEMENTS = "Tensor x, Tensor w, Tensor elements, str spec"
define(
    *("sc_forward", f"({_X_W_ELEMENTS}) -> Tensor"),
    *(_sc_forward, _fake_forward, _backward_of_forward, _setup_forward),
    jvp=_jvp_of_forward,
    rows=_one_by_one,
)
define(
    *("sc_backward", "(Tensor x, Tensor w, Tensor g, Tensor elements, str outputs, str spec) -> (Tensor, Tensor)"),
    *(_sc_backward, _fake_gradients, _backward_of_backward, _setup_backward),
    jvp=_jvp_of_backward,
    rows=_one_by_one,
)
define(
    "sc_double_backward",
    "(Tensor x, Tensor w, Tensor g, Tensor? tx, Tensor? tw, Tensor elements, str outputs, str spec)"
    " -> (Tensor, Tensor, Tensor)",
    *(_sc_double_backward, _fake_gradients, _backward_of_double_backward, _setup_double_backward),
    jvp=_no_third_derivative,
    rows=_one_by_one,
)
