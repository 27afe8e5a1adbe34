"""What a lookup asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autotune.database.quarantine import quarantine_path, quarantined
from autotune.database.store import database_dirs
from autotune.workload.graph_class import GraphClass
from autotune.workload.kinds.base import KernelKind
from autotune.workload.kinds.registry import kernel_kind
from kernelgen.problem.sizes import shape_of


@dataclass(frozen=True, eq=False)
class Query:
    """``spec``: as the operation's kind makes it. any_size: whether entries of much smaller or larger graphs count.

    find_schedule: for plans that depend on the schedules of other kernels.
    met: what does not depend on the graph class, found once for queries that differ in it alone.
    """

    spec: Any
    find_schedule: Callable[..., Any]
    graph_class: GraphClass | None = None
    tolerance: float | None = None
    any_size: bool = False
    met: dict[Any, Any] = field(default_factory=dict)

    @property
    def kind(self) -> KernelKind:
        return kernel_kind(self.spec.operation)

    @property
    def kernel(self) -> tuple[str, str, str, str]:
        return (self.spec.problem.key, self.spec.operation, self.spec.direction.name, self.spec.dtype)

    @property
    def shape(self) -> tuple[str, str, str, str]:
        """:attr:`kernel` with the problem's shape."""
        return (shape_of(self.spec.problem.key), *self.kernel[1:])

    @property
    def waits_for_longest(self) -> bool:
        """Whether the device would wait for the node with the most edges."""
        return self.graph_class is not None and self.graph_class.waits_for_longest(self.spec.facts)

    @property
    def faults(self) -> dict[str, str]:
        """Schedules that failed on this device, by key, with the reason."""
        return self.once("faults", self._read_faults)

    def _read_faults(self) -> dict[str, str]:
        lists = (quarantine_path(directory, self.spec.facts.slug) for directory in database_dirs())
        return quarantined(lists, self.spec)

    def once(self, key: Any, find: Callable[[], Any]) -> Any:
        """What ``find`` gives, for all queries with this ``met``."""
        if key not in self.met:
            self.met[key] = find()
        return self.met[key]
