"""The schedule that the model predicts to be fastest for a kernel without an entry, and what it is expected to cost.

The model ranks the rules' default and other problems' winners; what first runs chose of its shortlist is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from autotune.database.model_of_time import Features, PredictionTable, Trees, Winner, table_for
from autotune.database.nearest import FINE_GROUPS, canonical_product, nearest_values, product_knobs
from autotune.database.store import FileCache, database_path, replace_file
from autotune.workload.workload import GraphClass
from kernelgen.compile.compiler import cache_dir
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.errors import EquituneError, ScheduleError
from kernelgen.files import parse_json
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.channelwise import Plan
from kernelgen.kernels.product.plan import (
    SMALL_GRAPH_EDGES,
    OwnersPlan,
    default_schedule,
    product_plan,
    small_graph_edges,
)
from kernelgen.kernels.product.schedule import CudaSchedule, Schedule
from kernelgen.kernels.spec import Spec
from kernelgen.ops.base import DTYPES
from kernelgen.ops.first_run import LISTENERS, Choice, best_of
from kernelgen.problem.product import size_class
from kernelgen.version import GENERATOR_VERSION

# Knobs that do not say how the work is divided, by one value for all.
DETAILS: dict[str, Any] = {
    name: getattr(CudaSchedule(), name)
    for name in ("path_groups", "finish", "zeros", "ahead", "prefetch", "stage_edges", "stream", "min_blocks")
}


@dataclass(frozen=True)
class Predicted:
    """A legal schedule and one sentence about where it comes from and what it is expected to cost.

    others: what a first run tries beside it, the likeliest first.
    """

    schedule: Schedule
    reason: str
    others: tuple[Schedule, ...] = ()


def serves(spec: Any) -> bool:
    """Whether the model was fitted to kernels of this kind: channelwise products on a GPU, in any order of sums."""
    return (
        isinstance(spec, Spec)
        and spec.facts.backend == "cuda"
        and spec.problem.is_channelwise
        and bool(spec.problem.paths)
        and not spec.deterministic
        and spec.harmonics is None
    )


def winners_for(spec: Spec, graph_class: GraphClass, winners: Sequence[Winner]) -> list[CudaSchedule]:
    """Winners on graphs that are small or large as this one is, written for this layout."""
    return [
        winner.schedule if winner.layout == spec.layout else winner.schedule.for_layout(spec.layout)
        for winner in winners
        if spec.operation == "plain" or winner.small == is_small(graph_class)
    ]


def predict(spec: Any, graph_class: GraphClass | None, faults: Collection[str] = ()) -> Predicted | None:
    """The legal schedule with the least predicted time; None where no table serves this kernel.

    faults: keys of schedules that failed on this device. The graph counts as the nearest recorded class; None is the
    largest. On a skewed graph only schedules count that take runs of equal length: there they
    take as long as on an even one.
    """
    table = table_for(spec.facts) if serves(spec) else None
    near = nearest_class(graph_class, table.classes.get(spec.operation, ())) if table else None
    if table is None or near is None:
        return None
    skewed = graph_class is not None and graph_class.waits_for_longest(spec.facts)
    order = [schedule for schedule in _order(table, spec, near, skewed) if schedule.key not in faults]
    if not order:
        return None
    first, count = order[0], tries()
    forms = forms_for_skew(spec, first) if skewed else []
    forms = [form for form in forms if form != first and form.key not in faults][: count - 1]
    _, *likely = shortlist(order, _rules(spec, near, skewed), count - len(forms))
    others = tuple(dict.fromkeys((*forms, *likely)))
    return Predicted(first, _reason(spec, near, table, bool(others)), others)


def shortlist(order: Sequence[CudaSchedule], rules: Schedule | None, count: int) -> list[CudaSchedule]:
    """Of schedules in their order the likeliest: at most ``count``, which differ in more than :data:`DETAILS`.

    Where the model errs, it errs about all that divide the work alike. The last is the rules' default, if it is in the
    order: it needs no model, so a first run is never worse than it.
    """
    found: dict[CudaSchedule, CudaSchedule] = {}
    for schedule in order:
        found.setdefault(dataclasses.replace(schedule, **DETAILS), schedule)
    likeliest = list(found.values())
    if isinstance(rules, CudaSchedule) and rules in order and rules not in likeliest[:count] and count > 1:
        return [*likeliest[: count - 1], rules]
    return likeliest[:count]


def _rules(spec: Spec, graph_class: GraphClass, skewed: bool) -> Schedule | None:
    """The rules' default, as its plan has it."""
    rules = default_schedule(spec, edges_for_rules(spec.facts, graph_class))
    plan = plan_of(spec, rules.for_skew() if skewed else rules)
    return plan.spec.schedule if plan is not None else None


