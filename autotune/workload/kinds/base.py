"""What choosing and storing schedules needs to know of a kind of kernel: products, harmonics, or both in one.

An operation (``conv``, ``plain``, ``harmonics``, ``vectors``) has one :class:`KernelKind`, which knows neither how its
kernels run (:mod:`autotune.measure.runs`) nor how they are searched (:mod:`autotune.search.spaces`). A model's import
loads neither.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, Self

from autotune.workload.graphs import GraphSpec
from kernelgen.device import DeviceFacts
from kernelgen.schedule.knobs import Knobs


class Problem(Protocol):
    """What the problems of all kinds have: frozen and hashable, each with a text that any process reads back."""

    @property
    def key(self) -> str: ...

    @classmethod
    def from_key(cls, key: str, /) -> Self: ...


# ``autotune.database.lookup.find_schedule``: handed in where a kernel's plan depends on schedules that are known for
# others.
FindSchedule = Callable[..., Any]


class KernelKind(ABC):
    """problem_type: of its problems. operations: those that it has, the usual one first. convolutions: those of them
    that gather from nodes and sum at nodes. directions: by name, each with its ``outputs``. inputs: slots that get
    gradients. table: problems are defined in tables [table.NAME] of a config. groups: of its rows in a report, with
    short names. rank: its place among the kinds; one whose problems hold problems of others comes after those.

    A *spec* is all that determines one kernel (``kernelgen``'s, with operation, layout and deterministic).
    """

    rank: ClassVar[int]
    problem_type: ClassVar[type[Problem]]
    operations: ClassVar[tuple[str, ...]]
    convolutions: ClassVar[tuple[str, ...]] = ()
    table: ClassVar[str]
    groups: ClassVar[Mapping[str, str]]
    directions: ClassVar[Mapping[str, Any]]
    inputs: ClassVar[str]

    @abstractmethod
    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> Problem:
        """A problem from its table in a config; ConfigError for a wrong one. ``others``: what a table may name."""

    @abstractmethod
    def owns_key(self, key: str) -> bool:
        """Whether a text looks like a key of its problems, well-formed or not; kinds of higher rank are asked first."""

    @abstractmethod
    def check(
        self, label: str, problem: Any, operation: str, layout: str, graph: GraphSpec, deterministic: bool
    ) -> None:
        """ConfigError for a workload that has no kernels; ``label``: its problem's short name."""

    @abstractmethod
    def read(self, data: Mapping[str, Any]) -> Knobs:
        """The schedule that ``to_dict`` wrote; ScheduleError for an unknown knob or value."""

    @abstractmethod
    def spec(
        self,
        problem: Any,
        operation: str,
        direction: Any,
        dtype: str,
        layout: str,
        facts: DeviceFacts,
        deterministic: bool = False,
    ) -> Any:
        """With a blank schedule; ``direction`` by name or as such."""

    @abstractmethod
    def default(self, spec: Any, num_edges: int | None) -> Knobs:
        """The schedule of a kernel that was never tuned; num_edges: as for ``default_schedule``."""

    @abstractmethod
    def plan(self, spec: Any, find_schedule: FindSchedule) -> Any:
        """What an emitter takes; ScheduleError if the spec's schedule is not legal, or makes the kernel of another."""

    def kernel_spec(self, spec: Any, schedule: Knobs) -> Any:
        """What is compiled for a schedule."""
        return dataclasses.replace(spec, schedule=schedule)

    @abstractmethod
    def describe(self, problem: Any) -> tuple[str, ...]:
        """Lines for people."""

    def group(self, key: str, operation: str, dtype: str) -> str:
        """Of its ``groups`` that of a row; ``key``: of its problem."""
        return next(iter(self.groups))

    @abstractmethod
    def irreps(self, problem: Any) -> dict[str, str]:
        """Of the operands (and outputs) that turn with the coordinates, by slot."""

    @abstractmethod
    def compulsory_bytes(
        self, problem: Any, operation: str, direction: str, dtype: str, num_edges: int, num_nodes: int
    ) -> int:
        """Bytes that any kernel must move: every operand that the direction reads once, every output written once.

        Of convolutions sender and receiver are counted too, 4 bytes each an edge. Node rows count once, however many
        edges read them: whether they are fetched again is the schedule's doing. Elsewhere ``num_nodes`` is ignored.
        """
