"""The torch ops ``equitune::sh_*``, which make spherical harmonics visible to fake tensors, compile and export.

An op gets its operator as text (``HarmonicsOperator.text``), from which any process can rebuild it. Gradients that
``outputs`` does not name are empty tensors. Eager calls bypass these ops: see ``kernelgen.ops.harmonics_operator``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kernelgen.errors import UnsupportedError
from kernelgen.ops.registry import resolve
from kernelgen.ops.torch_ops import HESSIAN_PRODUCTS, Maybe, define, only, used_slots
from kernelgen.ops.transforms import Rows, call

SCHEMAS = {
    "sh_forward": "(Tensor v, str spec) -> Tensor",
    "sh_backward": "(Tensor v, Tensor g, str spec) -> Tensor",
    "sh_double_backward": "(Tensor v, Tensor g, Tensor t, str outputs, str spec) -> (Tensor, Tensor)",
}


def no_third_derivative(*_: Any) -> tuple:
    """Refuse the gradient of second derivatives."""
    raise UnsupportedError(
        f"third derivatives of spherical harmonics are not generated, {HESSIAN_PRODUCTS}; detach the second "
        "derivatives, or differentiate e3nn.o3.spherical_harmonics instead"
    )


def _sh_forward(v: Tensor, spec: str) -> Tensor:
    return resolve(spec).for_size(v.shape[0]).run_forward(v)


def _sh_backward(v: Tensor, g: Tensor, spec: str) -> Tensor:
    return resolve(spec).for_size(v.shape[0]).run_backward(v, g)


def _sh_double_backward(v: Tensor, g: Tensor, t: Tensor, outputs: str, spec: str) -> tuple[Tensor, Tensor]:
    found = resolve(spec).for_size(v.shape[0]).run_double_backward(v, g, t, outputs)
    return found.get("x", v.new_empty(0)), found.get("g", v.new_empty(0))


def _fake_forward(v: Tensor, spec: str) -> Tensor:
    return v.new_empty((v.shape[0], resolve(spec).dim_out))


def _fake_backward(v: Tensor, g: Tensor, spec: str) -> Tensor:
    return v.new_empty(v.shape)


def _fake_double_backward(v: Tensor, g: Tensor, t: Tensor, outputs: str, spec: str) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape if "x" in outputs else (0,)), v.new_empty(g.shape if "g" in outputs else (0,))


def _setup_forward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    v, ctx.spec = inputs
    ctx.save_for_backward(v)


def _backward_of_forward(ctx: Any, g: Tensor) -> tuple:
    (v,) = ctx.saved_tensors
    return call("sh_backward", v, g, ctx.spec), None


def _setup_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    v, g, ctx.spec = inputs
    ctx.save_for_backward(v, g)


def _backward_of_backward(ctx: Any, t: Tensor) -> tuple:
    outputs = "".join(slot for slot, needed in zip("xg", ctx.needs_input_grad, strict=False) if needed)
    found = call("sh_double_backward", *ctx.saved_tensors, t, outputs, ctx.spec)
    return (*only(found, "xg", outputs), None)


def _jvp_of_forward(ctx: Any, t: Tensor, _: None) -> Tensor:
    """The change along t equals the gradient of <t, first gradient> with respect to g, for any g."""
    (v,) = ctx.saved_tensors
    g = v.new_zeros((v.shape[0], resolve(ctx.spec).dim_out))
    return call("sh_double_backward", v, g, t, "g", ctx.spec)[1]


def _jvp_of_backward(ctx: Any, t: Tensor, tg: Tensor, _: None) -> Tensor:
    found = along_tangents(ctx.saved_tensors, (t, tg), ctx.spec)
    assert found is not None
    return found


def along_tangents(primal: tuple[Tensor, ...], tangents: tuple[Maybe, ...], spec: str) -> Maybe:
    """The change of the first gradient along tangents of v and g (None: zero), by differentiable ops."""
    (v, g), (t, tg) = primal, tangents
    terms = [] if t is None else [call("sh_double_backward", v, g, t, "x", spec)[0]]
    if tg is not None:
        terms.append(call("sh_backward", v, tg, spec))
    return functools.reduce(torch.add, terms) if terms else None


def _setup_double_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:2])
    ctx.outputs, ctx.spec = inputs[3:]


def _backward_of_double_backward(ctx: Any, tx: Maybe, tg: Maybe) -> tuple:
    """By the tangent, in which it is linear, it is the change of the first gradient along the cotangents."""
    if used_slots(ctx, "xg"):
        return no_third_derivative()
    used = tx if "x" in ctx.outputs else None, tg if "g" in ctx.outputs else None
    return None, None, along_tangents(ctx.saved_tensors, used, ctx.spec), None, None


def _rows(count: int) -> Rows:
    """The rule for vmap: all tensors of an op have one row a vector."""
    return lambda arguments, in_dims: tuple(range(count))


define(
    *("sh_forward", SCHEMAS["sh_forward"], _sh_forward, _fake_forward, _backward_of_forward, _setup_forward),
    jvp=_jvp_of_forward,
    rows=_rows(1),
)
define(
    *("sh_backward", SCHEMAS["sh_backward"], _sh_backward, _fake_backward, _backward_of_backward, _setup_backward),
    jvp=_jvp_of_backward,
    rows=_rows(2),
)
define(
    *("sh_double_backward", SCHEMAS["sh_double_backward"], _sh_double_backward, _fake_double_backward),
    *(_backward_of_double_backward, _setup_double_backward),
    jvp=no_third_derivative,
    rows=_rows(3),
)
