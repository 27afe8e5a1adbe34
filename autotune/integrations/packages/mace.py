"""MACE's interaction blocks: with the attribute ``conv_fusion`` they call ``conv_tp`` with the graph.

Read in mace-torch 0.3.16, ``mace/modules/blocks.py``. Without the attribute a block gathers and sums itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotune.integrations.acceleration import CONTRACTIONS
from autotune.integrations.contraction import AcceleratedContraction, why_contraction_stays
from autotune.integrations.convolution_block import ConvolutionBlock, home_of
from autotune.integrations.exchange import Exchange, ExchangedConvolution
from autotune.integrations.packages.package_product import PackageProduct
from autotune.integrations.radial.take_over import RadialBlock
from autotune.integrations.stand_ins import AcceleratedConvolution

# The value of ``conv_fusion`` that says whose convolution it is.
_OURS = "equitune"


class MaceConvolution(AcceleratedConvolution):
    """The convolution as MACE calls it."""

    def forward(self, node_feats: Tensor, edge_attrs: Tensor, tp_weights: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        """``edge_index`` [2, edges]: senders, then receivers."""
        return super().forward(node_feats, edge_attrs, tp_weights, edge_index[0], edge_index[1])


class ConvertedConvolution(ExchangedConvolution):
    """The same, in the place of a library's that a conversion of MACE's put there."""

    def forward(self, node_feats: Tensor, edge_attrs: Tensor, tp_weights: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
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


class ConvertedBlock(Exchange):
    """An interaction block after ``convert_e3nn_cueq``, ``convert_e3nn_oeq`` or both: no weights are in its product."""

    product = InteractionBlock.product
    _LIBRARIES = {"cuequivariance_torch": "cuEquivariance", "openequivariance": "OpenEquivariance"}

    def library(self, block: torch.nn.Module) -> str:
        if not ConvolutionBlock.matches(_INTERACTION, block):
            return ""
        return self._LIBRARIES.get(type(getattr(block, self.product)).__module__.split(".")[0], "")

    def stand_in(self, block: Any, **options: Any) -> ExchangedConvolution:
        from mace.modules.irreps_tools import tp_out_irreps_with_instructions
        from mace.modules.wrapper_ops import get_layout

        irreps = (block.edge_irreps, block.edge_attrs_irreps)
        out, instructions = tp_out_irreps_with_instructions(*irreps, block.target_irreps)
        options["layout"] = get_layout(block.cueq_config)
        return ConvertedConvolution(
            getattr(block, self.product),
            **{"irreps_in1": irreps[0], "irreps_in2": irreps[1], "irreps_out": out, "instructions": instructions},
            **options,
        )

    def convolved(self, block: Any, x: Tensor, y: Tensor, weights: Tensor, edges: Tensor) -> Tensor:
        product = getattr(block, self.product)
        if hasattr(block, "conv_fusion"):
            return product(x, y, weights, edges)
        messages = product(x[edges[0]], y, weights)
        return messages.new_zeros(len(x), messages.shape[1]).index_add(0, edges[1], messages)

    def fuse(self, block: torch.nn.Module) -> None:
        if not hasattr(block, "conv_fusion"):  # the conversion's own value stays
            _INTERACTION.fuse(block)


_INTERACTION = InteractionBlock()


def block_of(block: torch.nn.Module) -> InteractionBlock | None:
    """The kind of an interaction block with e3nn's product in it."""
    return _INTERACTION if _INTERACTION.matches(block) else None


def contraction_of_mace(module: torch.nn.Module) -> str | None:
    """Empty for MACE's symmetric contraction, the reason for one that must stay; None for any other module."""
    kind = type(module)
    if (home_of(kind), kind.__qualname__) != ("mace.modules.symmetric_contraction", "SymmetricContraction"):
        return None
    return why_contraction_stays(module)


BLOCKS = (_INTERACTION,)
# MACE multiplies what the network gives by a cutoff, which may as well multiply what goes into its last layer.
RADIAL_BLOCKS = (RadialBlock(InteractionBlock.module, InteractionBlock.names, "conv_tp_weights", "conv_tp"),)
EXCHANGES = (ConvertedBlock(),)
PRODUCT = PackageProduct(contraction_of_mace, AcceleratedContraction, CONTRACTIONS)
