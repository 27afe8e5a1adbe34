"""Stored entries that may serve a query: which, in what order, and how their schedules are adjusted.

Also the values that each knob of a product may take on a device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.database.entry import Entry, is_alike
from autotune.database.store import Table, database_dirs, device_files, load_table, tuned_dirs
from autotune.database.trials import quarantine_path, quarantined
from autotune.workload.kind import KernelKind
from autotune.workload.known_kinds import kernel_kind
from autotune.workload.workload import GraphClass
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.knobs import Knobs, power_of_two_at_most
from kernelgen.kernels.pairs.channels import channels_of
from kernelgen.kernels.pairs.plan import pair_paths
from kernelgen.kernels.product.channelwise import block_of_an_edge, group_paths
from kernelgen.kernels.product.plan import bytes_ahead, small_graph_edges
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule, Schedule
from kernelgen.kernels.radial.plan import RadialSchedule
from kernelgen.kernels.spec import BYTES, Spec
from kernelgen.problem.product import TensorProductProblem, shape_of


def by_nearness(query: Query, entries: Iterable[Entry]) -> list[Entry]:
    """Same layout first, then the nearest graph class, the larger graph, the problem itself; ties break by text."""

    def rank(entry: Entry) -> tuple[Any, ...]:
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


def fitted_schedule(query: Query, entry: Entry) -> tuple[Knobs, str]:
    """An entry's schedule with the knobs adjusted that depend on the graph class and the layout; how, in words."""
    reason = _why_nearest(query, entry)
    schedule = query.once((id(entry), "layout"), lambda: _in_layout(query, entry))
    there, here = entry.parsed_graph_class, query.graph_class
    if here is not None and here.log2_degree != there.log2_degree:
        factor = here.log2_degree - there.log2_degree
        fitted = query.once((id(entry), factor), lambda: schedule.for_degree(2.0**factor))
        if fitted != schedule and fitted.key not in query.faults:
            before, after = schedule.to_dict(), fitted.to_dict()
            changed = (f"{name}={getattr(fitted, name)}" for name, value in after.items() if value != before[name])
            schedule, reason = fitted, f"{reason}, with {', '.join(changed)} for its degree"
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


def nearest_values(knobs: Mapping[str, tuple[Any, ...]], default: Knobs, schedule: Knobs) -> dict[str, Any]:
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
    block: dict[str, int] = {}
    # If each gradient of y has one writer, the teams that share an edge are one block, where possible.
    alone = (fused or plain) and (spec.deterministic or schedule.accumulate == "owners")
    if alone and isinstance(schedule, CudaSchedule) and "y" in spec.direction.live_outputs:
        block = block_of_an_edge(group_paths(spec.problem, schedule.path_groups), schedule)
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


# The values that each knob of a product may take, for one kernel on one device.

# Group counts tried one by one beyond one per input block: the best count is rarely a round number.
FINE_GROUPS = 3
# Edges of a run, besides, where a run's end costs more: it cuts a row.
LONGER_RUNS = (64, 128)
# Choices for every CUDA kernel.
BLOCKS: dict[str, tuple[Any, ...]] = {"block_size": (32, 64, 128, 256, 512), "min_blocks": (0, 1, 2, 3, 4, 6, 8)}


def product_knobs(spec: Spec, num_edges: int | None, skewed: bool = False) -> dict[str, tuple[Any, ...]]:
    """Choices for a channelwise product; they include the values of ``spec``'s schedule.

    skewed: a GPU would wait for the graph's longest node, so that workers take long runs of edges.
    """
    problem, facts, conv = spec.problem, spec.facts, spec.operation == "conv"
    knobs: dict[str, tuple[Any, ...]] = {}
    owners = ("owners",) if _has_owners(spec, num_edges) else ()
    if conv:
        knobs["accumulate"] = ("registers", "atomics", *owners)
        knobs["order"] = ("receiver", "sender")
    elif owners:
        knobs["accumulate"] = ("registers", *owners)
    # Every count up to slightly more than one per input block, then doubling up to one per path.
    least, most = len(_multiplicities(problem)), max(1, len(problem.paths))
    blocks = max(least, len({path.in1 for path in problem.paths}))
    doubled = itertools.takewhile(lambda count: count < most, (blocks * 2**power for power in range(16)))
    few = range(least, min(most, blocks + FINE_GROUPS) + 1)
    knobs["path_groups"] = tuple(sorted({least, most, *few, *doubled}))
    knobs["edges_per_chunk"] = (8, 32, 128) if facts.backend == "cpu" else (1, 2, 8, 16, 32)
    small, cuda = _is_small(facts, num_edges), facts.backend == "cuda"
    knobs |= _cuda_knobs(problem, small) if cuda else _host_knobs(spec)
    if cuda and conv:
        if not problem.shared_weights:
            knobs["prefetch"] = (*knobs["prefetch"], "ring2", "ring4")
        knobs["teams_per_node"] = (1, 2, 4, 8)
        knobs["finish"] = ("blocks", "unrolled")
        if not spec.deterministic:
            knobs["runs"] = ("fixed", "waves")
            knobs["edges_per_chunk"] += LONGER_RUNS if skewed else ()
    if cuda and conv and spec.layout == "mul_ir" and set("xg") & set(spec.direction.live_outputs):
        knobs["writes"] = ("lanes", "rows")
    if skewed and _stores_rows(spec):
        knobs["zeros"] = ("apart", "cut")
    elif _waits_for_zeros(spec, num_edges):
        knobs["zeros"] = ("apart", "inside")
    for knob, choices in knobs.items():
        value = getattr(spec.schedule, knob)
        knobs[knob] = choices if value in choices else (*choices, value)
    return knobs


