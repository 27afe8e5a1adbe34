"""NequIP's ``TensorProductScatter`` as one convolution."""

from __future__ import annotations

from nequip.nn._tp_scatter_base import TensorProductScatter
from torch import Tensor


class FusedTensorProductScatter(TensorProductScatter):
    """``tp`` is an :class:`autotune.integrations.stand_ins.AcceleratedConvolution`."""

    def forward(self, x: Tensor, edge_attr: Tensor, edge_weight: Tensor, edge_dst: Tensor, edge_src: Tensor) -> Tensor:
        """As NequIP's: gather by ``edge_src``, sum by ``edge_dst``."""
        return self.tp(x, edge_attr, edge_weight, edge_src, edge_dst)
