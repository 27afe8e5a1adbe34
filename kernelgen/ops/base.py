"""The base of operators of every kind: a schedule for each direction, sources of kernels, copies and pickles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from kernelgen.emit.kernel_source import emit
from kernelgen.errors import ProblemError, ScheduleError
from kernelgen.ops.registry import resolve
from kernelgen.plan.planner import make_plan
from kernelgen.runtime.kernel import load_kernel
from kernelgen.schedule.kernel_spec import AnySpec
from kernelgen.schedule.knobs import Knobs

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
