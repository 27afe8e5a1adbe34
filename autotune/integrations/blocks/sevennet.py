"""SevenNet's ``IrrepsConvolution`` with gather, product and sum as one convolution."""

from __future__ import annotations

from typing import Any

import sevenn._keys as KEY
import torch
from sevenn.nn.convolution import IrrepsConvolution


class FusedIrrepsConvolution(IrrepsConvolution):
    """``convolution`` is an :class:`autotune.integrations.stand_ins.AcceleratedConvolution`."""

    def forward(self, data: dict[str, Any]) -> dict[str, Any]:
        """As SevenNet's, from ``data`` to ``data`` with new node features."""
        weight = self.weight_nn(data[self.key_weight_input])
        x = data[self.key_x]
        if self.is_parallel:
            x = torch.cat([x, data[KEY.NODE_FEATURE_GHOST]])
        receiver, sender = data[self.key_edge_idx][0], data[self.key_edge_idx][1]
        x = self.convolution(x, data[self.key_filter], weight, sender, receiver)
        x = x.div(self.denominator)
        if self.is_parallel:
            x = torch.tensor_split(x, data[KEY.NLOCAL])[0]
        data[self.key_x] = x
        return data
