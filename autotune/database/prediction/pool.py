"""The schedules that the model ranks for a product: the rules' default and other problems' winners, moved to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from autotune.database.candidates.knob_choices import product_knobs
from autotune.database.candidates.moving import canonical_product, nearest_values
from autotune.database.prediction.features import Features
from autotune.database.prediction.trees import Trees
from autotune.workload.graph_class import GraphClass
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.plan.defaults import SMALL_GRAPH_EDGES, default_schedule, small_graph_edges
from kernelgen.plan.tensor_product import product_plan
from kernelgen.schedule.kernel_spec import Spec
from kernelgen.schedule.tensor_product import CudaSchedule, Schedule


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
    """Distinct schedules in the order of ``winners``, the rules' default first; not yet checked for legality."""
    rules = default_schedule(spec, edges_for_rules(spec.facts, graph_class))
    base = dataclasses.replace(spec, schedule=rules)
    knobs = product_knobs(base, 2**graph_class.log2_edges)
    moved = (dataclasses.replace(rules, **nearest_values(knobs, rules, winner)) for winner in winners)
    found = dict.fromkeys((rules, *(canonical_product(base, schedule) for schedule in moved)))
    return [schedule for schedule in found if isinstance(schedule, CudaSchedule)]


def ranked(
    trees: Trees, spec: Spec, graph_class: GraphClass, schedules: Sequence[CudaSchedule]
) -> list[tuple[float, CudaSchedule]]:
    """Schedules with the logarithm of their predicted slowdown, fastest first; equal ones keep their order."""
    if not schedules:
        return []
    features = Features(spec, graph_class)
    predicted = trees.predict([features.of(schedule) for schedule in schedules])
    return sorted(zip(predicted.tolist(), schedules, strict=True), key=lambda pair: pair[0])


def legal(spec: Spec, schedule: Schedule) -> Schedule | None:
    """The schedule as its plan has it (without knobs that have no effect on this kernel); None if it is illegal."""
    try:
        made = product_plan(dataclasses.replace(spec, schedule=schedule)).spec.schedule
    except ScheduleError:
        return None
    assert isinstance(made, Schedule)
    return made
