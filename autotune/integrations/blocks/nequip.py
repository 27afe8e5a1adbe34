"""NequIP's ``TensorProductScatter`` as one convolution, and its radial network without the last layer."""

from __future__ import annotations

from typing import Any

import torch
from nequip.nn._tp_scatter_base import TensorProductScatter
from nequip.nn.mlp import ScalarMLPFunction
from torch import Tensor


class FusedTensorProductScatter(TensorProductScatter):
    """``tp`` is an :class:`autotune.integrations.stand_ins.AcceleratedConvolution`."""

    def forward(self, x: Tensor, edge_attr: Tensor, edge_weight: Tensor, edge_dst: Tensor, edge_src: Tensor) -> Tensor:
        """As NequIP's: gather by ``edge_src``, sum by ``edge_dst``."""
        return self.tp(x, edge_attr, edge_weight, edge_src, edge_dst)


class ShortenedScalarMLP(ScalarMLPFunction):
    """A radial network that gives what goes into its last layer, which the convolution multiplies by."""

    @staticmethod
    def can_shorten(network: Any) -> bool:
        """Whether the last layer is a matrix product alone, after at least one other."""
        layers = network.mlp
        return type(layers) is torch.nn.Sequential and len(layers) > 1 and layers[-1].bias is None

    def forward(self, x: Tensor) -> Tensor:
        """x [edges, inputs] -> [edges, hidden]."""
        return self.mlp[:-1](x)

    def matrix(self) -> Tensor:
        """[hidden, weights]."""
        last = self.mlp[-1]
        return last.weight * last.alpha
