"""Calls of a contraction through autograd, or through the torch ops of ``torch_ops`` if torch traces or transforms.

Everywhere ``operator`` is a :class:`kernelgen.ops.contraction.operator.ContractionOperator`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelgen.ops.autograd import used_slots
from kernelgen.ops.contraction.torch_ops import Maybe
from kernelgen.ops.torch_ops import only
from kernelgen.ops.transforms import call
from kernelgen.terms.contraction_statements import FORWARD, contraction_backward
from kernelgen.tracing import is_eager, is_transforming


def contraction(x: Tensor, w: Tensor, elements: Tensor, operator: Any) -> Tensor:
    """The operator's value, differentiable twice in x and w."""
    if not is_eager(x, w, elements):
        return call("sc_forward", x, w, elements, operator.text)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        return _Forward.apply(x, w, elements, operator)
    return operator.run(FORWARD, {"x": x, "w": w}, elements)["g"]


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, elements: Tensor, operator: Any) -> Tensor:
        ctx.save_for_backward(x, w, elements)
        ctx.operator = operator
        return operator.run(FORWARD, {"x": x, "w": w}, elements)["g"]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        outputs = used_slots(ctx, "xw")
        if not outputs:
            return None, None, None, None
        x, w, elements = ctx.saved_tensors
        if is_transforming(g):
            found = only(call("sc_backward", x, w, g, elements, outputs, ctx.operator.text), "xw", outputs)
        elif torch.is_grad_enabled():
            found = _Backward.apply(x, w, g, elements, outputs, ctx.operator)
        else:
            found = _gradients(x, w, g, elements, outputs, ctx.operator)
        return (*found, None, None)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, g: Tensor, elements: Tensor, outputs: str, operator: Any) -> tuple:
        # A gradient that is not differentiated must arrive as None, so that the kernel omits its tangent.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, g, elements)
        ctx.operator = operator
        return _gradients(x, w, g, elements, outputs, operator)

    @staticmethod
    def backward(ctx: Any, tx: Maybe, tw: Maybe) -> tuple:
        outputs = used_slots(ctx, "xwg")
        if not outputs or (tx is None and tw is None):
            return (None,) * 6
        x, w, g, elements = ctx.saved_tensors
        found = call("sc_double_backward", x, w, g, tx, tw, elements, outputs, ctx.operator.text)
        return (*only(found, "xwg", outputs), None, None, None)


def _gradients(x: Tensor, w: Tensor, g: Tensor, elements: Tensor, outputs: str, operator: Any) -> tuple:
    found = operator.run(contraction_backward(outputs), {"x": x, "w": w, "g": g}, elements)
    return found.get("x"), found.get("w")
