"""SiLU of hidden features of edges, in few passes over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernelgen.ops.nodes import gates
from kernelgen.torch_versions import run_eagerly
from kernelgen.tracing import runs_eagerly

_KERNEL = gates.scalar_kernel(gates.SILU)


def few_pass_silu(x: Tensor) -> Tensor:
    """SiLU, whose second derivative takes torch a dozen passes over all edges."""
    return _Silu.apply(x) if x.requires_grad and runs_eagerly(x) else silu(x)


class _Silu(torch.autograd.Function):
    """Its gradient is one pass also where that is differentiated; torch then takes six, and twelve for the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return silu(x)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take torch's own")
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if not runs_eagerly(x, gradients[0]):
            return gradients[0] * _slope(x)
        if torch.is_grad_enabled():
            return _SiluGradient.apply(gradients[0], x)
        return torch.ops.aten.silu_backward.default(gradients[0], x)


class _SiluGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gradient, x)
        return torch.ops.aten.silu_backward.default(gradient, x)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take torch's own")
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        gradient, x = ctx.saved_tensors
        by_gradient, by_x = ctx.needs_input_grad
        is_plain = runs_eagerly(x, tangents[0])
        if is_plain and by_x and gates.takes(x) and not torch.is_grad_enabled():
            # One launch. Channels are one row each, whatever the shape.
            rows = [one.contiguous().view(-1, 1) for one in (x, gradient, tangents[0])]
            of_x, of_gradient = _KERNEL.second(*rows)
            return of_gradient.view(x.shape), of_x.view(x.shape)
        first = _SiluGradient.apply(tangents[0], x) if is_plain else tangents[0] * _slope(x)
        return first if by_gradient else None, tangents[0] * gradient * _curvature(x) if by_x else None


def _slope(x: Tensor) -> Tensor:
    return x.sigmoid() * (1 + x - silu(x))


def _curvature(x: Tensor) -> Tensor:
    """The second derivative: with s the sigmoid, s (1 - s) (2 + x - 2 x s)."""
    s = x.sigmoid()
    return torch.ops.aten.sigmoid_backward(torch.addcmul(x, x, s, value=-2) + 2, s)
