"""Optuna at arm's length: names of samplers and a storage enter, Optuna's objects with the right options leave.

Trial records enter too, and leave as Optuna's trials.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from autotune.errors import ConfigError, StudyError, unknown_name
from autotune.search.space import Space
from autotune.workload.config import SAMPLERS, SEEDS
from kernelgen.schedule.knobs import Knobs

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
# Name of the constraint that failed trials violate. Told as FAIL they would be ignored, and suggested again.
RUNS = "runs"
# Of a trial in a storage: the key of its schedule, and what stands of it in the trial file.
KEY, RECORD = "schedule", "record"


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
    seed %= SEEDS  # of a study that goes on, it is the user's and the number of records
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

    file = sqlite_file(storage)
    with making(file) if file else nullcontext():
        try:
            return create()
        except Exception as error:
            if file is None or not file.exists() or not _is_corrupt(error):
                raise StudyError(f"Optuna storage {storage} cannot be used: {_reason(error)}") from error
            aside = file.with_name(f"{file.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
            file.rename(aside)
            warnings.warn(f"Optuna storage {file} cannot be used ({error}); it is kept as {aside.name}", stacklevel=2)
            return create()


# What SQLite says where the file is as it should be, and the disk, its rights or another process are in the way.
_NO_FAULT_OF_THE_FILE = frozenset({"PERM", "BUSY", "LOCKED", "READONLY", "IOERR", "FULL", "CANTOPEN"})


def _is_corrupt(error: BaseException) -> bool:
    # SQLITE_IOERR_WRITE and the like belong to SQLITE_IOERR.
    name = str(getattr(getattr(_root(error), "orig", None), "sqlite_errorname", ""))
    return not any(f"{name}_".startswith(f"SQLITE_{kind}_") for kind in _NO_FAULT_OF_THE_FILE)


def _root(error: BaseException) -> BaseException:
    """What SQLAlchemy raised: Optuna wraps some of it."""
    return error if hasattr(error, "orig") else error.__cause__ or error


def _reason(error: BaseException) -> str:
    return str(getattr(_root(error), "orig", None) or error)


def add_missing(
    storage: str | optuna.storages.BaseStorage, name: str, trials: Sequence[optuna.trial.FrozenTrial]
) -> None:
    """Copy the finished trials that a study does not have yet, by their schedules."""
    file = sqlite_file(storage)
    # SQLite takes one writer at a time, and studies of other tuners may be in the same file.
    with making(file) if file else nullcontext():
        study = open_optuna(storage, name)
        told = {trial.user_attrs.get(KEY) for trial in study.get_trials(deepcopy=False)}
        try:
            study.add_trials(trial for trial in trials if trial.user_attrs[KEY] not in told)
        except Exception as error:
            raise StudyError(f"Optuna storage {storage} cannot be written: {_reason(error)}") from error


def sqlite_file(storage: Any) -> Path | None:
    """The file of a storage's URL if it is SQLite's."""
    if isinstance(storage, str) and storage.startswith("sqlite:///"):
        return Path(storage.removeprefix("sqlite:///"))
    return None


def making(file: Path) -> filelock.BaseFileLock:
    """Held by whoever makes the tables of a SQLite file (of two at once one fails) or copies many trials into it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(file.with_name(f".{file.name}.lock"), is_singleton=True)


def optuna_name(space: Space, name: str, generator: str) -> str:
    """Of a study in a storage, which may hold those of several devices.

    Choices cannot change within an Optuna study, and times of another generator mean nothing to this one.
    """
    shape = json.dumps({knob: list(choices) for knob, choices in space.knobs.items()})
    digest = hashlib.sha256(shape.encode()).hexdigest()[:8]
    return f"{space.spec.facts.slug}/{name}@{generator}#{digest}"


def known_trial(space: Space, schedule: Knobs, line: dict[str, Any]) -> optuna.trial.FrozenTrial | None:
    """A record as a finished trial; None where the sampler cannot express its schedule."""
    import optuna

    values = space.values(schedule)
    if values is None:
        return None
    ok = line["state"] == "ok"
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.COMPLETE if ok else optuna.trial.TrialState.PRUNED,
        value=line["time_us"] if ok else None,
        params=values,
        distributions=distributions(space),
        user_attrs={KEY: schedule.key, RECORD: line},
        constraints=None if ok else {RUNS: 1.0},
    )


def distributions(space: Space) -> dict[str, optuna.distributions.BaseDistribution]:
    """Of every knob."""
    from optuna.distributions import CategoricalDistribution

    return {knob: CategoricalDistribution(choices) for knob, choices in space.knobs.items()}
