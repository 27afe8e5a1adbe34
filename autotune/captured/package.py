"""What :func:`autotune.capture` must know of a package's models.

Every file of ``packages/`` has ``CAPTURABLE``: one such object.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autotune.captured.fields import Counts, Fields
from kernelgen.errors import UnsupportedError
from kernelgen.folder import collected


class CapturablePackage(ABC):
    """The models of one package, as functions of padded tensors.

    name: the package's. classes: full names of those whose ``forward`` was read. methods: what a step takes the place
    of. results: by name of a model's result, what its rows are: ``atoms`` or ``graphs``. left_out: names of the others,
    which a captured step does not give.
    """

    name: str
    classes: tuple[str, ...]
    methods: tuple[str, ...] = ("forward", "__call__")
    results: Mapping[str, str]
    left_out: frozenset[str] = frozenset()

    def matches(self, model: torch.nn.Module) -> bool:
        """Whether it is such a model, by the names of its classes."""
        return is_kind_of(model, *self.classes)

    def check(self, model: Any) -> None:
        """UnsupportedError for a model that cannot be captured, with the reason."""
        return None

    @abstractmethod
    def runs_eagerly(self, model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """Why a call is left to the model itself: it asks for what a captured step does not give; else empty."""

    @abstractmethod
    def cutoff(self, model: Any) -> float:
        """Largest distance of neighbours; asked once a capture, since it may be on the device."""

    @abstractmethod
    def fields(self, model: Any, inputs: Mapping[str, Any], cutoff: float) -> tuple[Fields, Counts]:
        """The tensors that the model reads, and the numbers of atoms, edges and graphs in them; does not wait."""

    @abstractmethod
    def compute(self, model: Any, given: dict[str, Tensor], size: Counts, options: Mapping[str, Any]) -> dict[str, Any]:
        """The model's results for padded tensors; must not wait for the device."""

    def known_results(self, out: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Those results that a captured step gives; UnsupportedError if it does not know one.

        given: the inputs, with which some models return their results.
        """
        unknown = out.keys() - self.results.keys() - self.left_out - given.keys()
        if unknown:
            raise UnsupportedError(
                f"the model gives {', '.join(sorted(unknown))}, of which capture does not know the rows; call the "
                "model itself, uncaptured"
            )
        return {name: out[name] for name in self.results if name in out}

    def answer(self, model: Any, inputs: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """What a call returns, of the real results: as much as the model itself does."""
        return found


@functools.cache
def _known_packages() -> tuple[CapturablePackage, ...]:
    return collected("autotune.captured.packages", "CAPTURABLE")


def package_for(model: torch.nn.Module) -> CapturablePackage:
    """The package of a model; UnsupportedError if there is none, or the model cannot be captured."""
    for package in _known_packages():
        if package.matches(model):
            if any(getattr(module, "always_streamed", False) for module in model.modules()):
                raise UnsupportedError(
                    "edge_weights='streamed' waits for the device in every step; accelerate the model with "
                    "edge_weights='whole' to capture it"
                )
            package.check(model)
            if own := _what_would_be_lost(model, package):
                raise UnsupportedError(
                    f"{own}, whose inputs and results a captured step does not know; call the model itself, uncaptured"
                )
            return package
    names = ", ".join(package.name for package in _known_packages())
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    raise UnsupportedError(
        f"capture does not know the model {kind}; it takes models of {names} that give energies and forces, not "
        "compiled ones: capture before torch.compile, or leave it out"
    )


@functools.cache
def along_x(length: float) -> Tensor:
    """A vector, for ghosts."""
    return torch.tensor([length, 0.0, 0.0])


@functools.cache
def cube(width: float) -> Tensor:
    """A cubic cell, for ghosts."""
    return width * torch.eye(3)


def is_kind_of(model: torch.nn.Module, *names: str) -> bool:
    """Whether a class of the model has one of these full names."""
    return any(_full_name(kind) in names for kind in type(model).__mro__)


def _full_name(kind: type) -> str:
    """Without the prefix of a class that was loaded from a torch.package."""
    home = kind.__module__
    return f"{home.partition('>.')[2] if home.startswith('<torch_package_') else home}.{kind.__qualname__}"


def _what_would_be_lost(model: torch.nn.Module, package: CapturablePackage) -> str:
    """What the model does around the package's own step, in words; empty if nothing."""
    for method in package.methods:
        if method in model.__dict__:
            return f"this {type(model).__name__} has a {method} of its own"
        for kind in type(model).__mro__:
            own = vars(kind).get(method)
            if own is not None and not _is_known(kind, own, package.classes):
                return f"{kind.__module__}.{kind.__qualname__} has a {method} of its own"
    hooks = (*model._forward_hooks.values(), *model._forward_pre_hooks.values())
    if any(not getattr(hook, "__module__", "").startswith("autotune.") for hook in hooks):
        return f"this {type(model).__name__} has hooks of its own"
    return ""


def _is_known(kind: type, method: Any, classes: tuple[str, ...]) -> bool:
    """Whether it is the method that torch, Equitune or the package wrote, and not one that took its place."""
    if kind.__module__.startswith("torch."):
        return True
    known = kind.__module__.startswith("autotune.") or _full_name(kind) in classes
    return known and getattr(method, "__globals__", {}).get("__name__") == kind.__module__
