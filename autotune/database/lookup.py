"""Find the schedule to load for a problem on a device: a :class:`Tuning` with its origin.

Lookup goes through these steps, from the best evidence to none. Within a step the nearest graph class comes first
(larger graphs first if it is unknown or tied, because kernels and not launches dominate their time):

1. ``exact``: tuned for this problem, direction, dtype, layout and graph class on this device;
2. ``nearest``: on this device, another graph class in the same layout, then any graph class in the other layout, for
   this problem or one of its shape (the same but for parities and the order of paths, ``shape_of``);
3. ``other-device``: another device of the same architecture (CUDA: the same compute capability; CPU: the same
   machine type and vector width), nearest in size first;
4. ``default``: chosen from device facts alone.

Convolutions on a GPU use an entry of step 2 or 3 only if both graphs are small or both are large, unless a default
would be an error.

A stored schedule is skipped, with the reason noted, if it is not legal here, failed its last check, or is in quarantine
(it failed in a search on this device). Lookup never searches or compiles.
"""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from autotune.database.entry import Entry, is_alike
from autotune.database.quarantine import quarantine_path, quarantined
from autotune.database.store import Table, database_dirs, database_path, kindred_tables, load_table, tuned_dirs
from autotune.errors import TuningMissError
from autotune.workload.graph_class import GraphClass
from autotune.workload.kinds.base import KernelKind, Problem
from autotune.workload.kinds.registry import kernel_kind
from kernelgen.device import DeviceFacts
from kernelgen.errors import ProblemError, ScheduleError
from kernelgen.plan.defaults import SMALL_GRAPH_EDGES
from kernelgen.problem.shape import shape_of
from kernelgen.schedule.knobs import Knobs
from kernelgen.terms.directions import Direction


@dataclass(frozen=True)
class Tuning:
    """A schedule and where it came from.

    origin: ``exact``, ``nearest``, ``other-device``, ``default``, or ``given`` (by the caller, not looked up).
    entry: the database entry, if any. reason: one sentence for people.
    """

    schedule: Knobs
    origin: str
    entry: Entry | None
    reason: str


@dataclass(frozen=True, eq=False)
class _Query:
    """``spec``: as the operation's kind makes it. any_size: whether entries of much smaller or larger graphs count.

    met: what does not depend on the graph class, found once for queries that differ in it alone.
    """

    spec: Any
    graph_class: GraphClass | None
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


def strict_by_environment() -> bool:
    """Whether ``$EQUITUNE_STRICT`` makes a lookup without an entry for this device an error."""
    return os.environ.get("EQUITUNE_STRICT", "").strip().lower() not in ("", "0", "false", "no", "off")


def find_schedule(
    problem: Problem,
    operation: str,
    direction: str | Direction,
    dtype: str,
    layout: str,
    facts: DeviceFacts,
    graph_class: GraphClass | str | None = None,
    strict: bool | None = None,
    *,
    deterministic: bool = False,
    tolerance: float | None = None,
) -> Tuning:
    """The best known schedule for one direction of a problem on a device; the module's docstring has the order.

    direction: one of the operation's directions, by name or as a Direction.
    strict: if true, TuningMissError unless the origin is exact or nearest; None reads ``$EQUITUNE_STRICT``.
    deterministic: only entries tuned for bitwise equal results from run to run count.
    tolerance: largest measured relative error, against float64 and under rotation, that an entry may have;
        TuningMissError if no entry keeps it, since a default has no measured error.
    Unreadable databases are skipped with a warning and never make a lookup fail.
    """
    kernel = (problem, operation, direction, dtype, layout, facts)
    return Finder(*kernel, strict, deterministic=deterministic, tolerance=tolerance).find(graph_class)


