"""A package's own symmetric contraction in a model in ``ir_mul``, where no kernel takes its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotune.integrations.ir_mul.stand_in import Draw, NodeStandIn
from autotune.workload.workload import relayout
from kernelgen.errors import UnsupportedError
from kernelgen.problem.irreps import blocks_of


class TransposedContraction(NodeStandIn):
    """Calls MACE's ``SymmetricContraction``, with features ``[nodes, components * channels]`` in ``ir_mul``."""

    original: Any
    detail = "the package's own, between two transpositions"

    def __init__(self, original: Any, irreps_in: str, irreps_out: str, **_: Any) -> None:
        super().__init__()
        blocks = blocks_of(irreps_in)
        if len({block.mul for block in blocks}) != 1:
            raise UnsupportedError(f"its input {irreps_in} has blocks with different numbers of channels")
        self.__dict__["shape"] = (sum(block.dim for block in blocks), blocks[0].mul)
        self.__dict__["irreps"] = irreps_out
        self._take_place_of(original)
        self._keep_children_of(original)

    def forward(self, features: Tensor, node_attrs: Tensor) -> Tensor:
        found = self.original.forward(features.unflatten(1, self.shape).transpose(1, 2), node_attrs)
        return relayout(found, self.irreps, "mul_ir", "ir_mul")

    def both_results(self, draw: Draw) -> tuple[Tensor, Tensor]:
        elements = next(self.original.parameters()).shape[0]
        x, attrs = draw((16, *reversed(self.shape)), (16, elements))
        attrs = torch.nn.functional.one_hot(attrs.argmax(1), elements).to(x)
        found = self.forward(x.transpose(1, 2).flatten(1), attrs)
        return relayout(found, self.irreps, "ir_mul", "mul_ir"), self.original.forward(x, attrs)
