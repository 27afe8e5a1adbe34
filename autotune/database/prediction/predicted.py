"""The schedule that the model predicts to be fastest for a kernel without an entry, and what it is expected to cost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.database.prediction.first_runs import tries
from autotune.database.prediction.pool import (
    directions_of,
    edges_for_rules,
    forms_for_skew,
    is_small,
    nearest_class,
    plan_of,
    pool_of,
    ranked,
    scores,
)
from autotune.database.prediction.table import PredictionTable, Winner, table_for
from autotune.workload.graph_class import GraphClass
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.defaults import default_schedule
from kernelgen.kernels.product.schedule import CudaSchedule, Schedule
from kernelgen.kernels.spec import Spec

_PLAIN = CudaSchedule()
# Knobs that do not say how the work is divided.
DETAILS: dict[str, Any] = {
    name: getattr(_PLAIN, name)
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