class Finder:
    """:func:`find_schedule` for several graph classes: what they share is read and checked once."""

    def __init__(
        self,
        problem: Problem,
        operation: str,
        direction: str | Direction,
        dtype: str,
        layout: str,
        facts: DeviceFacts,
        strict: bool | None = None,
        *,
        deterministic: bool = False,
        tolerance: float | None = None,
    ) -> None:
        name = direction if isinstance(direction, str) else direction.name
        kind = kernel_kind(operation)
        if name not in kind.directions:
            raise ProblemError(f"direction is {name!r}; expected one of {tuple(kind.directions)}")
        spec = kind.spec(problem, operation, name, dtype.removeprefix("torch."), layout, facts, deterministic)
        check_tolerance(tolerance)
        self._query = _Query(spec, None, tolerance)
        self._must = strict_by_environment() if strict is None else strict

    def find(self, graph_class: GraphClass | str | None) -> Tuning:
        """The best known schedule for a graph class."""
        parsed = GraphClass.parse(graph_class) if isinstance(graph_class, str) else graph_class
        query, tolerance = dataclasses.replace(self._query, graph_class=parsed), self._query.tolerance
        skipped: list[str] = []
        tuning = _recorded(query, skipped)
        if tuning is None and (self._must or tolerance is not None):
            tuning = _recorded(dataclasses.replace(query, any_size=True), skipped)  # better than an error
        if self._must:
            _require_this_device(query, tuning, skipped)
        if tuning is None and tolerance is not None:
            raise TuningMissError(
                _with_skipped(
                    f"no record proves a relative error of at most {tolerance:g} for {query.kernel} on "
                    f"{query.spec.facts.name}; run `equitune tune` for it, or ask for less",
                    skipped,
                )
            )
        return tuning or _default(query, skipped)


def check_tolerance(tolerance: Any) -> None:
    """ProblemError unless it is a positive number, or None."""
    if tolerance is not None and not (isinstance(tolerance, numbers.Real) and float(tolerance) > 0):
        raise ProblemError(f"tolerance is {tolerance!r}; expected a positive relative error, such as 1e-6, or None")


def _recorded(query: _Query, skipped: list[str]) -> Tuning | None:
    return _on_this_device(query, skipped) or _on_other_device(query, skipped)


def _on_this_device(query: _Query, skipped: list[str]) -> Tuning | None:
    table = query.once("table", lambda: _table_of(query.spec.facts))
    if query.graph_class is not None:
        flags = (query.spec.layout, query.graph_class.text, query.spec.deterministic)
        exact = table.by_identity.get((*query.kernel, *flags))
        if exact is not None and _is_legal(query, exact, skipped):
            reason = f"tuned on this device for {query.graph_class.text}"
            return Tuning(exact.tuned_schedule, "exact", exact, _with_skipped(reason, skipped))
    else:
        exact = None
    for entry in _by_nearness(query, table.by_kernel.get(query.shape, ())):
        if entry is not exact and _is_legal(query, entry, skipped):
            reason = f"tuned on this device for {entry.graph_class}"
            return _fitted(query, entry, "nearest", reason, skipped)
    return None


def _table_of(facts: DeviceFacts) -> Table:
    return load_table(*(database_path(directory, facts.slug) for directory in tuned_dirs()))


def _on_other_device(query: _Query, skipped: list[str]) -> Tuning | None:
    for table in query.once("kindred", lambda: list(kindred_tables(query.spec.facts))):
        for entry in _by_nearness(query, table.by_kernel.get(query.shape, ())):
            if _is_legal(query, entry, skipped):
                reason = (
                    f"nothing is tuned for this problem on this device; using an entry of "
                    f"{table.device.get('name')} "
                    f"(also {query.spec.facts.arch}) for {entry.graph_class}"
                )
                return _fitted(query, entry, "other-device", reason, skipped)
    return None


def _fitted(query: _Query, entry: Entry, origin: str, reason: str, skipped: list[str]) -> Tuning:
    """A schedule tuned on another graph class or layout, with the knobs adjusted that depend on these."""
    reason += _why_nearest(query, entry)
    schedule = query.once((id(entry), "layout"), lambda: _in_layout(query, entry))
    there, here = entry.parsed_graph_class, query.graph_class
    if here is not None and here.log2_degree != there.log2_degree:
        factor = here.log2_degree - there.log2_degree
        schedule, fit = query.once((id(entry), factor), lambda: _fit(query, schedule, factor))
        reason += fit
    return Tuning(schedule, origin, entry, _with_skipped(reason, skipped))


def _fit(query: _Query, schedule: Knobs, log2_factor: int) -> tuple[Knobs, str]:
    """The schedule for that factor of edges per node, and what was changed, in words."""
    fitted = schedule.for_degree(2.0**log2_factor)
    if fitted == schedule or fitted.key in query.faults:
        return schedule, ""
    before, after = schedule.to_dict(), fitted.to_dict()
    changed = ", ".join(f"{name}={getattr(fitted, name)}" for name, value in after.items() if value != before[name])
    return fitted, f", with {changed} for its degree"


