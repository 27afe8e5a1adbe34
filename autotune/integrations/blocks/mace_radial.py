"""MACE's ``RadialMLP`` without its last layer, which a convolution multiplies by."""

from __future__ import annotations

from typing import Any

import torch
from mace.modules.radial import RadialMLP
from torch import Tensor


class ShortenedRadialMLP(RadialMLP):
    """Gives what goes into the last layer, and a column of ones for that layer's bias."""

    @staticmethod
    def can_shorten(network: Any) -> bool:
        """Whether there is a layer before the last."""
        return len(network.net) > 1 and type(network.net[-1]) is torch.nn.Linear

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs [edges, inputs] -> [edges, hidden + 1]."""
        hidden = self.net[:-1](inputs)
        return torch.cat([hidden, hidden.new_ones(hidden.shape[0], 1)], dim=1)

    def matrix(self) -> Tensor:
        """[hidden + 1, weights]."""
        last = self.net[-1]
        return torch.cat([last.weight, last.bias.unsqueeze(1)], dim=1).t()
