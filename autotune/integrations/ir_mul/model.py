"""Changes a whole model to layout ``ir_mul``: neighbouring blocks must agree, so either every part can or none does.

Every file of ``packages/`` may have ``LAYOUTS``: its kinds of models that can.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from autotune.integrations.acceleration import Place
from autotune.integrations.convolution_block import ConvolutionBlock
from autotune.integrations.ir_mul.stand_in import NodeStandIn
from autotune.integrations.replacement import Replacing
from autotune.integrations.stand_ins import StandIn
from kernelgen.errors import InputError, UnsupportedError
from kernelgen.folder import collected


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


@functools.cache
def _known() -> tuple[ModelLayout, ...]:
    return tuple(one for found in collected("autotune.integrations.packages", "LAYOUTS") for one in found)


def change_layouts(model: torch.nn.Module, replacing: Replacing) -> tuple[list[Place], str]:
    """Change every such model in a module tree, in place; and why one was left as it was, if so."""
    places: list[Place] = []
    reasons: dict[str, None] = {}
    for prefix, found in list(model.named_modules()):
        for layout in _known():
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
    whole = [(layout, found) for found in model.modules() for layout in _known() if layout.matches(found)]
    held = {part for _, found in whole for part in found.modules()}
    for name, part in model.named_modules():
        if isinstance(part, NodeStandIn) and part not in held:
            raise InputError(
                f"{name or 'the model'} belongs to a model whose features are in layout ir_mul; restore the whole model"
            )
    for layout, found in whole:
        layout.undo(found)