@functools.lru_cache(maxsize=256)
def _order(table: PredictionTable, spec: Spec, near: GraphClass, skewed: bool) -> tuple[CudaSchedule, ...]:
    """All schedules that are considered, best first: some tens of milliseconds, once per kernel and recorded class."""
    kernels = (f"{spec.operation} {direction}" for direction in directions_of(spec.direction.name))
    winners = [winner for kernel in kernels for winner in table.winners.get(kernel, ())]
    if not winners:
        return ()
    pool = pool_of(spec, near, winners_for(spec, near, winners))
    if skewed:
        pool = list(dict.fromkeys(schedule.for_skew() for schedule in pool))
    return tuple(ranked(table.trees, spec, near, pool))


def is_predicted(spec: Any) -> bool:
    """Whether a table serves this kernel."""
    return serves(spec) and table_for(spec.facts) is not None


def by_predicted_time(spec: Any, graph_class: GraphClass, schedules: Sequence[Knobs]) -> list[Knobs]:
    """Schedules of a kernel, fastest first by the model; as they are where no table serves the kernel."""
    table = table_for(spec.facts) if serves(spec) else None
    made = [plan_of(spec, schedule) if isinstance(schedule, CudaSchedule) else None for schedule in schedules]
    plans = [plan for plan in made if plan is not None]
    if table is None or len(plans) < len(schedules):
        return list(schedules)
    times = scores(table.trees, spec, graph_class, plans)
    return [schedules[place] for place in sorted(range(len(times)), key=times.__getitem__)]


def expected_group(operation: str, graph_class: GraphClass) -> str:
    """The group of a table's ``expected``: products edge by edge, or convolutions on small or on large graphs."""
    if operation == "plain":
        return operation
    return f"{operation} {'small' if is_small(graph_class) else 'large'}"


def _reason(spec: Spec, graph_class: GraphClass, table: PredictionTable, chooses: bool) -> str:
    name, loss = table.device.get("name"), table.expected[expected_group(spec.operation, graph_class)]
    text = (
        f"predicted for {graph_class.text} by a model of {table.trials:,} trials of {table.problems} problems on "
        f"{name}; expected {loss['mean']:.2f} times the tuned time on the mean, {loss['worst']:.2f} at worst "
        f"(replay of these trials, each problem held out in turn; {loss['measured']:.0%} of its choices were "
        f"measured, others estimated; its choices among measured trials take {loss['tried']:.2f})"
    )
    if chooses:
        text += (
            f"; the first run on a graph of this size tries it and the next likely schedules, and keeps the fastest: "
            f"expected {loss['first_mean']:.2f} and {loss['first_worst']:.2f}"
        )
    if table.device.get("slug") == spec.facts.slug:
        return text
    text += f"; for {spec.facts.name} this is a transfer, an estimate that nobody has measured"
    known = table.transfer.get(spec.facts.arch)
    return f"{text}: by its limits alone {known['untuned']:.2f} times the fastest legal trial" if known else text


# The schedules that the model ranks for a product: the rules' default and other problems' winners, moved to it.

# Directions whose winners may serve another: with few winners of its own, a direction has too little to choose from.
RELATED = {
    "backward": "joint_backward",
    "joint_backward": "backward",
    "edge_backward": "backward",
    "double_backward": "joint_backward",
}


def directions_of(direction: str) -> tuple[str, ...]:
    """The direction and the one whose winners serve it too."""
    return (direction, RELATED[direction]) if direction in RELATED else (direction,)


def is_small(graph_class: GraphClass) -> bool:
    """Whether launches and latencies dominate, by the limit of the device whose trials the model knows."""
    return 2**graph_class.log2_edges <= SMALL_GRAPH_EDGES


