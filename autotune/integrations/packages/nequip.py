"""NequIP's ``TensorProductScatter``. Read in nequip 0.19.1, ``nequip/nn/_tp_scatter_base.py``."""

from __future__ import annotations

from autotune.integrations.convolution_block import RetypedBlock


class TensorProductScatter(RetypedBlock):
    """The block that gathers, multiplies and scatters."""

    module = "nequip.nn._tp_scatter_base"
    names = ("TensorProductScatter",)
    product = "tp"
    fused = "autotune.integrations.blocks.nequip:FusedTensorProductScatter"


BLOCKS = (TensorProductScatter(),)
