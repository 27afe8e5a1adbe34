"""Which knobs mattered: the trials of one study enter, Optuna's importances leave, recomputed from the records."""

from __future__ import annotations

import warnings
from typing import Any

import pandas as pd

MIN_TRIALS = 12
# PED-ANOVA asks which knobs separate the fastest trials from all of them; with a tenth (its default) of a study of
# a hundred trials the answer rests on ten points, so a quarter is taken.
TARGET_QUANTILE = 0.25


def measured(trials: pd.DataFrame) -> pd.DataFrame:
    """Trials that were timed."""
    return trials[(trials["state"] == "ok") & trials["time_us"].notna()]


def searched_knobs(trials: pd.DataFrame) -> dict[str, list[Any]]:
    """Knobs that the timed trials all have and that took more than one value, with those values in order."""
    schedules = list(measured(trials)["schedule"])
    knobs = {}
    for name in schedules[0] if schedules else ():
        if all(name in schedule for schedule in schedules):
            values = {repr(schedule[name]): schedule[name] for schedule in schedules}
            if len(values) > 1:
                numeric = all(isinstance(value, int | float) for value in values.values())
                knobs[name] = sorted(values.values(), key=None if numeric else str)
    return knobs


def knob_importances(trials: pd.DataFrame) -> dict[str, float]:
    """Importance of each searched knob, largest first, summing to 1; empty where the trials are too few to say."""
    timed, knobs = measured(trials), searched_knobs(trials)
    if len(timed) < MIN_TRIALS or not knobs:
        return {}
    if len(knobs) == 1:
        return dict.fromkeys(knobs, 1.0)
    import optuna

    distributions = {
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
            found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    finally:
        optuna.logging.set_verbosity(verbosity)
    return dict(sorted(found.items(), key=lambda item: -item[1]))
