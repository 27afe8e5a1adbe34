"""SevenNet's ``IrrepsConvolution``. Read in sevenn 0.13.0, ``sevenn/nn/convolution.py``."""

from __future__ import annotations

from autotune.integrations.convolution_block import RetypedBlock
from autotune.integrations.radial.take_over import RadialBlock


class IrrepsConvolution(RetypedBlock):
    """The block with the radial network, the product and the sum over a node's edges."""

    module = "sevenn.nn.convolution"
    names = ("IrrepsConvolution",)
    product = "convolution"
    fused = "autotune.integrations.blocks.sevennet:FusedIrrepsConvolution"


BLOCKS = (IrrepsConvolution(),)
RADIAL_BLOCKS = (
    RadialBlock(IrrepsConvolution.module, IrrepsConvolution.names, "weight_nn", IrrepsConvolution.product),
)
