"""The schedules that the model ranks for a product: the rules' default and other problems' winners, moved to it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autotune.database.candidates.knob_choices import FINE_GROUPS, product_knobs
from autotune.database.candidates.moving import canonical_product, nearest_values
from autotune.database.prediction.features import Features
from autotune.database.prediction.trees import Trees
from autotune.workload.graph_class import GraphClass
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.product.channelwise import Plan
from kernelgen.kernels.product.defaults import SMALL_GRAPH_EDGES, default_schedule, small_graph_edges
from kernelgen.kernels.product.plan import OwnersPlan, product_plan
from kernelgen.kernels.product.schedule import CudaSchedule, Schedule
from kernelgen.kernels.spec import Spec

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


def with_other_groups(knobs: Mapping[str, tuple], spec: Spec, schedules: Iterable[Any]) -> Iterator[Any]:
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
