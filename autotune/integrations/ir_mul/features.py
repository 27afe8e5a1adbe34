"""Stand-ins for parts that only arrange features, or scale them by gates; the features that users see."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from autotune.integrations.ir_mul.stand_in import Draw, NodeStandIn
from autotune.workload.workload import relayout, to_mul_ir


class FlatFeatures(NodeStandIn):
    """Replaces MACE's ``reshape_irreps``: the contraction takes rows in ``ir_mul`` as they are."""

    original: Any
    detail = "nothing to do in layout ir_mul"

    def __init__(self, original: Any, **_: Any) -> None:
        super().__init__()
        self._take_place_of(original)

    def forward(self, features: Tensor) -> Tensor:
        return features

    def both_results(self, draw: Draw) -> tuple[Tensor, Tensor]:
        irreps = self.original.irreps
        (x,) = draw((16, irreps.dim))
        found = self.forward(relayout(x, str(irreps), "mul_ir", "ir_mul"))
        return found.unflatten(1, (-1, irreps[0].mul)).transpose(1, 2), self.original.forward(x)


class TaughtGate(NodeStandIn):
    """Replaces MACE's gate by a copy of it that takes ``ir_mul``: a gate has no parameters."""

    original: Any
    detail = "the package's own, told the layout"

    def __init__(self, original: Any, **_: Any) -> None:
        super().__init__()
        gate = copy.copy(original)
        gate._layout_is_ir_mul = True
        self.__dict__["gate"] = gate
        self._take_place_of(original)

    def forward(self, features: Tensor) -> Tensor:
        return self.gate.forward(features)

    def both_results(self, draw: Draw) -> tuple[Tensor, Tensor]:
        irreps = (str(self.original.irreps_in), str(self.original.irreps_out))
        (x,) = draw((16, self.original.irreps_in.dim))
        found = self.forward(relayout(x, irreps[0], "mul_ir", "ir_mul"))
        return relayout(found, irreps[1], "ir_mul", "mul_ir"), self.original.forward(x)


def with_users_descriptors(model: Any, out: dict[str, Tensor]) -> dict[str, Tensor]:
    """A MACE model's results in ``ir_mul`` with ``node_feats``, those of all layers, in e3nn's layout."""
    if out.get("node_feats") is not None:
        irreps = "+".join(str(product.linear.irreps_out) for product in model.products)
        out["node_feats"] = to_mul_ir(out["node_feats"], irreps)
    return out