def edges_for_rules(facts: DeviceFacts, graph_class: GraphClass) -> int | None:
    """As ``num_edges`` of ``default_schedule``, which only tells small graphs from large ones."""
    return small_graph_edges(facts) if is_small(graph_class) else None


def nearest_class(graph_class: GraphClass | None, classes: Iterable[GraphClass]) -> GraphClass | None:
    """Of the recorded classes the nearest, small or large as the graph is; the largest if no class is given.

    So a model that meets many sizes compiles few kernels. None if no class is near.
    """
    if graph_class is None:
        return max(classes, key=lambda known: (known.log2_edges, known.log2_degree), default=None)
    alike = [
        known
        for known in classes
        if known.operation == graph_class.operation
        and (is_small(known) == is_small(graph_class) or graph_class.operation == "plain")
    ]
    return min(alike, key=lambda known: (graph_class.distance(known), -known.log2_edges, known.text), default=None)


def pool_of(spec: Spec, graph_class: GraphClass, winners: Iterable[CudaSchedule]) -> list[CudaSchedule]:
    """Distinct schedules, not yet checked for legality: the rules' default, ``winners`` in their order, then all of
    these with every other count of path groups up to slightly more than one an input block."""
    rules = default_schedule(spec, edges_for_rules(spec.facts, graph_class))
    base = dataclasses.replace(spec, schedule=rules)
    knobs = product_knobs(base, 2**graph_class.log2_edges)
    moved = [dataclasses.replace(rules, **nearest_values(knobs, rules, winner)) for winner in winners]
    varied = with_other_groups(knobs, spec, (rules, *moved))
    found = dict.fromkeys((rules, *(canonical_product(base, schedule) for schedule in itertools.chain(moved, varied))))
    return [schedule for schedule in found if isinstance(schedule, CudaSchedule)]


def with_other_groups(knobs: Mapping[str, tuple[Any, ...]], spec: Spec, schedules: Iterable[Any]) -> Iterator[Any]:
    """Schedules of a channelwise product with all counts of path groups up to slightly more than one an input block."""
    counts = [count for count in knobs["path_groups"] if count <= len(spec.problem.in1) + FINE_GROUPS]
    return (dataclasses.replace(each, path_groups=count) for each in schedules for count in counts)


def plan_of(spec: Spec, schedule: Schedule) -> Plan | OwnersPlan | None:
    """The plan of a schedule; None if it is illegal."""
    try:
        plan = product_plan(dataclasses.replace(spec, schedule=schedule))
    except ScheduleError:
        return None
    return plan if isinstance(plan, Plan | OwnersPlan) else None


def forms_for_skew(spec: Spec, schedule: Schedule) -> list[CudaSchedule]:
    """A schedule in the legal forms that may be fastest on a skewed graph: itself, in runs of equal length, and in such
    runs that store the rows they have whole, as many as fill whole waves and of a fixed length.

    Which one is, depends on the degrees: on an H200 (``results/NOTES.md``) hubs took 0.9 to 0.95 times as long by the
    latter two, and lognormal degrees least by workers that own nodes.
    """
    even = schedule.for_skew()
    forms = [schedule, even]
    if isinstance(even, CudaSchedule):
        forms += [dataclasses.replace(even, zeros="cut", runs=runs) for runs in ("waves", "fixed")]
    return list(planned(spec, forms))


def planned(spec: Spec, schedules: Iterable[Schedule]) -> dict[CudaSchedule, Plan | OwnersPlan]:
    """The plans of legal schedules, by the schedule as its plan has it (without knobs that have no effect on it)."""
    found: dict[CudaSchedule, Plan | OwnersPlan] = {}
    for plan in (plan_of(spec, schedule) for schedule in schedules):
        if plan is not None and isinstance(plan.spec.schedule, CudaSchedule):
            found.setdefault(plan.spec.schedule, plan)
    return found


def scores(trees: Trees, spec: Spec, graph_class: GraphClass, plans: Iterable[Plan | OwnersPlan]) -> list[float]:
    """Logarithms of predicted slowdowns, with the risk (``Trees.cautious``)."""
    features = Features(spec, graph_class)
    rows = [features.of(plan) for plan in plans]
    return trees.cautious(rows).tolist() if rows else []


