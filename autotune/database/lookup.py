"""Find the schedule to load for a problem on a device: a :class:`Tuning` with its origin.

Lookup goes through these steps, from the best evidence to none. Within a step the nearest graph class comes first
(larger graphs first if it is unknown or tied, because kernels and not launches dominate their time):

1. ``exact``: tuned for this problem, direction, dtype, layout and graph class on this device;
2. ``nearest``: on this device, another graph class in the same layout, then any graph class in the other layout, for
   this problem or one of its shape (the same but for parities and the order of paths, ``shape_of``);
3. ``other-device``: another device of the same architecture (CUDA: the same compute capability; CPU: the same
   machine type and vector width), nearest in size first; then CUDA devices of other compute capabilities. A schedule
   that exceeds this device's limits is served in the nearest legal form (``candidates.legal_form``);
4. ``predicted``: for channelwise products on a GPU, by a model of time that was fitted to a device's trials
   (``prediction``). Its first run tries the next likely schedules too, also where another device's entry is used, and
   the fastest stays: ``tried`` (``kernelgen.ops.first_run``);
5. ``default``: by rules, from device facts alone.

Convolutions on a GPU use an entry of step 2 or 3 only if both graphs are small or both are large, unless a default
would be an error.

A stored schedule is skipped, with the reason noted, if it is not legal here, failed its last check, or is in quarantine
(it failed in a search on this device). Lookup never searches or compiles.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autotune.database.entry import Entry
from autotune.database.nearest import (
    Query,
    by_nearness,
    fitted_schedule,
    for_skew,
    is_legal,
    kindred_tables,
    with_skipped,
    within_limits,
)
from autotune.database.predicted import Predicted, chosen_before, forms_for_skew, predict, serves, tries
from autotune.database.store import Table, database_dirs, database_path, load_table, tuned_dirs
from autotune.errors import TuningMissError
from autotune.paths import typed
from autotune.workload.kind import Problem
from autotune.workload.known_kinds import VECTORS, VectorsKind, kernel_kind, product_schedule
from autotune.workload.workload import GraphClass
from kernelgen.arithmetic.directions import DIRECTIONS, HARMONICS_DIRECTIONS, Direction
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.errors import ProblemError, UnsupportedError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.plan import small_graph_edges
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spherical_harmonics import VectorSchedule
from kernelgen.ops.harmonics import HarmonicProduct, build_harmonics
from kernelgen.ops.product import build
from kernelgen.problem.other_kinds import VectorProblem

_NOTHING = "nothing is tuned for this problem at about this size, on this device or its architecture"


@dataclass(frozen=True)
class Tuning:
    """A schedule and where it came from.

    origin: ``exact``, ``nearest``, ``other-device``, ``predicted``, ``tried`` (the fastest in a first run on this
    device), ``default``, or ``given`` (by the caller). entry: the database entry, if any. reason: one sentence for
    people. others: schedules that a first run on a graph of this size tries beside this one.
    """

    schedule: Knobs
    origin: str
    entry: Entry | None
    reason: str
    others: tuple[Knobs, ...] = ()

    def after_first_run(self, place: int, times_us: Sequence[float]) -> Tuning:
        """What stays. place: of the schedule, this one's first, among all that were tried; times_us: of each."""
        schedule = (self.schedule, *self.others)[place]
        times = ", ".join(f"{time_us:.1f}" for time_us in times_us)
        found = f"the fastest of {len(times_us)} schedules in a first run on this device ({times} us)"
        return Tuning(schedule, "tried", self.entry if place == 0 else None, f"{found}; {self.reason}")


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
    kind, dtype = kernel_kind(operation), dtype.removeprefix("torch.")
    spec = kind.spec(problem, operation, direction, dtype, layout, facts, deterministic)
    return Finder(spec, strict, tolerance).find(graph_class)


def plan_for(spec: Any, schedule: Knobs) -> Any:
    """The plan of the kernel that is compiled for a schedule; ScheduleError if it is illegal."""
    kind = kernel_kind(spec.operation)
    return kind.plan(kind.kernel_spec(spec, schedule), find_schedule)


