"""e3nn's ``FullyConnectedNet`` without its last layer, which a convolution multiplies by."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernelgen.e3nn_import import FullyConnectedNet


class ShortenedFullyConnectedNet(FullyConnectedNet):
    """Gives what goes into the last layer."""

    @staticmethod
    def can_shorten(network: Any) -> bool:
        """Whether the last layer is a matrix product alone, after at least one other."""
        layers: list[Any] = list(network._modules.values())
        return len(layers) > 1 and all(type(layer).__name__ == "_Layer" for layer in layers) and layers[-1].act is None

    def forward(self, x: Tensor) -> Tensor:
        """x [edges, inputs] -> [edges, hidden]."""
        for layer in list(self._modules.values())[:-1]:
            x = layer(x)
        return x

    def matrix(self) -> Tensor:
        """[hidden, weights]."""
        *_, last = self._modules.values()
        return last.weight / (last.h_in * last.var_in / last.var_out) ** 0.5
