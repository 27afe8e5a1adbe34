"""``e3nn.nn.Gate`` in layout ``ir_mul``: every component of a block times one row of gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotune.models.layout import check_same
from autotune.models.stand_ins import NodeStandIn
from kernelgen.errors import UnsupportedError
from kernelgen.ops import gates
from kernelgen.ops.gates import GateKernel, GateRun
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
        scalars, factors, gated = ([blocks[place] for place in places] for places in cut.instructions)
        if any(block.l == 0 for block in gated):
            raise UnsupportedError(f"a gate multiplies scalars: {original.irreps_gated}")
        self.__dict__["scalars"] = _slices(scalars)
        self.__dict__["gates"] = _slices(factors)
        self.__dict__["gated"] = tuple((block.offset, block.dim, block.mul) for block in gated)
        self.__dict__["kernel"] = self._kernel_of(original)
        self._take_place_of(original)
        self._keep_children_of(original)

    def forward(self, features: Tensor) -> Tensor:
        """``[nodes, irreps_in.dim]`` -> ``[nodes, irreps_out.dim]``."""
        return gates.gated(features, self.kernel, self.composed)

    def composed(self, features: Tensor) -> Tensor:
        """The same in operations of torch."""
        original = self.original
        parts = [original.act_scalars(_joined(features, self.scalars))]
        if self.gated:
            factors, at = original.act_gates(_joined(features, self.gates)), 0
            for offset, dim, mul in self.gated:
                block = features.narrow(1, offset, dim * mul).unflatten(1, (dim, mul))
                parts.append((block * factors.narrow(1, at, mul).unsqueeze(1)).flatten(1))
                at += mul
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _kernel_of(self, original: Any) -> GateKernel | None:
        """None for activations that the kernel does not know."""
        scalars, at = _activated(original.act_scalars, self.scalars), 0
        of_gates = _activated(original.act_gates, self.gates)
        if scalars is None or of_gates is None:
            return None
        runs = []
        for begin, length, kind, constant in scalars:
            runs.append(GateRun(length, begin, at, begin, 0, 0, kind, constant))
            at += length
        for offset, dim, mul in self.gated:
            done = 0
            while done < mul:
                begin, length, kind, constant = of_gates.pop(0)
                taken = min(length, mul - done)
                if taken < length:
                    of_gates.insert(0, (begin + taken, length - taken, kind, constant))
                runs.append(GateRun(taken, offset + done, at + done, begin, dim, mul, kind, constant))
                done += taken
            at += dim * mul
        return GateKernel(runs, original.irreps_in.dim, at)


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


_ACTIVATIONS: dict[Any, int] = {
    torch.nn.functional.silu: gates.SILU,
    torch.nn.SiLU: gates.SILU,
    torch.tanh: gates.TANH,
    torch.nn.Tanh: gates.TANH,
    torch.sigmoid: gates.SIGMOID,
    torch.nn.Sigmoid: gates.SIGMOID,
}


def _activated(activation: Any, slices: tuple[Slice, ...]) -> list[tuple[int, int, int, float]] | None:
    """Begin, length, activation and constant of the channels in slices; None for an unknown activation."""
    places = [begin + at for begin, length in slices for at in range(length)]
    found: list[tuple[int, int, int, float]] = []
    for mul, _, act in activation.paths:
        own, places = places[:mul], places[mul:]
        kind, constant = gates.IDENTITY, 1.0
        if act is not None:
            function = getattr(act, "f", None)
            known = _ACTIVATIONS.get(type(function) if isinstance(function, torch.nn.Module) else function)
            if known is None:
                return None
            kind, constant = known, 1.0 if act._is_id else float(act.cst)
        for place in own:
            if found and sum(found[-1][:2]) == place and found[-1][2:] == (kind, constant):
                found[-1] = (found[-1][0], found[-1][1] + 1, kind, constant)
            else:
                found.append((place, 1, kind, constant))
    return found