def _in_layout(query: _Query, entry: Entry) -> Knobs:
    """An entry's schedule; that of another layout in the form for this one, if that is legal.

    Only for gradients of x, which are added in memory: there the form makes up for the layout (on an H200, 0.63 to 1.01
    times as long on 5,184 and on 21 atoms). Results are stored once; that form took 0.99 to 1.13 times as long.
    """
    schedule = entry.tuned_schedule
    adds = query.spec.operation == "conv" and "x" in query.spec.direction.live_outputs
    if entry.layout == query.spec.layout or not adds:
        return schedule
    moved = dataclasses.replace(entry, schedule=schedule.for_layout(query.spec.layout).to_dict())
    return moved.tuned_schedule if _is_legal(query, moved, []) else schedule


def _default(query: _Query, skipped: list[str]) -> Tuning:
    reason = (
        "nothing is tuned for this problem at about this size, on this device or its architecture; using the "
        "default schedule"
    )
    # Defaults only tell small graphs from large ones.
    num_edges = SMALL_GRAPH_EDGES if query.graph_class is not None and query.graph_class.is_small else None
    schedule = query.once(("default", num_edges), lambda: query.kind.default(query.spec, num_edges))
    if query.faults and (fault := query.faults.get(schedule.key)):
        if found := _recorded(dataclasses.replace(query, any_size=True), skipped):
            return found
        raise TuningMissError(
            f"the default schedule of {query.kernel} is in quarantine on {query.spec.facts.name} ({fault}), and no "
            "other schedule is known; run `equitune tune` for it, or delete its line in results/quarantine to try again"
        )
    return Tuning(schedule, "default", None, _with_skipped(reason, skipped))


def _require_this_device(query: _Query, tuning: Tuning | None, skipped: list[str]) -> None:
    if tuning is not None and tuning.origin in ("exact", "nearest"):
        return
    spec, searched = query.spec, ", ".join(str(directory) for directory in database_dirs())
    raise TuningMissError(
        _with_skipped(
            f"strict lookup: no tuned {spec.operation} {spec.direction.name} {spec.dtype} for {spec.problem.key} "
            f"on {spec.facts.name} in {searched}; run `equitune tune` for it, or unset strict / EQUITUNE_STRICT",
            skipped,
        )
    )


def _by_nearness(query: _Query, entries: Iterable[Entry]) -> list[Entry]:
    """Same layout first, then the nearest graph class, the larger graph, the problem itself; ties break by text."""

    def rank(entry: Entry) -> tuple:
        kind = entry.parsed_graph_class
        distance = 0.0 if query.graph_class is None else float(query.graph_class.distance(kind))
        other, texts = entry.problem != query.spec.problem.key, (entry.graph_class, entry.layout, entry.problem)
        return (entry.layout != query.spec.layout, distance, -kind.log2_edges, other, *texts)

    return sorted(
        (
            entry
            for entry in entries
            if entry.deterministic == query.spec.deterministic
            and (query.any_size or is_alike(query.spec, query.graph_class, entry))
        ),
        key=rank,
    )


def _why_nearest(query: _Query, entry: Entry) -> str:
    if query.graph_class is None:
        why = ", the largest tuned graph (no graph class given)"
    elif query.graph_class.text == entry.graph_class:
        why = ""
    else:
        why = f", the nearest to {query.graph_class.text}"
    if entry.problem != query.spec.problem.key:
        why += ", for paths in another order or irreps of other parities"
    return why if entry.layout == query.spec.layout else f"{why}, in layout {entry.layout}"


def _is_legal(query: _Query, entry: Entry, skipped: list[str]) -> bool:
    """Whether the entry's schedule can be loaded; if not, the reason goes to ``skipped``."""
    if entry.failed_check:
        skipped.append(f"{entry.graph_class} {entry.layout}: failed its last check, {entry.failed_check}")
        return False
    if query.tolerance is not None and entry.worst_error > query.tolerance:
        skipped.append(f"{entry.graph_class} {entry.layout}: its error was {entry.worst_error:.1e}")
        return False
    if query.faults and (fault := query.faults.get(entry.tuned_schedule.key)):
        skipped.append(f"{entry.graph_class} {entry.layout}: its schedule is in quarantine here, {fault}")
        return False
    if reason := query.once(id(entry), lambda: _why_illegal(query, entry)):
        skipped.append(f"{entry.graph_class} {entry.layout}: {reason}")
        return False
    return True


def _why_illegal(query: _Query, entry: Entry) -> str:
    try:
        query.kind.plan(query.kind.kernel_spec(query.spec, entry.tuned_schedule), find_schedule)
    except ScheduleError as error:
        return str(error)
    return ""


def _with_skipped(reason: str, skipped: list[str]) -> str:
    return f"{reason}; skipped: {' / '.join(skipped)}" if skipped else reason
