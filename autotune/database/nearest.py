"""Stored entries that may serve a query: which, in what order, and how their schedules are adjusted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.database.entry import Entry, is_alike
from autotune.database.store import Table, database_dirs, device_files, load_table, tuned_dirs
from autotune.database.trials import quarantine_path, quarantined
from autotune.workload.kinds.base import KernelKind
from autotune.workload.kinds.registry import kernel_kind
from autotune.workload.workload import GraphClass
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.channelwise import block_of_an_edge, group_paths
from kernelgen.kernels.product.schedule import CudaSchedule, Schedule
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import shape_of

# The order in which entries are considered, and whether one can be loaded.


def by_nearness(query: Query, entries: Iterable[Entry]) -> list[Entry]:
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


def is_legal(query: Query, entry: Entry, skipped: list[str]) -> bool:
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
    if reason := query.once(("legal", entry.tuned_schedule), lambda: why_illegal(query, entry.tuned_schedule)):
        skipped.append(f"{entry.graph_class} {entry.layout}: {reason}")
        return False
    return True


def why_illegal(query: Query, schedule: Knobs) -> str:
    """Why a schedule is not legal on the query's device; empty if it is."""
    if schedule.backend != query.spec.facts.backend:
        return f"a {schedule.backend} schedule cannot run on {query.spec.facts.name}"
    try:
        query.kind.plan(query.kind.kernel_spec(query.spec, schedule), query.find_schedule)
    except ScheduleError as error:
        return str(error)
    return ""


def with_skipped(reason: str, skipped: list[str]) -> str:
    return f"{reason}; skipped: {' / '.join(skipped)}" if skipped else reason


# A schedule tuned on another graph class or layout, for this one.


def fitted_schedule(query: Query, entry: Entry) -> tuple[Knobs, str]:
    """An entry's schedule with the knobs adjusted that depend on the graph class and the layout; how, in words."""
    reason = _why_nearest(query, entry)
    schedule = query.once((id(entry), "layout"), lambda: _in_layout(query, entry))
    there, here = entry.parsed_graph_class, query.graph_class
    if here is not None and here.log2_degree != there.log2_degree:
        factor = here.log2_degree - there.log2_degree
        schedule, fit = query.once((id(entry), factor), lambda: _fit(query, schedule, factor))
        reason += fit
    if there.waits_for_longest(query.spec.facts):
        return schedule, reason
    schedule, fit = for_skew(query, schedule)
    return schedule, reason + fit


def for_skew(query: Query, schedule: Knobs) -> tuple[Knobs, str]:
    """A schedule for the query's graph if that is skewed, and what was changed, in words; as it is if that is illegal.

    Deterministic kernels add in no other order than a node's own, so they keep their schedule.
    """
    even = schedule.for_skew()
    if not query.waits_for_longest or even == schedule or even.key in query.faults:
        return schedule, ""
    if query.once(("legal", even), lambda: why_illegal(query, even)):
        return schedule, ""
    return even, ", in runs of equal length for its longest node"


def _fit(query: Query, schedule: Knobs, log2_factor: int) -> tuple[Knobs, str]:
    """The schedule for that factor of edges per node, and what was changed, in words."""
    fitted = schedule.for_degree(2.0**log2_factor)
    if fitted == schedule or fitted.key in query.faults:
        return schedule, ""
    before, after = schedule.to_dict(), fitted.to_dict()
    changed = ", ".join(f"{name}={getattr(fitted, name)}" for name, value in after.items() if value != before[name])
    return fitted, f", with {changed} for its degree"


def _in_layout(query: Query, entry: Entry) -> Knobs:
    """An entry's schedule; that of another layout in the form for this one, if that is legal.

    Only for gradients of x, which are added in memory: there the form makes up for the layout (on an H200, 0.63 to 1.01
    times as long on 5,184 and on 21 atoms). Results are stored once; that form took 0.99 to 1.13 times as long.
    """
    schedule = entry.tuned_schedule
    adds = query.spec.operation == "conv" and "x" in query.spec.direction.live_outputs
    if entry.layout == query.spec.layout or not adds:
        return schedule
    moved = dataclasses.replace(entry, schedule=schedule.for_layout(query.spec.layout).to_dict())
    return moved.tuned_schedule if is_legal(query, moved, []) else schedule


def _why_nearest(query: Query, entry: Entry) -> str:
    if query.graph_class is None:
        why = ", the largest tuned graph (no graph class given)"
    elif query.graph_class.text == entry.graph_class:
        why = ""
    else:
        why = f", the nearest to {query.graph_class.text}"
    if entry.problem != query.spec.problem.key:
        why += ", for paths in another order or irreps of other parities"
    return why if entry.layout == query.spec.layout else f"{why}, in layout {entry.layout}"


