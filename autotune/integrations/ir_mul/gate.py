"""``e3nn.nn.Gate`` in layout ``ir_mul``: every component of a block times one row of gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotune.integrations.ir_mul.outline import check_same
from autotune.integrations.ir_mul.stand_in import Draw, NodeStandIn
from autotune.workload.tensors import relayout
from kernelgen.errors import UnsupportedError
from kernelgen.problem.irreps import blocks_of

Slice = tuple[int, int]  # begin and length


class IrMulGate(NodeStandIn):
    """Replaces one gate; its activations stay e3nn's."""

    original: Any
    detail = "blocks times gates in layout ir_mul"

    def __init__(self, original: Any, **_: Any) -> None:
        super().__init__()
        cut = original.sc.cut
        check_same(cut.irreps_in, original.irreps_in, "a gate")
        check_same(original.mul.irreps_out, original.irreps_gated, "a gate's result")
        blocks = blocks_of(str(cut.irreps_in))
        scalars, gates, gated = ([blocks[place] for place in places] for places in cut.instructions)
        if any(block.l == 0 for block in gated):
            raise UnsupportedError(f"a gate multiplies scalars: {original.irreps_gated}")
        self.__dict__["scalars"] = _slices(scalars)
        self.__dict__["gates"] = _slices(gates)
        self.__dict__["gated"] = tuple((block.offset, block.dim, block.mul) for block in gated)
        self._take_place_of(original)
        self._keep_children_of(original)

    def forward(self, features: Tensor) -> Tensor:
        """``[nodes, irreps_in.dim]`` -> ``[nodes, irreps_out.dim]``."""
        original = self.original
        parts = [original.act_scalars(_joined(features, self.scalars))]
        if self.gated:
            gates, at = original.act_gates(_joined(features, self.gates)), 0
            for offset, dim, mul in self.gated:
                block = features.narrow(1, offset, dim * mul).unflatten(1, (dim, mul))
                parts.append((block * gates.narrow(1, at, mul).unsqueeze(1)).flatten(1))
                at += mul
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def both_results(self, draw: Draw) -> tuple[Tensor, Tensor]:
        irreps = (str(self.original.irreps_in), str(self.original.irreps_out))
        (x,) = draw((16, self.original.irreps_in.dim))
        found = self.forward(relayout(x, irreps[0], "mul_ir", "ir_mul"))
        return relayout(found, irreps[1], "ir_mul", "mul_ir"), self.original.forward(x)


def _slices(blocks: list[Any]) -> tuple[Slice, ...]:
    """Where scalars are in a row; neighbours become one slice."""
    found: list[Slice] = []
    for block in blocks:
        if found and sum(found[-1]) == block.offset:
            found[-1] = (found[-1][0], found[-1][1] + block.mul)
        else:
            found.append((block.offset, block.mul))
    return tuple(found)


def _joined(features: Tensor, slices: tuple[Slice, ...]) -> Tensor:
    parts = [features.narrow(1, begin, length) for begin, length in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) if parts else features.narrow(1, 0, 0)
