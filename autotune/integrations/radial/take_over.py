"""Finds the blocks whose radial network gives the weights of a convolution, and moves the last layer over there.

Every file of ``packages/`` may have ``RADIAL_BLOCKS``: its kinds of such blocks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from autotune.integrations.convolution_block import home_of
from autotune.integrations.radial.networks import lengthen, shorten
from autotune.integrations.stand_ins import AcceleratedConvolution
from kernelgen.folder import collected


class RadialBlock(NamedTuple):
    """One kind of block, by its class. network, convolution: where both are in it; nobody else calls the network."""

    module: str
    names: tuple[str, ...]
    network: str
    convolution: str

    def matches(self, block: torch.nn.Module) -> bool:
        """Whether it is such a block, or one whose class Equitune changed."""
        kinds = ((home_of(kind), kind.__qualname__) for kind in type(block).__mro__)
        return any(module == self.module and name in self.names for module, name in kinds)


@functools.cache
def _known() -> tuple[RadialBlock, ...]:
    return tuple(one for found in collected("autotune.integrations.packages", "RADIAL_BLOCKS") for one in found)


def form_weights_inside(model: torch.nn.Module, **how: Any) -> int:
    """Have convolutions form the weights of their edges; the number of those that do.

    how: options of :func:`autotune.modules.radial_convolution.convolve_radial`, with the ``product``.
    """
    count = 0
    for block in list(model.modules()):
        for kind in _known():
            if kind.matches(block):
                convolution, network = block.get_submodule(kind.convolution), block.get_submodule(kind.network)
                if isinstance(convolution, AcceleratedConvolution) and shorten(network):
                    convolution.form_weights_of(network, **how)
                    count += 1
    return count


def undo_weights_inside(model: torch.nn.Module) -> None:
    """Have all radial networks give weights again. The convolutions are replaced afterwards."""
    for module in model.modules():
        lengthen(module)
