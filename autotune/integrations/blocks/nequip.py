"""NequIP's blocks: the convolution as one, self-connections by type, the radial network without its last layer."""

from __future__ import annotations

from typing import Any, cast

import torch
from nequip.data import AtomicDataDict
from nequip.nn._tp_scatter_base import TensorProductScatter
from nequip.nn.interaction_block import InteractionBlock
from nequip.nn.mlp import ScalarMLPFunction
from torch import Tensor

from autotune.integrations.ir_mul.typed_product import NODE_TYPES
from autotune.integrations.radial.folded import few_pass_silu


class FusedTensorProductScatter(TensorProductScatter):
    """``tp`` is an :class:`autotune.integrations.stand_ins.AcceleratedConvolution`."""

    def forward(self, x: Tensor, edge_attr: Tensor, edge_weight: Tensor, edge_dst: Tensor, edge_src: Tensor) -> Tensor:
        """As NequIP's: gather by ``edge_src``, sum by ``edge_dst``."""
        return self.tp(x, edge_attr, edge_weight, edge_src, edge_dst)


class TypedInteractionBlock(InteractionBlock):
    """``sc`` is an :class:`autotune.integrations.ir_mul.typed_product.TypedProduct`."""

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        """As NequIP's, whose self-connection also sees the types of the nodes."""
        stock = cast(type[InteractionBlock], type(self).__mro__[1]).forward
        if torch.compiler.is_compiling():
            return stock(self, data)
        token = NODE_TYPES.set(data[AtomicDataDict.ATOM_TYPE_KEY].view(-1))
        try:
            return stock(self, data)
        finally:
            NODE_TYPES.reset(token)


class ShortenedScalarMLP(ScalarMLPFunction):
    """A radial network that gives what goes into its last layer, which the convolution multiplies by."""

    @staticmethod
    def can_shorten(network: Any) -> bool:
        """Whether the last layer is a matrix product alone, after at least one other."""
        layers = network.mlp
        return type(layers) is torch.nn.Sequential and len(layers) > 1 and layers[-1].bias is None

    def forward(self, x: Tensor) -> Tensor:
        """x [edges, inputs] -> [edges, hidden]."""
        for layer in self.mlp[:-1]:
            x = few_pass_silu(x) if type(layer) is torch.nn.SiLU else layer(x)
        return x

    def matrix(self) -> Tensor:
        """[hidden, weights]."""
        last = self.mlp[-1]
        return last.weight * last.alpha
