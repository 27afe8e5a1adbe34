"""The schedule that the model predicts to be fastest for a kernel without an entry, and what it is expected to cost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.database.prediction.pool import is_small, legal, nearest_class, pool_of, ranked
from autotune.database.prediction.table import PredictionTable, Winner, table_for
from autotune.workload.graph_class import GraphClass
from kernelgen.schedule.kernel_spec import Spec
from kernelgen.schedule.knobs import Knobs
from kernelgen.schedule.tensor_product import CudaSchedule, Schedule


@dataclass(frozen=True)
class Predicted:
    """A legal schedule and one sentence about where it comes from and what it is expected to cost."""

    schedule: Schedule
    reason: str


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
    largest.
    """
    table = table_for(spec.facts) if serves(spec) else None
    near = nearest_class(graph_class, table.classes.get(spec.operation, ())) if table else None
    winners = table.winners.get(f"{spec.operation} {spec.direction.name}", ()) if table else ()
    if table is None or near is None or not winners:
        return None
    pool = pool_of(spec, near, winners_for(spec, near, winners))
    for _, candidate in ranked(table.trees, spec, near, pool):
        schedule = legal(spec, candidate)
        if schedule is not None and schedule.key not in faults:
            return Predicted(schedule, _reason(spec, near, table))
    return None


def by_predicted_time(spec: Any, graph_class: GraphClass, schedules: Sequence[Knobs]) -> list[Knobs]:
    """Schedules of a kernel, fastest first by the model; as they are where no table serves the kernel."""
    table = table_for(spec.facts) if serves(spec) else None
    known = [schedule for schedule in schedules if isinstance(schedule, CudaSchedule)]
    if table is None or len(known) < len(schedules):
        return list(schedules)
    return [schedule for _, schedule in ranked(table.trees, spec, graph_class, known)]


def expected_group(operation: str, graph_class: GraphClass) -> str:
    """The group of a table's ``expected``: products edge by edge, or convolutions on small or on large graphs."""
    if operation == "plain":
        return operation
    return f"{operation} {'small' if is_small(graph_class) else 'large'}"


def _reason(spec: Spec, graph_class: GraphClass, table: PredictionTable) -> str:
    name, loss = table.device.get("name"), table.expected[expected_group(spec.operation, graph_class)]
    text = (
        f"predicted for {graph_class.text} by a model of {table.trials:,} trials of {table.problems} problems on "
        f"{name}; expected {loss['mean']:.2f} times the tuned time on the mean, {loss['worst']:.2f} at worst "
        f"(replay of these trials, each problem held out in turn; {loss['measured']:.0%} of its choices were "
        f"measured, others estimated)"
    )
    if table.device.get("slug") == spec.facts.slug:
        return text
    return f"{text}; for {spec.facts.name} this is a transfer, an estimate that nobody has measured"
