"""What several sections of a page ask of rows and trials: knobs, and which of them mattered."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from autotune.bench.model_rows import ModelRow
from autotune.bench.rows import SuiteRow, mapping
from autotune.text import DEFAULT, MISSING, TUNED
from autotune.workload.known_kinds import KINDS

# Names of groups, with short ones; a mean is over the rows of one group.
GROUPS = {name: short for kind in KINDS for name, short in kind.groups.items()}


def met(rows: Iterable[SuiteRow | ModelRow], key: str) -> list[str]:
    """All values of a field of rows, such as the generator, in order."""
    return sorted({row.text(key) for row in rows} - {""})


def entry_row(entry: dict[str, Any]) -> SuiteRow:
    """A published entry as a row of its direction."""
    times = {TUNED: entry, DEFAULT: entry.get("default"), **mapping(entry.get("peers"))}
    times = {name: timing for name, timing in times.items() if isinstance(timing, dict)}
    direction, objective = str(entry.get("direction")), entry.get("objective")
    known = {"pass": direction, "times": times, "errors": {TUNED: {direction: entry.get("errors")}}}
    known |= {"objectives": {direction: objective}} if objective else {}
    for name, key in (("joules", "joules"), ("memory", "memory_bytes")):
        figures = {name: timing[key] for name, timing in times.items() if key in timing}
        known |= {name: figures} if figures else {}
    return SuiteRow(entry | known)


def contenders(rows: Iterable[SuiteRow]) -> list[str]:
    """Tuned, default, then the peers, by name."""
    names = {name for row in rows for name in row.times}
    return [name for name in (TUNED, DEFAULT) if name in names] + sorted(names - {TUNED, DEFAULT})


# Knobs and resources, as tables show them.


@dataclass(frozen=True)
class Knob:
    """A knob's value as text; default: the default's value where it is known and another one."""

    text: str
    default: str | None


def plain_names(records: Iterable[Any]) -> list[str]:
    """Names of all plain values, in order of first appearance."""
    names: dict[str, None] = {}
    for record in records:
        names |= {name: None for name, value in mapping(record).items() if not isinstance(value, dict | list)}
    return list(names)


def knob_names(schedules: Iterable[Any]) -> list[str]:
    return [name for name in plain_names(schedules) if name != "backend"]


def value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return MISSING if math.isnan(value) else f"{value:,g}"
    return MISSING if value is None else str(value)


def knobs(names: Iterable[str], chosen: dict[str, Any], default: dict[str, Any]) -> tuple[Knob, ...]:
    """One schedule's knobs; default: empty if it is not known."""
    changed = {name for name in names if default and chosen.get(name) != default.get(name)}
    return tuple(
        Knob(value_text(chosen.get(name)), value_text(default.get(name)) if name in changed else None)
        for name in names
    )  # fmt: skip


# Which knobs mattered in a study: Optuna's importances, recomputed from the trial records.

MIN_TRIALS = 12
# PED-ANOVA tells which knobs separate the fastest trials from all trials. The fastest tenth (its default) of a hundred
# trials is only ten points, so a quarter is used.
TARGET_QUANTILE = 0.25


def measured(trials: pd.DataFrame) -> pd.DataFrame:
    """Trials that were timed."""
    return trials[(trials["state"] == "ok") & trials["time_us"].notna()]


def searched_knobs(trials: pd.DataFrame) -> dict[str, list[Any]]:
    """Knobs that all timed trials have, with more than one value; the values in order."""
    schedules = list(measured(trials)["schedule"])
    knobs = {}
    for name in schedules[0] if schedules else ():
        if all(name in schedule for schedule in schedules):
            values = {repr(schedule[name]): schedule[name] for schedule in schedules}
            if len(values) > 1:
                numeric = all(isinstance(value, int | float) for value in values.values())
                knobs[name] = sorted(values.values(), key=None if numeric else str)
    return knobs


def knob_importances(trials: pd.DataFrame) -> pd.DataFrame:
    """Two measures per searched knob, most important knob first; no rows if there are too few trials.

    ``importance`` is Optuna's PED-ANOVA, which sums to 1: what separates the fastest trials from all trials. A knob
    that the sampler fixed early is nearly constant, and so has low importance. ``explained`` is the share of the
    variance of log time between the knob's values (adjusted for their number), which also detects such a knob.
    """
    timed, knobs = measured(trials), searched_knobs(trials)
    if len(timed) < MIN_TRIALS:
        knobs = {}
    importance = _ped_anova(timed, knobs) if len(knobs) > 1 else dict.fromkeys(knobs, 1.0)
    rows = [{"importance": importance[knob], "explained": explained_variance(timed, knob)} for knob in knobs]
    frame = pd.DataFrame(rows, index=list(knobs), columns=["importance", "explained"])
    return frame.loc[frame.max(axis=1).sort_values(ascending=False, kind="stable").index]


def explained_variance(timed: pd.DataFrame, knob: str) -> float:
    """Adjusted share (0 to 1) of the variance of log time between the values of one knob."""
    times = pd.Series(np.log(timed["time_us"].to_numpy(dtype=float)))
    groups = times.groupby([repr(schedule[knob]) for schedule in timed["schedule"]])
    total, within = ((times - times.mean()) ** 2).sum(), ((times - groups.transform("mean")) ** 2).sum()
    freedom = len(times) - groups.ngroups
    if total == 0 or freedom <= 0:
        return 0.0
    return max(0.0, float(1 - (within / freedom) / (total / (len(times) - 1))))


def _ped_anova(timed: pd.DataFrame, knobs: dict[str, list[Any]]) -> dict[str, float]:
    import optuna

    distributions: dict[str, Any] = {
        name: optuna.distributions.CategoricalDistribution(tuple(values)) for name, values in knobs.items()
    }
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study()
            for schedule, time_us in zip(timed["schedule"], timed["time_us"], strict=True):
                params = {name: schedule[name] for name in knobs}
                study.add_trial(optuna.create_trial(params=params, distributions=distributions, value=time_us))
            evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=TARGET_QUANTILE)
            return optuna.importance.get_param_importances(study, evaluator=evaluator)
    finally:
        optuna.logging.set_verbosity(verbosity)
