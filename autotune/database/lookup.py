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
import functools
import math
import numbers
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.database.entry import Entry
from autotune.database.quarantine import quarantine_path, quarantined
from autotune.database.store import Table, database_dirs, database_path, device_files, load_table
from autotune.errors import TuningMissError
from autotune.workload.graph_class import GraphClass
from autotune.workload.kinds.base import KernelKind, Problem
from autotune.workload.kinds.registry import kernel_kind
from kernelgen.device import DeviceFacts
from kernelgen.errors import ProblemError, ScheduleError
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
    """``spec``: as the operation's kind makes it. any_size: whether entries of much smaller or larger graphs count."""

    spec: Any
    graph_class: GraphClass | None
    tolerance: float | None = None
    any_size: bool = False

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

    @functools.cached_property
    def faults(self) -> dict[str, str]:
        """Schedules that failed on this device, by key, with the reason."""
        lists = (quarantine_path(directory, self.spec.facts.slug) for directory in database_dirs())
        return quarantined(lists, self.spec)


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
    name = direction if isinstance(direction, str) else direction.name
    kind = kernel_kind(operation)
    if name not in kind.directions:
        raise ProblemError(f"direction is {name!r}; expected one of {tuple(kind.directions)}")
    spec = kind.spec(problem, operation, name, dtype.removeprefix("torch."), layout, facts, deterministic)
    check_tolerance(tolerance)
    query = _Query(spec, GraphClass.parse(graph_class) if isinstance(graph_class, str) else graph_class, tolerance)
    skipped: list[str] = []
    must = strict_by_environment() if strict is None else strict
    tuning = _recorded(query, skipped)
    if tuning is None and (must or tolerance is not None):
        tuning = _recorded(dataclasses.replace(query, any_size=True), skipped)  # better than an error
    if must:
        _require_this_device(query, tuning, skipped)
    if tuning is None and tolerance is not None:
        raise TuningMissError(
            _with_skipped(
                f"no record proves a relative error of at most {tolerance:g} for {query.kernel} on {facts.name}; run "
                "`equitune tune` for it, or ask for less",
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
    facts = query.spec.facts
    table = load_table(*(database_path(directory, facts.slug) for directory in database_dirs()))
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


def _on_other_device(query: _Query, skipped: list[str]) -> Tuning | None:
    for table in _kindred_tables(query.spec.facts):
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
    schedule, there, here = _in_layout(query, entry), entry.parsed_graph_class, query.graph_class
    if here is not None and here.log2_degree != there.log2_degree:
        fitted = schedule.for_degree(2.0 ** (here.log2_degree - there.log2_degree))
        changed = [name for name, value in fitted.to_dict().items() if value != schedule.to_dict()[name]]
        if fitted.key in query.faults:
            fitted, changed = schedule, []
        if changed:
            reason += f", with {', '.join(f'{name}={getattr(fitted, name)}' for name in changed)} for its degree"
        schedule = fitted
    return Tuning(schedule, origin, entry, _with_skipped(reason, skipped))


def _in_layout(query: _Query, entry: Entry) -> Knobs:
    """An entry's schedule; that of another layout in the form for this one, if that is legal.

    Only of large graphs, whose kernels the additions in memory limit.
    """
    schedule, small = entry.tuned_schedule, entry.parsed_graph_class.is_small
    if entry.layout == query.spec.layout or query.spec.operation != "conv" or small:
        return schedule
    moved = dataclasses.replace(entry, schedule=schedule.for_layout(query.spec.layout).to_dict())
    return moved.tuned_schedule if _is_legal(query, moved, []) else schedule


def _default(query: _Query, skipped: list[str]) -> Tuning:
    reason = (
        "nothing is tuned for this problem at about this size, on this device or its architecture; using the "
        "default schedule"
    )
    num_edges = None if query.graph_class is None else 2**query.graph_class.log2_edges
    schedule = query.kind.default(query.spec, num_edges)
    if fault := query.faults.get(schedule.key):
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


def is_alike(spec: Any, graph_class: GraphClass | None, entry: Entry) -> bool:
    """Whether an entry applies to a graph: for a GPU's convolutions, if both graphs are small or both are large.

    On an H200 schedules tuned on graphs of 2^16 to 2^19 edges took 1.5 to 2.2 times as long as the default on 306 edges
    (124 pairs), and 0.80 to 1.13 times as long on graphs of that range. Convolutions have a separate default for small
    graphs; other operations have one for all sizes.
    """
    if graph_class is None or spec.facts.backend != "cuda" or spec.operation != "conv":
        return True
    return graph_class.is_small == entry.parsed_graph_class.is_small


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
    if fault := query.faults.get(entry.tuned_schedule.key):
        skipped.append(f"{entry.graph_class} {entry.layout}: its schedule is in quarantine here, {fault}")
        return False
    try:
        query.kind.plan(query.kind.kernel_spec(query.spec, entry.tuned_schedule), find_schedule)
    except ScheduleError as error:
        skipped.append(f"{entry.graph_class} {entry.layout}: {error}")
        return False
    return True


def _with_skipped(reason: str, skipped: list[str]) -> str:
    return f"{reason}; skipped: {' / '.join(skipped)}" if skipped else reason


def _kindred_tables(facts: DeviceFacts) -> Iterator[Table]:
    """Databases of other devices of this architecture, nearest number of multiprocessors or cores first."""
    files: dict[str, list[Path]] = {}
    for directory in database_dirs():
        for path in device_files(directory):
            files.setdefault(path.stem, []).append(path)
    tables = [(slug, load_table(*paths)) for slug, paths in sorted(files.items()) if slug != facts.slug]
    kindred = [(slug, table) for slug, table in tables if _is_kindred(table.device, facts)]
    yield from (
        table for _, table in sorted(kindred, key=lambda item: (device_distance(item[1].device, facts), item[0]))
    )


def device_distance(device: Mapping[str, Any], facts: DeviceFacts) -> tuple[bool, bool, float]:
    """Sort key for the distance between a database's device and this one: backend, then architecture, then size."""
    backend, kindred = device.get("backend") == facts.backend, _is_kindred(device, facts)
    units = device.get("units")
    if not isinstance(units, int | float) or units <= 0:
        return not backend, not kindred, math.inf
    return not backend, not kindred, abs(math.log2(units / max(1, facts.units)))


def _is_kindred(device: Mapping[str, Any], facts: DeviceFacts) -> bool:
    same = device.get("backend") == facts.backend and device.get("arch") == facts.arch
    return same and (facts.backend != "cpu" or device.get("vector_bytes") == facts.vector_bytes)