# What a lookup asks for.


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
        slug = self.spec.facts.slug
        return self.once(
            "faults", lambda: quarantined((quarantine_path(folder, slug) for folder in database_dirs()), self.spec)
        )

    def once(self, key: Any, find: Callable[[], Any]) -> Any:
        """What ``find`` gives, for all queries with this ``met``."""
        if key not in self.met:
            self.met[key] = find()
        return self.met[key]


# Moves the schedule of one kernel of a product to another kernel: nearest choices, then the canonical form.


def nearest_values(knobs: Mapping[str, tuple], default: Knobs, schedule: Knobs) -> dict[str, Any]:
    """The choice of every knob that is nearest to a schedule's; the default's where none is near."""
    values = {}
    for knob, choices in knobs.items():
        value = getattr(schedule, knob)
        if value not in choices and isinstance(value, int):
            value = min(choices, key=lambda choice: abs(math.log((choice + 1) / (value + 1))))
        values[knob] = value if value in choices else getattr(default, knob)
    return values


def canonical_product(spec: Spec, schedule: Schedule) -> Schedule:
    """Set knobs without effect on the kernel of a channelwise product to their default values."""
    changes: dict[str, Any] = {}
    fresh, plain = type(schedule)(), spec.operation == "plain"
    fused = schedule.fuse and not plain
    owned = fused and schedule.accumulate == "registers"
    block = _block_of_an_edge(spec, schedule) if fused or plain else {}
    if plain:
        changes["fuse"] = fresh.fuse
    if not (fused or block):
        changes["accumulate"] = fresh.accumulate
    if not owned:
        changes["order"] = fresh.order
    if isinstance(schedule, CudaSchedule):
        changes["stage_edges"] = min(schedule.stage_edges, schedule.lanes)
        if owned:
            changes["edges_per_chunk"] = fresh.edges_per_chunk
        else:
            changes["teams_per_node"] = 1
        if changes.get("teams_per_node", schedule.teams_per_node) == 1:
            changes["finish"] = "blocks"
        if not (fused or plain) or schedule.accumulate == "owners":
            changes["zeros"] = "apart"
        if schedule.zeros == "cut" and not (fused and schedule.has_long_runs):
            changes["zeros"] = "apart"
        if not fused or schedule.accumulate != "atomics":
            changes["runs"] = "fixed"
        if not set("xg") & set(spec.direction.live_outputs):
            changes["writes"] = "lanes"
        if fused and schedule.accumulate == "owners":
            changes["warps_per_edge"] = 1
        elif not owned:
            changes["stage_edges"] = min(changes["stage_edges"], max(4, schedule.edges_per_chunk))
    return dataclasses.replace(schedule, **changes | block)


def _block_of_an_edge(spec: Spec, schedule: Schedule) -> dict[str, int]:
    """If each gradient of y has one writer, make the teams that share an edge one block, where possible."""
    alone = spec.deterministic or schedule.accumulate == "owners"
    if not isinstance(schedule, CudaSchedule) or not alone or "y" not in spec.direction.live_outputs:
        return {}
    return block_of_an_edge(group_paths(spec.problem, schedule.path_groups), schedule)


# Databases of other devices that may serve this one, the nearest first.


def kindred_tables(facts: DeviceFacts) -> Iterator[Table]:
    """Databases of other devices that may serve this one: of its architecture, for a GPU then of others.

    Nearest number of multiprocessors or cores first.
    """
    files: dict[str, list[Path]] = {}
    for directory in tuned_dirs():
        for path in device_files(directory):
            files.setdefault(path.stem, []).append(path)
    tables = [(slug, load_table(*paths)) for slug, paths in sorted(files.items()) if slug != facts.slug]
    # CUDA text compiles for every compute capability; a host's schedules depend on the width of its vectors.
    ranked = sorted(tables, key=lambda item: (device_distance(item[1].device, facts), item[0]))
    for _, table in ranked:
        if _is_kindred(table.device, facts) or table.device.get("backend") == facts.backend == "cuda":
            yield table


def is_of_architecture(entry: Entry, facts: DeviceFacts) -> bool:
    """Whether another device's entry was measured on this one's architecture."""
    kindred = (table for table in kindred_tables(facts) if _is_kindred(table.device, facts))
    found = (table.by_identity.get(entry.identity) for table in kindred)
    return any(one is not None and (one.time_us, one.date) == (entry.time_us, entry.date) for one in found)


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