def pair_knobs(spec: Spec) -> dict[str, tuple[Any, ...]]:
    """Choices for an edge-by-edge kernel of pairs: teams per edge, warp and multiprocessor, or threads on a CPU."""
    if spec.facts.backend == "cpu":
        return {"threads": threads_of(spec.facts)}
    if channels_of(spec):
        return dict(BLOCKS)
    knobs: dict[str, tuple[Any, ...]] = {**BLOCKS, "edges_per_warp": (1, 2, 4, 8)}
    if not spec.deterministic:
        knobs["path_groups"] = tuple(n for n in (1, 2, 4, 8) if n <= max(1, len(pair_paths(spec.problem))))
    return knobs


def _is_small(facts: DeviceFacts, num_edges: int | None) -> bool:
    return num_edges is not None and num_edges <= small_graph_edges(facts)


def _has_owners(spec: Spec, num_edges: int | None) -> bool:
    """Whether to try ``accumulate="owners"``: for plain gradients of y, and edge gradients on small graphs."""
    live = spec.direction.live_outputs
    if spec.facts.backend != "cuda" or "g" in live:
        return False
    if spec.operation == "plain":
        return "y" in live and not spec.deterministic  # a deterministic kernel has one writer anyway
    return live != "x" and _is_small(spec.facts, num_edges)


def _waits_for_zeros(spec: Spec, num_edges: int | None) -> bool:
    """Whether a separate launch that writes zeros may matter: gradients on small graphs, y of a plain product."""
    if spec.deterministic or spec.facts.backend != "cuda" or spec.facts.is_hip:
        return False
    live = spec.direction.live_outputs
    return "g" not in live and ("y" in live if spec.operation == "plain" else _is_small(spec.facts, num_edges))


def _stores_rows(spec: Spec) -> bool:
    """Whether runs of edges by receiver may store rows of values: a forward convolution on a GPU of CUDA."""
    fits = spec.operation == "conv" and spec.facts.backend == "cuda" and not spec.facts.is_hip
    return fits and spec.direction.outputs == "g" and not spec.deterministic


