"""Leave-one-problem-out: what schedules that are chosen without a problem's trials cost on that problem.

A chosen schedule's cost is known if it was compared with the tuned schedule (``comparisons``), or if the held-out study
happens to have tried it. Otherwise it is an estimate, of a model that was fitted to all trials, the held-out ones among
them; its error on trials that it has not seen is reported.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.database.entry import Entry
from autotune.database.model_of_time import Features, Trees, knobs_of
from autotune.database.predicted import TRIED, expected_group, shortlist
from autotune.replay.defaults.choices import CHOICES, CHOSEN, FIRST_RUN, Held, hold_out
from autotune.replay.defaults.fit import Settings, fit_studies
from autotune.replay.defaults.studies import Trials, name_of
from kernelgen.kernels.product.schedule import CudaSchedule

ESTIMATE = Settings(trees=400, depth=7, rate=0.1, ridge=1.0, share=0.5)
FOLDS = 5
# A choice is good if it takes at most this many times the tuned time, by the worst.
GOOD = 1.35
STARTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Cost:
    """``ratio``: time over the tuned time. measured: of a trial or a comparison, not an estimate.

    compared: measured in turn with the tuned schedule, in one process.
    """

    ratio: float
    measured: bool
    compared: bool = False


class Estimator:
    """Times of schedules of recorded studies, measured where they can be: by a comparison, or else by a trial."""

    def __init__(self, studies: Sequence[Trials]) -> None:
        self._trees = fit_studies(studies, ESTIMATE, seeds=1)
        self.error = _error(studies)

    def cost(self, study: Trials, schedule: CudaSchedule) -> Cost:
        """The cost of a schedule of a study."""
        time_us = study.times_us.get(schedule)
        if time_us is not None:
            return Cost(time_us / study.tuned_us, True, schedule in study.compared)
        row = Features(study.spec, study.graph_class).of(study.plan(schedule))
        return Cost(max(1.0, math.exp(float(self._trees.predict([row])[0]))), False)


def _error(studies: Sequence[Trials]) -> float:
    """Root mean square of the logarithms' errors on a fifth of every study, left out in turn; of what takes < 1.5."""
    errors: list[float] = []
    for fold in range(FOLDS):
        kept = [_part(study, fold, keep=True) for study in studies]
        trees = fit_studies([study for study in kept if study.times_us], ESTIMATE, seeds=1)
        for study in studies:
            out = _part(study, fold, keep=False)
            if out.times_us:
                slow = out.slowdowns()
                near = slow < math.log(1.5)
                errors += (trees.predict(out.rows) - slow)[near].tolist()
    return float(np.sqrt(np.mean(np.square(errors))))


def _part(study: Trials, fold: int, keep: bool) -> Trials:
    places = [place for place in range(len(study.times_us)) if (place % FOLDS != fold) == keep]
    times = list(study.times_us.items())
    return dataclasses.replace(study, times_us=dict(times[place] for place in places), rows=study.rows[places])


def hold_out_each(
    studies: Sequence[Trials], entries: Sequence[Entry], note: Callable[[str], None] = lambda text: None
) -> list[Held]:
    """Every study, seen by a model that was fitted without the problem and its likes (``shape_of``)."""
    held = []
    for shape in dict.fromkeys(study.shape for study in studies):
        left = [study for study in studies if study.shape == shape]
        note(f"without {left[0].entry.label}")
        trees: Trees = fit_studies([study for study in studies if study.shape != shape])
        held += [hold_out(study, entries, trees) for study in left]
    return held


def costs_of(held: Iterable[Held], estimator: Estimator) -> list[dict[str, Cost]]:
    """The cost of every choice, by study; a choice that is none is left out."""
    return [
        {
            name: estimator.cost(one.study, schedule)
            for name, choose in CHOICES.items()
            if (schedule := choose(one)) is not None
        }
        | {
            FIRST_RUN: _least(estimator, one, shortlist(one.order, one.pool[0], TRIED)),
            "best of the pool": _least(estimator, one, one.pool),
        }
        for one in held
    ]


def _least(estimator: Estimator, one: Held, schedules: Iterable[CudaSchedule]) -> Cost:
    return min((estimator.cost(one.study, schedule) for schedule in schedules), key=lambda cost: cost.ratio)


def summary(costs: Sequence[Cost]) -> dict[str, float | int]:
    """Mean and worst ratio, and the same of measured ones alone."""
    ratios = [cost.ratio for cost in costs]
    known = [cost.ratio for cost in costs if cost.measured]
    found: dict[str, float | int] = {
        "studies": len(ratios),
        "mean": round(statistics.fmean(ratios), 4),
        "worst": round(max(ratios), 4),
        "beyond": sum(ratio > GOOD for ratio in ratios),
        "measured": round(len(known) / len(ratios), 4),
    }
    if known:
        found |= {"measured_mean": round(statistics.fmean(known), 4), "measured_worst": round(max(known), 4)}
    return found


GROUPS: Mapping[str, Callable[[Trials], str]] = {
    "by direction": lambda study: f"{study.entry.operation} {study.entry.direction}",
    "by graph class": lambda study: study.entry.graph_class,
    "by problem": lambda study: study.entry.label,
    "by size": lambda study: expected_group(study.entry.operation, study.graph_class),
}


def table_of(held: Sequence[Held], costs: Sequence[Mapping[str, Cost]]) -> dict[str, dict[str, Any]]:
    """By choice: its summary over all studies, and over the studies of each group."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for cost in costs for name in cost):
        of = [(one.study, cost[name]) for one, cost in zip(held, costs, strict=True) if name in cost]
        found[name] = dict(summary([cost for _, cost in of]))
        for group, key in GROUPS.items():
            kinds = sorted({key(study) for study, _ in of})
            found[name][group] = {kind: summary([cost for study, cost in of if key(study) == kind]) for kind in kinds}
    return found


def rows_of(held: Sequence[Held], costs: Sequence[Mapping[str, Cost]]) -> list[list[Any]]:
    """By study: its name (``name_of``), cost by rules, by the model, if measured, the model's choice (``knobs_of``),
    cost of what a first run keeps."""
    rows = []
    for one, cost in zip(held, costs, strict=True):
        found, choice = cost[CHOSEN], CHOICES[CHOSEN](one)
        assert choice is not None
        by_rules = round(cost["rules"].ratio, 4)
        kept = round(cost[FIRST_RUN].ratio, 4)
        rows.append(
            [*name_of(one.study.entry), by_rules, round(found.ratio, 4), found.measured, knobs_of(choice), kept]
        )
    return rows


def starts_of(
    held: Sequence[Held], orders: Mapping[str, Sequence[Sequence[CudaSchedule]]], estimator: Estimator
) -> dict[str, dict[str, float]]:
    """Of orders in which a search could try the pool: mean cost of the best of the first 1, 2, 4 and 8 schedules."""
    return {
        name: {
            str(count): round(
                statistics.fmean(
                    min(estimator.cost(one.study, schedule).ratio for schedule in order[:count])
                    for one, order in zip(held, lists, strict=True)
                ),
                4,
            )
            for count in STARTS
        }
        for name, lists in orders.items()
    }
