"""Ways to choose a schedule for a problem whose trials and entries are held out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.database.entry import Entry
from autotune.database.model_of_time import Trees, Winner
from autotune.database.predicted import directions_of, is_small, planned, pool_of, ranked, winners_for
from autotune.replay.defaults.studies import Trials
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.problem.product import TensorProductProblem
from kernelgen.problem.sizes import shape_of


@dataclass(frozen=True, eq=False)
class Held:
    """A study whose problem is held out, with what may be known of it.

    pool: legal schedules: the rules' default, then other problems' winners, the nearest problem's first, then all of
    these with other counts of path groups. order: the pool by the model that was fitted without this problem. tried:
    the study's own trials by it.
    """

    study: Trials
    pool: Sequence[CudaSchedule]
    order: Sequence[CudaSchedule]
    tried: Sequence[CudaSchedule]


def winner_of(entry: Entry) -> Winner | None:
    """An entry's schedule as the table of the runtime has it."""
    schedule = entry.tuned_schedule
    if not isinstance(schedule, CudaSchedule) or not schedule.fuse:
        return None
    return Winner(schedule, entry.layout, is_small(entry.parsed_graph_class))


def hold_out(study: Trials, others: Sequence[Entry], trees: Trees) -> Held:
    """others: entries of the model's kinds; those of the study's shape are left out here."""
    entry = study.entry
    known = [
        other
        for other in others
        if other.operation == entry.operation
        and other.direction in directions_of(entry.direction)
        and shape_of(other.problem) != study.shape
        and winner_of(other) is not None
    ]
    known.sort(key=lambda other: _distance(study, other))
    pool = _legal_pool(study, [winner for other in known if (winner := winner_of(other)) is not None])
    order = ranked(trees, study.spec, study.graph_class, pool)
    tried = ranked(trees, study.spec, study.graph_class, study.times_us)
    return Held(study, pool, order, tried)


def _legal_pool(study: Trials, winners: Sequence[Winner]) -> list[CudaSchedule]:
    schedules = winners_for(study.spec, study.graph_class, winners)
    return list(planned(study.spec, pool_of(study.spec, study.graph_class, schedules)))


def _distance(study: Trials, other: Entry) -> tuple[bool, bool, float, bool, float]:
    """Another direction, then dtype, then the graph, then the layout, then the problem's sizes in factors of two."""
    graph = study.graph_class.distance(other.parsed_graph_class)
    here, there = _sizes(study.entry.problem), _sizes(other.problem)
    problem = sum(abs(a - b) for a, b in zip(here, there, strict=True))
    other_way = other.direction != study.entry.direction
    return other_way, other.dtype != study.entry.dtype, graph, other.layout != study.entry.layout, problem


@functools.cache
def _sizes(key: str) -> tuple[float, ...]:
    problem = TensorProductProblem.from_key(key)
    muls = [path.mul for path in problem.paths]
    sizes = (len(muls), min(muls), max(muls), problem.dim_in1, problem.dim_in2, problem.dim_out, problem.weight_numel)
    return tuple(math.log2(max(1, size)) for size in sizes)


def first_measured(order: Sequence[CudaSchedule], study: Trials) -> CudaSchedule | None:
    """The first of an order that is among the study's trials."""
    return next((schedule for schedule in order if schedule in study.times_us), None)


# Every way to choose; None if it has no choice. ``measured``: among schedules that the held-out study has tried.
CHOICES: Mapping[str, Callable[[Held], CudaSchedule | None]] = {
    "rules": lambda held: held.pool[0],
    "nearest": lambda held: held.pool[min(1, len(held.pool) - 1)],
    "model": lambda held: held.order[0],
    "model, measured": lambda held: first_measured(held.order, held.study),
    "model, any trial": lambda held: held.tried[0],
}

# The runtime's way to choose, by the name that records give it; and the same model's among a study's trials.
CHOSEN, TRIED = "model", "model, any trial"
# The fastest of the shortlist that a first run tries (``prediction.predicted.shortlist``).
FIRST_RUN = "first run"
