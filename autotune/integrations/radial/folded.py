"""e3nn's ``FullyConnectedNet`` with all its constants in the weights, so that no pass over the edges scales them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.nn.utils import parametrize

from autotune.integrations.ir_mul.stand_in import Draw, NodeStandIn
from autotune.integrations.stand_ins import has_hooks
from autotune.modules.base import autocast
from kernelgen.compat import FullyConnectedNet
from kernelgen.ops.edge_networks import few_pass_silu, hidden_features, is_one_kernel
from kernelgen.ops.radial_convolution import multiply_by


class AcceleratedRadial(NodeStandIn, FullyConnectedNet):
    """Replaces one ``e3nn.nn.FullyConnectedNet``; its layers keep the weights.

    ``product``, in its dictionary, is one of ``kernelgen.ops.radial_convolution.EDGE_PRODUCTS``; ``in_one_kernel`` says
    whether hidden layers are (``kernelgen.ops.edge_networks``), ``shortened`` whether a convolution would multiply by
    the last one.
    """

    original: Any
    detail = "constants multiply the weights, not the edges"

    def __init__(self, original: Any, **_: Any) -> None:
        torch.nn.Module.__init__(self)
        self._take_place_of(original)
        self._keep_children_of(original)

    def forward(self, x: Tensor) -> Tensor:
        """The network's output; if the convolution multiplies by the last layer's :meth:`matrix`, what goes into it."""
        layers: list[Any] = list(self._modules.values())
        if not all(map(is_e3nn_layer, layers)):
            return super().forward(x)
        if stops_early := self.stops_early:
            layers.pop()
        multiply = multiply_by(self.__dict__.get("product", "fp16x3"))
        x, layers, scale = self._in_one_kernel(x, layers) if self.__dict__.get("in_one_kernel") else (x, layers, 1.0)
        for layer in layers:
            x, weight = autocast(x, layer.weight)
            x = multiply.rows(x, weight * (scale * _factor(layer)))
            scale = 1.0
            if layer.act is not None:
                x = few_pass_silu(x) if layer.act.f is silu else layer.act.f(x)
                scale = _factor_after(layer)
        return x if scale == 1.0 or stops_early else x * scale

    def _in_one_kernel(self, x: Tensor, layers: list[Any]) -> tuple[Tensor, list[Any], float]:
        """What the first layers with SiLU give, the layers that are left, and the factor of their input."""
        matrices, factors, scale = [], [], 1.0
        for layer in itertools.takewhile(lambda layer: layer.act is not None and layer.act.f is silu, layers):
            matrices.append(layer.weight)
            factors.append(scale * _factor(layer))
            scale = _factor_after(layer)
        if not is_one_kernel(x, matrices, self.training):
            return x, layers, 1.0
        return hidden_features(x, matrices, factors), layers[len(matrices) :], scale

    def matrix(self) -> Tensor:
        """The last layer's weights [hidden, weights] with all constants after the last activation."""
        layers: list[Any] = list(self._modules.values())
        *before, last = layers
        scale = _factor(last)
        if before and before[-1].act is not None:
            scale *= _factor_after(before[-1])
        return last.weight * scale

    @property
    def stops_early(self) -> bool:
        """Whether the convolution multiplies by the last layer's matrix."""
        return bool(self.__dict__.get("shortened")) and can_stop_early(self)

    def both_results(self, draw: Draw) -> tuple[Tensor, Tensor]:
        (x,) = draw((16, self.original.hs[0]))
        return self.forward(x), self.original.forward(x)


def is_e3nn_layer(layer: Any) -> bool:
    """Whether it is a layer as e3nn makes it, whose weights may be read in the place of a call."""
    kind = type(layer)
    if kind.__name__ != "_Layer":  # torch's question takes long, and each call asks
        kind = parametrize.type_before_parametrizations(layer)
    return kind.__name__ == "_Layer" and "forward" not in layer.__dict__ and not has_hooks(layer)


def can_stop_early(network: Any) -> bool:
    """Whether all are e3nn's layers, the last one is a matrix product alone, and no hook expects its weights."""
    layers: list[Any] = list(network._modules.values())
    are_known = len(layers) > 1 and all(map(is_e3nn_layer, layers))
    return are_known and layers[-1].act is None and not has_hooks(network)


def _factor(layer: Any) -> float:
    """The constant of a layer's product; of a last one without activation, that of its output too."""
    return float(((layer.var_out if layer.act is None else 1.0) / (layer.h_in * layer.var_in)) ** 0.5)


def _factor_after(layer: Any) -> float:
    """The constant of an activation."""
    return float(layer.var_out**0.5 * (1.0 if layer.act._is_id else layer.act.cst))