class Finder:
    """:func:`find_schedule` for several graph classes: what they share is read and checked once.

    spec: of the kernel, as its kind makes it, with any schedule.
    """

    def __init__(self, spec: Any, strict: bool | None = None, tolerance: float | None = None) -> None:
        check_tolerance(tolerance)
        self._query = Query(spec, find_schedule, tolerance=tolerance)
        asked = os.environ.get("EQUITUNE_STRICT", "").strip().lower() not in ("", "0", "false", "no", "off")
        self._must = asked if strict is None else strict

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
                with_skipped(
                    f"no record proves a relative error of at most {tolerance:g} for {query.kernel} on "
                    f"{query.spec.facts.name}; run `{typed('tune')}` for it, or ask for less",
                    skipped,
                )
            )
        if tuning is None and (found := _prediction(query)):
            reason = with_skipped(f"{_NOTHING}; {found.reason}", skipped)
            tuning = _tried(query, Tuning(found.schedule, "predicted", None, reason, found.others))
        return tuning or _default(query, skipped)


def check_tolerance(tolerance: Any) -> None:
    """ProblemError unless it is a positive number, or None."""
    if tolerance is not None and not (isinstance(tolerance, numbers.Real) and float(tolerance) > 0):
        raise ProblemError(f"tolerance is {tolerance!r}; expected a positive relative error, such as 1e-6, or None")


def _recorded(query: Query, skipped: list[str]) -> Tuning | None:
    return _on_this_device(query, skipped) or _on_other_device(query, skipped)


def _on_this_device(query: Query, skipped: list[str]) -> Tuning | None:
    files = (database_path(directory, query.spec.facts.slug) for directory in tuned_dirs())
    table: Table = query.once("table", lambda: load_table(*files))
    if query.graph_class is not None:
        flags = (query.spec.layout, query.graph_class.text, query.spec.deterministic)
        exact = table.by_identity.get((*query.kernel, *flags))
        if exact is not None and is_legal(query, exact, skipped):
            reason = f"tuned on this device for {query.graph_class.text}"
            return Tuning(exact.tuned_schedule, "exact", exact, with_skipped(reason, skipped))
    else:
        exact = None
    for entry in by_nearness(query, table.by_kernel.get(query.shape, ())):
        if entry is not exact and is_legal(query, entry, skipped):
            reason = f"tuned on this device for {entry.graph_class}"
            return _with_others(query, _fitted(query, entry, "nearest", reason, skipped), entry)
    return None


def _on_other_device(query: Query, skipped: list[str]) -> Tuning | None:
    for table in query.once("kindred", lambda: list(kindred_tables(query.spec.facts))):
        there = _facts_of(table, query.spec.facts)
        for known in by_nearness(query, table.by_kernel.get(query.shape, ())):
            entry, changes = query.once((id(known), "limits"), functools.partial(within_limits, query, known, there))
            if is_legal(query, entry, skipped):
                arch, here = table.device.get("arch"), query.spec.facts.arch
                where = f"also {arch}" if arch == here else f"{arch}, this is {here}: never measured here"
                reason = (
                    f"nothing is tuned for this problem on this device; using an entry of {table.device.get('name')} "
                    f"({where}) for {entry.graph_class}{changes}"
                )
                return _with_others(query, _fitted(query, entry, "other-device", reason, skipped), entry)
    return None


def _with_others(query: Query, tuning: Tuning, entry: Entry) -> Tuning:
    """A schedule of another graph or device, with what a first run tries beside it.

    On a skewed graph, its other forms; of another device, what is likely to be fast here. A proven error is proven of
    one schedule.
    """
    if query.tolerance is not None:
        return tuning
    others: list[Knobs] = []
    known = entry.tuned_schedule
    if query.waits_for_longest and isinstance(known, CudaSchedule) and serves(query.spec):
        others += query.once((id(entry), "forms"), lambda: forms_for_skew(query.spec, known))
    if tuning.origin == "other-device" and (found := _prediction(query)):
        others += [found.schedule, *found.others]
    usable = [one for one in dict.fromkeys(others) if one != tuning.schedule and one.key not in query.faults]
    return _tried(query, dataclasses.replace(tuning, others=tuple(usable[: tries() - 1])))


def _tried(query: Query, tuning: Tuning) -> Tuning:
    """The tuning after its first run, if an earlier process had one."""
    if not tuning.others or query.graph_class is None:
        return tuning
    kernel = (*query.kernel, query.spec.layout)
    found = chosen_before(kernel, query.graph_class, query.spec.facts, (tuning.schedule, *tuning.others))
    return tuning.after_first_run(*found) if found else tuning


