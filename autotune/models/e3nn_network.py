"""e3nn's ``FullyConnectedNet`` without its last layer, which a convolution multiplies by."""

from __future__ import annotations

from torch import Tensor

from autotune.models.radial import can_stop_early
from kernelgen.compat import FullyConnectedNet


class ShortenedFullyConnectedNet(FullyConnectedNet):
    """Gives what goes into the last layer."""

    stops_early = property(can_stop_early)

    def forward(self, x: Tensor) -> Tensor:
        """x [edges, inputs] -> [edges, hidden]; all layers' output once the last one cannot be left out."""
        for layer in list(self._modules.values())[: -1 if self.stops_early else None]:
            x = layer(x)
        return x

    def matrix(self) -> Tensor:
        """[hidden, weights]."""
        *_, last = self._modules.values()
        return last.weight / (last.h_in * last.var_in / last.var_out) ** 0.5
