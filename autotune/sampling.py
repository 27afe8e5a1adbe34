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


def choose_sampler(space: Space, trials: int | None, seconds: float | None, trial_s: float = 3.0) -> str:
    """``brute`` where the whole space fits the limits, else ``tpe``."""
    limits = (trials, None if seconds is None else int(seconds / trial_s))
    affordable = min([BRUTE_LIMIT, *(limit for limit in limits if limit is not None)])
    return "brute" if space.count_legal(affordable + 1) <= affordable else "tpe"


def make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Optuna's sampler of that name; ``brute`` walks the space itself and asks Optuna for nothing."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    if name == "gp":
        return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    if name in ("random", "brute"):
        return optuna.samplers.RandomSampler(seed=seed)
    raise ConfigError(unknown_name("sampler", name, SAMPLERS))


def open_optuna(
    storage: str | optuna.storages.BaseStorage, name: str, sampler: optuna.samplers.BaseSampler
) -> optuna.Study:
    """Create or load. A SQLite file that a kill left half-made is kept aside: the records fill a new one."""
    import optuna

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
