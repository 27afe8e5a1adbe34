"""Spherical harmonics under autograd: vectors enter, values that differentiate twice leave.

Tensors that torch traces, fakes or transforms go through the ops of ``kernelgen.ops.harmonics_ops``; plain ones are run
here, past the dispatcher, and only those gradients are computed that a pass of autograd uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelgen.ops.autograd import will_run
from kernelgen.ops.harmonics_ops import no_third_derivative
from kernelgen.ops.torch_ops import only
from kernelgen.ops.transforms import call
from kernelgen.tracing import is_eager, is_transforming

if TYPE_CHECKING:
    from kernelgen.ops.harmonics_operator import HarmonicsOperator


def harmonics(v: Tensor, operator: HarmonicsOperator) -> Tensor:
    """The operator's values ``[rows, dim_out]`` of v ``[rows, 3]``, differentiable twice."""
    if not is_eager(v):
        return call("sh_forward", v, operator.text)
    if torch.is_grad_enabled() and v.requires_grad:
        return _Forward.apply(v, operator)
    return operator.run_forward(v)


def gradient(v: Tensor, g: Tensor, operator: HarmonicsOperator) -> Tensor:
    """The gradient ``[rows, 3]`` of sum_i g_i Y_i(v), differentiable once in v and g, in a backward pass."""
    if is_transforming(g):
        return call("sh_backward", v, g, operator.text)
    return _Backward.apply(v, g, operator) if torch.is_grad_enabled() else operator.run_backward(v, g)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, operator: HarmonicsOperator) -> Tensor:
        ctx.save_for_backward(v)
        ctx.operator = operator
        return operator.run_forward(v)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (v,) = ctx.saved_tensors
        return gradient(v, g, ctx.operator), None


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, g: Tensor, operator: HarmonicsOperator) -> Tensor:
        ctx.save_for_backward(v, g)
        ctx.operator = operator
        return operator.run_backward(v, g)

    @staticmethod
    def backward(ctx: Any, t: Tensor) -> tuple[Tensor | None, ...]:
        nodes = zip("xg", ctx.needs_input_grad, ctx.next_functions, strict=False)
        outputs = "".join(slot for slot, needed, node in nodes if needed and will_run(node[0]))
        if not outputs:
            return None, None, None
        if is_transforming(t):
            found = call("sh_double_backward", *ctx.saved_tensors, t, outputs, ctx.operator.text)
            return (*only(found, "xg", outputs), None)
        return (*_Second.apply(*ctx.saved_tensors, t, outputs, ctx.operator), None)


class _Second(torch.autograd.Function):
    """Second derivatives, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, g: Tensor, t: Tensor, outputs: str, operator: HarmonicsOperator) -> tuple:
        found = operator.run_double_backward(v, g, t, outputs)
        return found.get("x"), found.get("g")

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple:
        return no_third_derivative()
