"""NequIP's ``TensorProductScatter``, and the block around it with the radial network.

Read in nequip 0.19.1, ``nequip/nn/_tp_scatter_base.py`` and ``nequip/nn/interaction_block.py``.
"""

from __future__ import annotations

from autotune.integrations.convolution_block import RetypedBlock
from autotune.integrations.radial.take_over import RadialBlock


class TensorProductScatter(RetypedBlock):
    """The block that gathers, multiplies and scatters."""

    module = "nequip.nn._tp_scatter_base"
    names = ("TensorProductScatter",)
    product = "tp"
    fused = "autotune.integrations.blocks.nequip:FusedTensorProductScatter"


BLOCKS = (TensorProductScatter(),)
RADIAL_BLOCKS = (RadialBlock("nequip.nn.interaction_block", ("InteractionBlock",), "edge_mlp", "tp_scatter.tp"),)
