"""Which knobs mattered in a study: Optuna's importances, recomputed from the trial records."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd

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
    found = _ped_anova(timed, knobs) if len(knobs) > 1 else dict.fromkeys(knobs, 1.0)
    rows = [{"importance": found[knob], "explained": explained_variance(timed, knob)} for knob in knobs]
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
