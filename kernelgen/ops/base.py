"""The base of operators of every kind: a schedule for each direction, sources of kernels, copies and pickles.

Operators are found by their text, in a table that this file keeps.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from kernelgen.errors import ProblemError, ScheduleError
from kernelgen.kernels.dispatch import emit, make_plan
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.spec import AnySpec
from kernelgen.runtime.kernel import load_kernel

DTYPES = {torch.float32: "float32", torch.float64: "float64"}


class RegisteredOperator(ABC):
    """text: the operator as JSON, from which any process can rebuild it. device: kernels are for its type.

    directions: by name, each with all of its outputs.
    """

    text: str
    device: torch.device
    directions: ClassVar[Mapping[str, Any]]

    @abstractmethod
    def specs(self, direction_name: str) -> Sequence[AnySpec]:
        """Specs of a direction's kernels, with all outputs; the last one has the schedule of that name."""

    @abstractmethod
    def _kernel_spec(self, direction: Any, schedule: Any) -> AnySpec:
        """Spec of the kernel that uses a direction's schedule."""

    @abstractmethod
    def _default_schedule(self, direction: Any) -> Any:
        """The default schedule of a direction."""

    def source(self, direction_name: str = "forward") -> str:
        """The generated source of a direction with all outputs; that of the last kernel if there are several."""
        return emit(make_plan(self.specs(direction_name)[-1])).text

    def resources(self, direction_name: str = "forward") -> dict[str, Any]:
        """Resource usage of a direction's compiled kernel; compiles it if needed."""
        return load_kernel(self.specs(direction_name)[-1]).resources

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        """Copies and pickles hold only the text, because kernels belong to a process."""
        return resolve, (self.text,)

    def _direction(self, name: str) -> Any:
        if name not in self.directions:
            raise ProblemError(f"direction is {name!r}; expected one of {tuple(self.directions)}")
        return self.directions[name]

    def _complete(self, given: Knobs | Mapping[str, Any] | None) -> dict[str, Any]:
        """A legal schedule for each direction: the given one, or the default."""
        names = tuple(self.directions)
        by_name = dict.fromkeys(names, given) if given is None or isinstance(given, Knobs) else dict(given)
        if not set(by_name) <= set(names):
            raise ScheduleError(f"schedules are named {sorted(by_name)}; expected names from {names}")
        schedules = {}
        for name, direction in self.directions.items():
            schedules[name] = by_name.get(name) or self._default_schedule(direction)
            make_plan(self._kernel_spec(direction, schedules[name]))
        return schedules


# Operators by their text, so that a traced, exported or pickled graph finds its operator or rebuilds it.
#
# An operator's text is JSON that determines it. Each operator module registers with :func:`rebuilds` how to rebuild its
# kind from a text; ``import kernelgen`` imports them all.


class Registered(Protocol):
    """What the registry needs of an operator."""

    text: str
    device: torch.device


Kind = TypeVar("Kind", bound=Registered)

# Every operator of this process.
OPERATORS: dict[str, Any] = {}
_REBUILD: dict[str, Callable[[str], Any]] = {}


def register(operator: Kind) -> Kind:
    """The first operator with the same text, if it is for the same device; else this one."""
    known = OPERATORS.setdefault(operator.text, operator)
    return known if known.device == operator.device else operator


def rebuilds(kind: str, function: Callable[[str], Any]) -> None:
    """Register ``function``, which rebuilds operators of a kind from their text."""
    _REBUILD[kind] = function


def resolve(text: str) -> Any:
    """The operator of a text, rebuilt if this process does not have it."""
    found = OPERATORS.get(text)
    if found is None:
        found = OPERATORS[text] = _REBUILD[_kind(json.loads(text))](text)
    return found


def _kind(data: dict[str, Any]) -> str:
    """The ``kind`` in a text. The two oldest kinds name none: products have an operation, harmonics do not."""
    return data.get("kind", "product" if "operation" in data else "harmonics")
