"""MACE's ``RadialMLP`` without its last layer, which a convolution multiplies by."""

from __future__ import annotations

import torch
from mace.modules.radial import RadialMLP
from torch import Tensor
from torch.nn.utils import parametrize

from autotune.integrations.stand_ins import has_hooks


class ShortenedRadialMLP(RadialMLP):
    """Gives what goes into the last layer, a column of ones for its bias, and zeros up to a multiple of four."""

    @property
    def stops_early(self) -> bool:
        """Whether there is a layer before the last, and the last one's weights may be read in the place of a call."""
        net, last = self.net, self.net[-1]
        is_linear = parametrize.type_before_parametrizations(last) is torch.nn.Linear
        return len(net) > 1 and is_linear and not any(map(has_hooks, (self, net, last)))

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs [edges, inputs] -> [edges, columns], of which the first are the hidden features."""
        if not self.stops_early:
            return super().forward(inputs)
        hidden = self.net[:-1](inputs)
        one = hidden.new_zeros(1, 4 - hidden.shape[1] % 4)
        one[:, 0] = 1
        return torch.cat([hidden, one.expand(hidden.shape[0], -1)], dim=1)

    def matrix(self) -> Tensor:
        """[columns, weights]."""
        last = self.net[-1]
        zeros = last.weight.new_zeros(last.weight.shape[0], 3 - last.in_features % 4)
        return torch.cat([last.weight, last.bias.unsqueeze(1), zeros], dim=1).t()
