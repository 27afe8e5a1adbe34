"""Optuna at arm's length: names of samplers and a storage enter, Optuna's objects with the right options leave."""

from __future__ import annotations

import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.config import SAMPLERS
from autotune.errors import ConfigError, StudyError, unknown_name
from autotune.space import Space

if TYPE_CHECKING:
    import optuna

# Spaces with at most this many legal schedules are searched whole where trials and time allow.
BRUTE_LIMIT = 200
# Proposals under way at most, for samplers that learn. Each is made without knowing how the others end: rehearsed
# against models of two studies on an H200 (6 seeds), TPE with 16 under way stood 3% further from the best after 110
# trials than with 8, and 4 gained another 1%. Eight keep the device busy: a kernel compiles in 0.3 to 1.7 s there and
# is measured in 0.1 to 0.2 s. Half of what a climb proposes is made from what ended, and kernels of many paths compile
# in several seconds, so it may run further ahead.
MOST_AHEAD = {"tpe": 8, "gp": 8, "climb": 12}


def choose_sampler(space: Space, trials: int | None, seconds: float | None, trial_s: float = 3.0) -> str:
    """``brute`` where the whole space fits the limits, else ``climb``."""
    limits = (trials, None if seconds is None else int(seconds / trial_s))
    affordable = min([BRUTE_LIMIT, *(limit for limit in limits if limit is not None)])
    return "brute" if space.count_legal(affordable + 1) <= affordable else "climb"


def proposals_ahead(sampler: str, compilers: int) -> int:
    """Schedules to compile at a time: as many as there are compilers, but a sampler that learns is not left behind."""
    return min(compilers, MOST_AHEAD.get(sampler, compilers))


def make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Optuna's sampler of that name.

    ``climb`` is TPE for every second proposal (the others are neighbours of the fastest schedules, told to it as well);
    ``brute`` walks the space itself and asks Optuna for nothing.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if name in ("tpe", "climb"):
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    if name == "gp":
        return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    if name in ("random", "brute"):
        return optuna.samplers.RandomSampler(seed=seed)
    raise ConfigError(unknown_name("sampler", name, SAMPLERS))


def open_optuna(
    storage: str | optuna.storages.BaseStorage | None, name: str, sampler: optuna.samplers.BaseSampler | None = None
) -> optuna.Study:
    """Create or load; None is memory. A SQLite file that a kill left half-made is kept aside and made anew."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def create() -> optuna.Study:
        return optuna.create_study(storage=storage, sampler=sampler, study_name=name, load_if_exists=True)

    file = (
        Path(storage.removeprefix("sqlite:///")) if isinstance(storage, str) and storage[:10] == "sqlite:///" else None
    )
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    try:
        return create()
    except Exception as error:
        if file is None or not file.exists():
            raise StudyError(f"Optuna storage {storage} cannot be used: {error}") from error
        aside = file.with_name(f"{file.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
        file.rename(aside)
        warnings.warn(f"Optuna storage {file} cannot be used ({error}); it is kept as {aside.name}", stacklevel=2)
        return create()
