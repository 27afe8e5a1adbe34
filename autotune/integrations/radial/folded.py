"""e3nn's ``FullyConnectedNet`` with all its constants in the weights, so that no pass over the edges scales them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from autotune.integrations.ir_mul.stand_in import Draw, NodeStandIn
from autotune.modules.base import autocast
from kernelgen.ops.nodes import gates
from kernelgen.ops.radial.products import multiply_by
from kernelgen.torch_versions import run_eagerly
from kernelgen.tracing import runs_eagerly


class AcceleratedRadial(NodeStandIn):
    """Replaces one ``e3nn.nn.FullyConnectedNet``; its layers keep the weights.

    ``product``, in its dictionary, is one of ``kernelgen.ops.radial.products.EDGE_PRODUCTS``.
    """

    original: Any
    detail = "constants multiply the weights, not the edges"

    def __init__(self, original: Any, **_: Any) -> None:
        super().__init__()
        self._take_place_of(original)
        self._keep_children_of(original)

    def forward(self, x: Tensor) -> Tensor:
        """The network's output; if the convolution multiplies by the last layer's :meth:`matrix`, what goes into it."""
        layers: list[Any] = list(self._modules.values())
        if self.__dict__.get("stops_early"):
            layers.pop()
        multiply = multiply_by(self.__dict__.get("product", "fp16x3"))
        scale = 1.0
        for layer in layers:
            x, weight = autocast(x, layer.weight)
            scale /= (layer.h_in * layer.var_in) ** 0.5
            x = multiply.rows(x, weight * (scale if layer.act is not None else scale * layer.var_out**0.5))
            scale = 1.0
            if layer.act is not None:
                x = few_pass_silu(x) if layer.act.f is silu else layer.act.f(x)
                scale = layer.var_out**0.5 * (1.0 if layer.act._is_id else layer.act.cst)
        return x if scale == 1.0 or self.__dict__.get("stops_early") else x * scale

    def matrix(self) -> Tensor:
        """The last layer's weights [hidden, weights] with all constants after the last activation."""
        layers: list[Any] = list(self._modules.values())
        *before, last = layers
        scale = (last.var_out / (last.h_in * last.var_in)) ** 0.5
        if before and before[-1].act is not None:
            act = before[-1].act
            scale *= before[-1].var_out ** 0.5 * (1.0 if act._is_id else act.cst)
        return last.weight * scale

    @property
    def can_stop_early(self) -> bool:
        """Whether the last layer is a matrix product alone, after at least one other."""
        layers: list[Any] = list(self._modules.values())
        return len(layers) > 1 and layers[-1].act is None

    def both_results(self, draw: Draw) -> tuple[Tensor, Tensor]:
        (x,) = draw((16, self.original.hs[0]))
        return self.forward(x), self.original.forward(x)


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
