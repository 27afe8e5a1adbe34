"""Changes a whole model to layout ``ir_mul``: neighbouring blocks must agree, so either every part can or none does.

A package's table has ``layouts``: its kinds of models that can.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autotune.models.replace import ConvolutionBlock, Replacing
from autotune.models.stand_ins import Draw, NodeStandIn, Place, StandIn, of_packages
from autotune.workload.workload import relayout
from kernelgen.compat import o3
from kernelgen.errors import InputError, UnsupportedError
from kernelgen.ops import node_kernels as gates
from kernelgen.ops.node_kernels import GateKernel, GateRun
from kernelgen.problem.irreps import Irreps, blocks_of


class Part(NamedTuple):
    """A module to replace. kind: one of ``KIND_NAMES``; block: of a convolution, the kind of its parent."""

    parent: torch.nn.Module
    attribute: str
    name: str
    kind: str
    stand_in: Callable[..., Any]
    block: ConvolutionBlock | None = None

    @property
    def module(self) -> torch.nn.Module:
        return self.parent.get_submodule(self.attribute)


class ModelLayout(ABC):
    """One kind of model."""

    @abstractmethod
    def matches(self, model: torch.nn.Module) -> bool:
        """Whether it is such a model, by the name of its class."""

    @abstractmethod
    def parts(self, model: Any) -> Iterator[Part]:
        """All that depends on the layout; UnsupportedError if something in the model has no form in ``ir_mul``."""

    @abstractmethod
    def finish(self, model: Any) -> None:
        """Convert what users see of the features back to e3nn's layout."""

    @abstractmethod
    def undo(self, model: torch.nn.Module) -> None:
        """Undo :meth:`finish`."""


def change_layouts(model: torch.nn.Module, replacing: Replacing) -> tuple[list[Place], str]:
    """Change every such model in a module tree, in place; and why one was left as it was, if so."""
    places: list[Place] = []
    reasons: dict[str, None] = {}
    for prefix, found in list(model.named_modules()):
        for layout in of_packages("layouts"):
            if layout.matches(found) and not any(isinstance(part, StandIn) for part in found.modules()):
                changed = _changed(found, layout, replacing, f"{prefix}." if prefix else "")
                if isinstance(changed, str):
                    reasons[changed] = None
                else:
                    places += changed
    return places, "; ".join(reasons)


def _changed(model: torch.nn.Module, layout: ModelLayout, replacing: Replacing, prefix: str) -> list[Place] | str:
    """What was replaced, or why nothing was: all stand-ins are made before the first takes its place.

    A change that ends in the middle is taken back: neighbours in two layouts would give wrong numbers.
    """
    try:
        parts = list(layout.parts(model))
    except UnsupportedError as reason:
        return str(reason)
    made: dict[torch.nn.Module, Any] = {}
    for part in parts:
        if part.module not in made:
            made[part.module] = replacing.made_and_compared(part.module, part.stand_in)
            if isinstance(made[part.module], str):
                return f"{part.name}: {made[part.module]}"
    found = [(part, part.module) for part in parts]
    places = [Place(prefix + part.name, repr(module), True, _detail(made[module]), part.kind) for part, module in found]
    try:
        for part, module in found:
            setattr(part.parent, part.attribute, made[module])
            if part.block is not None:
                part.block.fuse(part.parent)
        layout.finish(model)
    except BaseException:
        layout.undo(model)
        for part, module in found:
            if part.block is not None:
                part.block.unfuse(part.parent)
            setattr(part.parent, part.attribute, module)
        raise
    return places


def _detail(found: Any) -> str:
    if isinstance(found, NodeStandIn):
        return found.detail
    tuning = found.tuning_for(None)["forward"]
    return f"in layout ir_mul; schedule {tuning.origin}: {tuning.reason}"


def undo_layouts(model: torch.nn.Module) -> None:
    """Take back what :func:`change_layouts` did besides stand-ins; InputError for a part of a model in ``ir_mul``."""
    whole = [(layout, found) for found in model.modules() for layout in of_packages("layouts") if layout.matches(found)]
    held = {part for _, found in whole for part in found.modules()}
    for name, part in model.named_modules():
        if isinstance(part, NodeStandIn) and part not in held:
            raise InputError(
                f"{name or 'the model'} belongs to a model whose features are in layout ir_mul; restore the whole model"
            )
    for layout, found in whole:
        layout.undo(found)


# How rows in ``ir_mul`` are divided: two irreps that are one row in ``mul_ir`` may be two in ``ir_mul``.
#
# ``64x1o+64x1o`` and ``128x1o`` have the same rows in ``mul_ir``. In ``ir_mul`` the channels of a block lie together
# for each component, so the first has runs of 64 channels there and the second runs of 128. Scalars differ in neither.


def outline(irreps: Irreps) -> tuple[tuple[int, int], ...]:
    """(degree, channels) of each run in a row; neighbouring scalars are one run."""
    found: list[tuple[int, int]] = []
    for mul, ir in o3.Irreps(str(irreps)):
        if ir.l == 0 and found and found[-1][0] == 0:
            found[-1] = (0, found[-1][1] + mul)
        elif mul:
            found.append((ir.l, mul))
    return tuple(found)


def check_same(found: Irreps, expected: Irreps, where: str) -> None:
    """UnsupportedError if rows of one are not rows of the other."""
    if outline(found) != outline(expected):
        raise UnsupportedError(f"{where} takes {expected}, and is given {found}: in layout ir_mul these differ")


# Stand-ins for parts that only arrange features, or scale them by gates; the features that users see.


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


def with_users_descriptors(model: Any, out: dict[str, Tensor]) -> dict[str, Tensor]:
    """A MACE model's results in ``ir_mul`` with ``node_feats``, those of all layers, in e3nn's layout."""
    if out.get("node_feats") is not None:
        irreps = "+".join(str(product.linear.irreps_out) for product in model.products)
        out["node_feats"] = relayout(out["node_feats"], irreps, "ir_mul", "mul_ir")
    return out


# A package's own symmetric contraction in a model in ``ir_mul``, where no kernel takes its place.


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


# ``e3nn.nn.Gate`` in layout ``ir_mul``: every component of a block times one row of gates.

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