def ranked(trees: Trees, spec: Spec, graph_class: GraphClass, schedules: Iterable[Schedule]) -> list[CudaSchedule]:
    """Legal schedules, as their plans have them, least slowdown first; equal ones keep their order."""
    plans = planned(spec, schedules)
    order = sorted(zip(scores(trees, spec, graph_class, plans.values()), plans, strict=True), key=lambda pair: pair[0])
    return [schedule for _, schedule in order]


# What first runs chose, kept in the cache, so that a later process takes the fastest schedule at once.
#
# In: choices of :mod:`kernelgen.ops.first_run`. Out: times of a shortlist, by a digest of it, the kernel, the size of
# the graph and the device. ``first-runs/DEVICE.json`` in the cache holds the newest. Nothing here fails or slows a
# model: if the file cannot be read or written, or another process writes at that moment, the next process chooses
# again.

FORMAT = 1
# Schedules that a first run tries, its own included, unless $EQUITUNE_TRY says how many. By the replay of the H200's
# trials, six bring the mean from 1.07 to 1.04 times the tuned time and the worst from 1.60 to 1.24; two more, nothing.
TRIED = 6
MOST_KEPT = 1000

# Problem, operation, direction, dtype and layout.
Kernel = tuple[str, str, str, str, str]


def tries() -> int:
    """How many schedules a first run tries: ``$EQUITUNE_TRY``, at least 1, or :data:`TRIED`."""
    given = os.environ.get("EQUITUNE_TRY", "").strip()
    return max(1, int(given)) if given.isdecimal() else TRIED


def first_runs_path(slug: str) -> Path:
    """The file of a device's choices."""
    return database_path(cache_dir() / "first-runs", slug)


def chosen_before(
    kernel: Kernel, graph_class: GraphClass, facts: DeviceFacts, schedules: Sequence[Knobs]
) -> tuple[int, tuple[float, ...]] | None:
    """The place of the schedule that a first run on this device chose, and all times in us; None if none is known."""
    size, known = (graph_class.log2_edges, graph_class.log2_degree), _choices_in(first_runs_path(facts.slug))
    found = known.get(_digest(kernel, size, facts, schedules)) if known else None
    times = found.get("times_us") if isinstance(found, dict) else None
    if not isinstance(times, list) or len(times) != len(schedules):
        return None
    if not all(time is None or (isinstance(time, float) and time > 0) for time in times) or not any(times):
        return None
    times_us = tuple(time or math.inf for time in times)
    return best_of(times_us), times_us


def keep_choice(choice: Choice) -> None:
    """Add a choice to its device's file; a listener of first runs."""
    operator = choice.operator
    with contextlib.suppress(OSError, filelock.Timeout, EquituneError):
        facts = device_facts(operator.device)
        kernel = (operator.problem.key, operator.operation, choice.direction.name, DTYPES[operator.dtype])
        size = size_class(choice.num_edges, choice.num_out if operator.is_conv else choice.num_edges)
        key = _digest((*kernel, operator.layout), size, facts, choice.schedules)
        times = [round(time_us, 3) if math.isfinite(time_us) else None for time_us in choice.times_us]
        path = first_runs_path(facts.slug)
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=1.0):
            kept = {name: found for name, found in _read_choices(path).items() if name != key}
            kept[key] = {"kernel": " ".join(kernel[1:]), "edges": choice.num_edges, "times_us": times}
            newest = dict(list(kept.items())[-MOST_KEPT:])
            replace_file(path, json.dumps({"format": FORMAT, "choices": newest}, indent=1) + "\n")


def _digest(kernel: Kernel, size: Sequence[int], facts: DeviceFacts, schedules: Sequence[Knobs]) -> str:
    said = (GENERATOR_VERSION, facts.slug, *kernel, *size, *(schedule.key for schedule in schedules))
    return hashlib.sha256("\n".join(map(str, said)).encode()).hexdigest()[:24]


def _read_choices(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(path.read_bytes())
        choices = data["choices"] if data.get("format") == FORMAT else {}
        return choices if isinstance(choices, dict) else {}
    except (OSError, ValueError, KeyError, AttributeError, EquituneError):
        return {}


_choices_in: FileCache[dict[str, Any]] = FileCache(_read_choices, {}, lambda path, error: {})

LISTENERS.append(keep_choice)
