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

    name: the package's. results: by name of a model's result, what its rows are: ``atoms``, ``edges`` or ``graphs``.
    """

    name: str
    results: Mapping[str, str]

    @abstractmethod
    def matches(self, model: torch.nn.Module) -> bool:
        """Whether it is such a model, by the names of its classes."""

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
    """Whether a class of the model has one of these full names; those loaded from a torch.package have a prefix."""
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__]
    return any(kind == name or kind.endswith(f">.{name}") for kind in kinds for name in names)