def _facts_of(table: Table, here: DeviceFacts) -> DeviceFacts:
    """Facts of a table's GPU; those of this device for another, or for a record that does not tell."""
    arch, units = table.device.get("arch"), table.device.get("units")
    if here.backend != "cuda" or not isinstance(arch, str) or not isinstance(units, int):
        return here
    try:
        return cuda_facts(arch, units=units)
    except UnsupportedError:
        return here


def _fitted(query: Query, entry: Entry, origin: str, reason: str, skipped: list[str]) -> Tuning:
    schedule, changes = fitted_schedule(query, entry)
    return Tuning(schedule, origin, entry, with_skipped(reason + changes, skipped))


def _prediction(query: Query) -> Predicted | None:
    key = ("predicted", query.graph_class)
    return query.once(key, lambda: predict(query.spec, query.graph_class, query.faults.keys()))


def _default(query: Query, skipped: list[str]) -> Tuning:
    reason = f"{_NOTHING}; using the default schedule"
    # Defaults only tell small graphs from large ones.
    small = query.graph_class is not None and query.graph_class.is_small(query.spec.facts)
    num_edges = small_graph_edges(query.spec.facts) if small else None
    schedule = query.once(("default", num_edges), lambda: query.kind.default(query.spec, num_edges))
    schedule, changed = for_skew(query, schedule)
    reason += changed
    if query.faults and (fault := query.faults.get(schedule.key)):
        if found := _recorded(dataclasses.replace(query, any_size=True), skipped):
            return found
        raise TuningMissError(
            f"the default schedule of {query.kernel} is in quarantine on {query.spec.facts.name} ({fault}), and no "
            f"other schedule is known; run `{typed('tune')}` for it, or delete its line in results/quarantine to try "
            "again"
        )
    return Tuning(schedule, "default", None, with_skipped(reason, skipped))


def _require_this_device(query: Query, tuning: Tuning | None, skipped: list[str]) -> None:
    if tuning is not None and tuning.origin in ("exact", "nearest"):
        return
    spec, searched = query.spec, ", ".join(str(directory) for directory in database_dirs())
    raise TuningMissError(
        with_skipped(
            f"strict lookup: no tuned {spec.operation} {spec.direction.name} {spec.dtype} for {spec.problem.key} "
            f"on {spec.facts.name} in {searched}; run `{typed('tune')}` for it, or unset strict / EQUITUNE_STRICT",
            skipped,
        )
    )


def build_vectors(
    problem: VectorProblem,
    places: Mapping[str, str],
    dtype: str,
    layout: str,
    facts: DeviceFacts,
    device: Any,
    graph_class: GraphClass | None,
    deterministic: bool = False,
) -> HarmonicProduct:
    """Build product and harmonics with the known schedules; ``places``: where harmonics are formed, by direction."""
    number = None if graph_class is None else GraphClass("harmonics", graph_class.log2_edges)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
    harmonics: dict[str, Any] = {
        name: find_schedule(problem.harmonics, "harmonics", name, dtype, "mul_ir", facts, number, False).schedule
        for name in HARMONICS_DIRECTIONS
    }
    kernel = (dtype, layout, facts, graph_class, deterministic)
    product = {
        name: product_schedule(find_schedule, problem, name, places.get(name, "apart"), *kernel) for name in DIRECTIONS
    }
    return HarmonicProduct(
        build(problem.product, product, layout=layout, deterministic=deterministic, **options),
        build_harmonics(problem.harmonics, harmonics, **options),
        [name for name, place in places.items() if place == "inside"],
    )


def directions_inside(
    problem: VectorProblem,
    dtype: str,
    layout: str,
    facts: DeviceFacts,
    graph_class: GraphClass | None,
    strict: bool | None,
) -> list[str]:
    """The directions whose kernels are faster with the harmonics inside, as measured or by default.

    For the others the product's own schedule decides whether its kernel includes gather and sum.
    """
    graph_class = None if graph_class is None else dataclasses.replace(graph_class, operation=VECTORS)
    found = []
    for name in VectorsKind.directions:
        tuning = find_schedule(problem, VECTORS, name, dtype, layout, facts, graph_class, strict)
        assert isinstance(tuning.schedule, VectorSchedule)
        found += [name] if tuning.schedule.harmonics == "inside" else []
    # The gradient of x alone reads the same data as the value, and is not tuned separately.
    return [*found, *(("source_backward",) if "forward" in found else ())]