def threads_of(facts: DeviceFacts) -> tuple[int, ...]:
    """All cores (0) or half of them."""
    return (0, facts.units // 2) if facts.units >= 4 else (0,)


def _multiplicities(problem: TensorProductProblem) -> list[int]:
    return sorted({path.mul for path in problem.paths}) or [1]


def _host_knobs(spec: Spec) -> dict[str, tuple[Any, ...]]:
    """Channel blocks of half a machine vector to four, none wider than the channels; threads."""
    lanes = spec.facts.vector_bytes // BYTES[spec.dtype]
    widest = max(4, 2 * power_of_two_at_most(_multiplicities(spec.problem)[-1]) - 1)
    blocks = [size for size in HostSchedule.choices["channel_block"] if lanes // 2 <= size <= min(widest, 4 * lanes)]
    return {"channel_block": tuple(blocks) or (4,), "threads": threads_of(spec.facts)}


def _cuda_knobs(problem: TensorProductProblem, small: bool) -> dict[str, tuple[Any, ...]]:
    """Teams of a quarter of the fewest channels to twice the most; channels per lane that divide every multiplicity.

    A small team with four channels per lane reads a quarter of the edge values from shared memory. With one channel per
    lane those reads take four times as long as the arithmetic on them (128 bytes per cycle and multiprocessor).
    """
    fewest, most = _multiplicities(problem)[0], _multiplicities(problem)[-1]
    teams = tuple(edges for edges in (1, 2, 4) if min(8, fewest / 4) <= 32 // edges < 2 * most)
    return {
        "edges_per_warp": teams or (8,),
        "channels_per_thread": tuple(c for c in (1, 2, 4) if all(mul % c == 0 for mul in _multiplicities(problem))),
        "warps_per_edge": (1, 2, 4),
        "edge_operand": ("inline", "shared", "basis"),
        "stage_edges": (4, 8, 16, 32),
        "prefetch": ("none", "reload", "copy"),
        "ahead": ("none", "weights", "rows", *(("all", "along") if small else ())),
        "stream": (False, True),
        **BLOCKS,
    }


Step = Callable[[Knobs], Knobs | None]
BLACKWELL = 100
# Most steps from a schedule to its legal form.
MOST_STEPS = 5


def legal_form(schedule: Knobs, is_legal: Callable[[Knobs], bool]) -> Knobs | None:
    """The schedule itself if it is legal, else the legal one that is the fewest steps away; None if there is none.

    A step gives one knob its next lower value, in this order of preference: fewer blocks that must fit at once; blocks
    of half the threads, twice as many of which must fit (what a team does stays as it is); fewer edges fetched at a
    time; fewer edges ahead; fewer teams a node; no rows prefetched to L2; zeros by a
    launch of their own. Products of four warps, which one architecture has, become those of each warp first.
    """
    if is_legal(schedule):
        return schedule
    steps = [step for step in _STEPS if step(schedule) is not None]
    for count in range(1, MOST_STEPS + 1):
        for chosen in itertools.combinations_with_replacement(steps, count):
            form: Knobs | None = schedule
            for step in chosen:
                form = None if form is None else step(form)
            if form is not None and is_legal(form):
                return form
    return None


def _lower(schedule: Knobs, knob: str) -> Knobs | None:
    """With the knob's next lower value above 0; None if there is none."""
    values = [value for value in schedule.choices.get(knob, ()) if 0 < value < getattr(schedule, knob)]
    return dataclasses.replace(schedule, **{knob: max(values)}) if values else None


def _half_the_block(schedule: Knobs) -> Knobs | None:
    form, doubled = _lower(schedule, "block_size"), 2 * getattr(schedule, "min_blocks", 0)
    if form is None or doubled not in form.choices["min_blocks"] or doubled <= 2:
        return form
    return dataclasses.replace(form, **{"min_blocks": doubled})


def _other(schedule: Knobs, knob: str, of: tuple[str, ...], by: str) -> Knobs | None:
    """With another value of a knob that has one of these; None if it has not."""
    return dataclasses.replace(schedule, **{knob: by}) if getattr(schedule, knob, by) in of else None


def _by_single_warps(schedule: Knobs) -> Knobs | None:
    if isinstance(schedule, RadialSchedule) and schedule.products == "wgmma":
        return schedule.by_single_warps()
    return None


_STEPS: tuple[Step, ...] = (
    _by_single_warps,
    functools.partial(_lower, knob="min_blocks"),
    _half_the_block,
    functools.partial(_lower, knob="stage_edges"),
    functools.partial(_other, knob="prefetch", of=("ring4",), by="ring2"),
    functools.partial(_lower, knob="stages"),
    functools.partial(_lower, knob="teams_per_node"),
    functools.partial(_other, knob="ahead", of=("weights", "rows"), by="none"),
    functools.partial(_other, knob="zeros", of=("inside", "cut"), by="apart"),
)


def within_limits(query: Query, entry: Entry, there: DeviceFacts) -> tuple[Entry, str]:
    """An entry of another device with a schedule that suits this one, and what was changed, in words.

    It is legal here, and what it prefetches fits into L2 if it did ``there``, where it was tuned. The entry itself
    where that holds, or for no form of it.
    """
    fitted_there = _fits_l2(query, entry.tuned_schedule, there)

    def suits(schedule: Knobs) -> bool:
        if query.once(("legal", schedule), lambda: why_illegal(query, schedule)):
            return False
        return not fitted_there or _fits_l2(query, schedule, query.spec.facts)

    found = legal_form(_with_registers(entry, there, query.spec.facts), suits)
    if found is None or found == entry.tuned_schedule:
        return entry, ""
    before, after = entry.tuned_schedule.to_dict(), found.to_dict()
    changed = ", ".join(f"{name}={value}" for name, value in after.items() if value != before.get(name))
    return dataclasses.replace(entry, schedule=after), f", with {changed} for this device's limits"


def _with_registers(entry: Entry, there: DeviceFacts, here: DeviceFacts) -> Knobs:
    """The schedule, without the limit of registers (``min_blocks``) if it bound before Blackwell and this is Blackwell.

    From compute capability 10.0 NVRTC 13.5 pairs floats and takes up to 1.4 times as many registers for the same text:
    kernels that spilled 0 and 36 bytes at their limit for sm_90 spill 1,808 and 2,828 there, and none without a limit.
    """
    schedule = entry.tuned_schedule
    limited = getattr(schedule, "block_size", 0) * getattr(schedule, "min_blocks", 0)
    if not (limited and _capability(there) < BLACKWELL <= _capability(here)):
        return schedule
    limit = there.registers_per_unit // limited // 8 * 8
    return (
        dataclasses.replace(schedule, **{"min_blocks": 0}) if entry.resources.get("registers", 0) >= limit else schedule
    )


def _capability(facts: DeviceFacts) -> int:
    number = facts.arch.removeprefix("sm_")
    return int(number) if number.isdecimal() else 0


def _fits_l2(query: Query, schedule: Knobs, facts: DeviceFacts) -> bool:
    if getattr(schedule, "ahead", "") not in ("weights", "rows"):
        return True
    try:
        spec = query.kind.kernel_spec(dataclasses.replace(query.spec, facts=facts), schedule)
        return bytes_ahead(query.kind.plan(spec, query.find_schedule)) <= facts.l2_bytes
    except ScheduleError:
        return False  # not legal there
