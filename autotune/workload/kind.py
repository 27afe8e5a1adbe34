"""Interface of a kind of kernel (products, harmonics, both in one, contractions), to choose and store schedules.

Each operation (``conv``, ``plain``, ``harmonics``, ``vectors``, ``radial``, ``contraction``) has one
:class:`KernelKind`. How its kernels run and are searched is in :mod:`autotune.measure.kinds`, which no model loads.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from autotune.text import count
from autotune.workload.graphs import EdgesAlone, NodesAlone, RandomNeighbours
from kernelgen.arithmetic.directions import Direction
from kernelgen.device import DeviceFacts
from kernelgen.errors import ProblemError
from kernelgen.kernels.knobs import Knobs

if TYPE_CHECKING:
    from typing_extensions import Self


class Problem(Protocol):
    """What the problems of all kinds have: frozen and hashable, each with a text that any process reads back."""

    @property
    def key(self) -> str: ...

    @classmethod
    def from_key(cls, key: str, /) -> Self: ...


# ``autotune.database.lookup.find_schedule``, passed as an argument for plans that depend on other kernels' schedules.
FindSchedule = Callable[..., Any]
# Largest relative error against float64 that a kernel may have.
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
# Graphs of which only the size is known.
SourceOfSize = EdgesAlone | NodesAlone | RandomNeighbours


@dataclass(frozen=True)
class StoredKernel:
    """A spec with the values by which every kernel is stored and looked up, of kinds whose kernels have other specs."""

    problem: Any
    operation: str
    direction: Direction
    schedule: Any
    dtype: str
    layout: str
    facts: DeviceFacts
    deterministic: bool = False


class KernelKind(ABC):
    """One kind of kernel. A *spec* determines one kernel (``kernelgen``'s, with operation, layout and deterministic).

    problem_type: type of its problems. operations: its operations, the usual one first. convolutions: those of them
    that gather from nodes and sum at nodes. directions: by name, each with its ``outputs``. combined: passes of a model
    that consist of several directions. inputs: slots that get gradients. forces: the one from whose gradient forces are
    computed. tangents: those whose gradients ``double_backward`` differentiates. table: a config defines its problems
    in tables [table.NAME]. groups: of its rows in a report, with short names. rows: what a graph's edges are here, and
    its nodes.
    """

    problem_type: ClassVar[type[Problem]]
    operations: ClassVar[tuple[str, ...]]
    convolutions: ClassVar[tuple[str, ...]] = ()
    table: ClassVar[str]
    groups: ClassVar[Mapping[str, str]]
    directions: ClassVar[Mapping[str, Any]]
    inputs: ClassVar[str]
    forces: ClassVar[str] = "y"
    tangents: ClassVar[str]
    combined: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            "forward+backward": ("forward", "backward"),
            "force_step": ("forward", "edge_backward", "joint_backward"),
        }
    )
    rows: ClassVar[tuple[str, str]] = ("edges", "nodes")

    @property
    def passes(self) -> dict[str, tuple[str, ...]]:
        """The passes that can be timed, each with its directions."""
        known = set(self.directions)
        combined = {name: parts for name, parts in self.combined.items() if known.issuperset(parts)}
        return {name: (name,) for name in self.directions} | combined

    def size_text(self, num_edges: float, num_nodes: float) -> str:
        """What a graph has, such as ``460,710 edges, 5,184 nodes``; what is 0 or unknown (nan) is left out."""
        counts = zip((num_edges, num_nodes), self.rows, strict=True)
        return ", ".join(f"{count(number)} {name}" for number, name in counts if number > 0)

    def graph_of_size(self, num_edges: int, num_nodes: int) -> SourceOfSize:
        """A graph to tune on of which only the size is known; ``num_nodes`` is 0 if there are no nodes."""
        return RandomNeighbours(num_nodes, num_edges) if num_nodes else EdgesAlone(num_edges)

    def tolerance(self, problem: Any, dtype: str) -> float:
        """Largest relative error of an output's block that its kernels may have."""
        return TOLERANCE[dtype]

    @abstractmethod
    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> Problem:
        """A problem from its table in a config; ConfigError for a wrong one. ``others``: what a table may name."""

    @abstractmethod
    def owns_key(self, key: str) -> bool:
        """Whether a text looks like a key of its problems, well-formed or not."""

    @abstractmethod
    def check(self, workload: Any) -> None:
        """Raise ConfigError for a workload without kernels."""

    @staticmethod
    @abstractmethod
    def read(data: Mapping[str, Any], /) -> Knobs:
        """The schedule that ``to_dict`` wrote; ScheduleError for an unknown knob or value."""

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
        """The spec with an empty schedule; ``direction`` by name or as an object, ProblemError for an unknown one."""
        name = direction if isinstance(direction, str) else direction.name
        if name not in self.directions:
            raise ProblemError(f"direction is {name!r}; expected one of {tuple(self.directions)}")
        asked = self.directions[name] if isinstance(direction, str) else direction
        return self.blank_spec(problem, operation, asked, dtype, layout, facts, deterministic)

    @abstractmethod
    def blank_spec(
        self, problem: Any, operation: str, asked: Any, dtype: str, layout: str, facts: DeviceFacts, deterministic: bool
    ) -> Any:
        """As :meth:`spec`, of a direction as an object."""

    @abstractmethod
    def default(self, spec: Any, num_edges: int | None) -> Knobs:
        """The schedule of an untuned kernel; num_edges: as for ``default_schedule``."""

    @abstractmethod
    def plan(self, spec: Any, find_schedule: FindSchedule) -> Any:
        """The plan for the emitter; ScheduleError if the schedule is illegal or gives another schedule's kernel."""

    def kernel_spec(self, spec: Any, schedule: Knobs) -> Any:
        """The spec of the kernel that is compiled for a schedule."""
        return dataclasses.replace(spec, schedule=schedule)

    @abstractmethod
    def describe(self, problem: Any) -> tuple[str, ...]:
        """A description for people, as lines."""

    def group(self, key: str, operation: str, dtype: str) -> str:
        """Of its ``groups`` that of a row; ``key``: of its problem."""
        return next(iter(self.groups))

    @abstractmethod
    def irreps(self, problem: Any, layout: str) -> dict[str, str]:
        """Irreps by slot, of the operands and outputs that rotate with the coordinates, as they are in a row."""

    @abstractmethod
    def compulsory_bytes(self, work: Any, direction: str, num_edges: int, num_nodes: int) -> int:
        """Bytes that any kernel must move: each operand of the direction read once, each output written once.

        work: a workload or a spec, of which problem, operation and dtype count.

        Convolutions also count sender and receiver, 4 bytes each per edge. Node rows count once, however many edges
        read them, because repeated reads depend on the schedule. Nodes alone are ``num_edges``, and ``num_nodes`` the
        rows of weights that occur. Other operations ignore ``num_nodes``.
        """
