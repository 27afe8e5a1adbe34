"""MACE's interaction blocks: with the attribute ``conv_fusion`` they call ``conv_tp`` with the graph.

Read in mace-torch 0.3.16, ``mace/modules/blocks.py``. Without the attribute a block gathers and sums itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.integrations.convolution_block import ConvolutionBlock
from autotune.integrations.stand_ins import AcceleratedConvolution

# The value of ``conv_fusion`` that says whose convolution it is.
_OURS = "equitune"


class MaceConvolution(AcceleratedConvolution):
    """The convolution as MACE calls it."""

    def forward(self, node_feats: Tensor, edge_attrs: Tensor, tp_weights: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        """``edge_index`` [2, edges]: senders, then receivers."""
        return super().forward(node_feats, edge_attrs, tp_weights, edge_index[0], edge_index[1])


class InteractionBlock(ConvolutionBlock):
    """All of MACE's interaction blocks."""

    module = "mace.modules.blocks"
    names = (
        "RealAgnosticInteractionBlock",
        "RealAgnosticResidualInteractionBlock",
        "RealAgnosticDensityInteractionBlock",
        "RealAgnosticDensityResidualInteractionBlock",
        "RealAgnosticAttResidualInteractionBlock",
        "RealAgnosticResidualNonLinearInteractionBlock",
    )
    product = "conv_tp"
    stand_in = MaceConvolution

    def matches(self, block: torch.nn.Module) -> bool:
        return super().matches(block) and not hasattr(block, "conv_fusion")

    def fuse(self, block: torch.nn.Module) -> None:
        block.conv_fusion = _OURS  # type: ignore[assignment]

    def unfuse(self, block: torch.nn.Module) -> bool:
        if block.__dict__.get("conv_fusion") != _OURS:
            return False
        del block.conv_fusion
        return True


BLOCKS = (InteractionBlock(),)
