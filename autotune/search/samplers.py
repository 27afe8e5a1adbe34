"""Interface to Optuna: creates samplers, opens storages, and converts trial records to Optuna's trials."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from autotune.errors import ConfigError, StudyError
from autotune.measure.space import Space
from autotune.workload.objective import TIME, Objective
from autotune.workload.toml_tables import SEEDS, check_sampler
from kernelgen.kernels.knobs import Knobs

if TYPE_CHECKING:
    import optuna

# Spaces with at most this many legal schedules are searched completely if trials and time allow.
BRUTE_LIMIT = 200
# Most pending proposals of samplers that learn: each proposal ignores the results of the others. Simulated on models of
# two studies on an H200 (6 seeds), TPE with 16 pending was 3% further from the best after 110 trials than with 8, and 4
# gained another 1%. Eight keep the device busy: there a kernel compiles in 0.3 to 1.7 s and is measured in 0.1 to
# 0.2 s. ``climb`` may have more, because half of its proposals start from finished trials, and kernels of many paths
# compile for several seconds.
MOST_AHEAD = {"tpe": 8, "gp": 8, "climb": 12}
# Name of the constraint that failed trials violate. Optuna would ignore trials in state FAIL, and suggest them again.
RUNS = "runs"
# Attributes of a trial in a storage: the key of its schedule, and its record in the trial file.
KEY, RECORD = "schedule", "record"


def choose_sampler(space: Space, trials: int | None, seconds: float | None, trial_s: float = 3.0) -> str:
    """``brute`` if the whole space fits the limits, else ``climb``."""
    limits = (trials, None if seconds is None else int(seconds / trial_s))
    affordable = min([BRUTE_LIMIT, *(limit for limit in limits if limit is not None)])
    return "brute" if space.count_legal(affordable + 1) <= affordable else "climb"


def proposals_ahead(sampler: str, compilers: int) -> int:
    """Number of schedules to compile at once: one per compiler, but limited for samplers that learn."""
    return min(compilers, MOST_AHEAD.get(sampler, compilers))


def make_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Optuna's sampler of that name, or a new one of the class ``module:Class``, with the seed if it takes one.

    ``climb`` uses TPE for every second proposal; the others are neighbours of the fastest schedules, and TPE learns
    from them too. ``brute`` enumerates the space without Optuna.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed %= SEEDS  # a continued study adds the number of records to the user's seed
    if name in ("tpe", "climb"):
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    if name == "gp":
        return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    if name in ("random", "brute"):
        return optuna.samplers.RandomSampler(seed=seed)
    cls = _sampler_class(check_sampler(name))
    takes_seed = "seed" in inspect.signature(cls).parameters
    return cls(seed=seed) if takes_seed else cls()


def _sampler_class(text: str) -> Callable[..., optuna.samplers.BaseSampler]:
    """The class of ``module:Class``; the module may lie in the present folder."""
    import optuna

    module, _, name = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"sampler {text!r}: {error}; expected module:Class of an Optuna sampler") from error
    if not (isinstance(cls, type) and issubclass(cls, optuna.samplers.BaseSampler)):
        raise ConfigError(
            f"sampler {text!r} is {cls!r:.200}; expected a class derived from optuna.samplers.BaseSampler"
        )
    return cls


def open_optuna(
    storage: str | optuna.storages.BaseStorage | None,
    name: str,
    sampler: optuna.samplers.BaseSampler | None = None,
    objective: Objective = TIME,
) -> optuna.Study:
    """Create or load; None means in memory. A SQLite file left incomplete by a kill is moved aside and recreated."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def create() -> optuna.Study:
        known: dict[str, Any] = {"study_name": name, "load_if_exists": True, "directions": objective.directions}
        return optuna.create_study(storage=storage, sampler=sampler, **known)

    file = sqlite_file(storage)
    with making(storage):
        try:
            return create()
        except Exception as error:
            if file is None or not file.exists() or not _is_corrupt(error):
                raise StudyError(f"Optuna storage {storage} cannot be used: {_original(error)}") from error
            aside = file.with_name(f"{file.name}.corrupt-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}")
            file.rename(aside)
            warnings.warn(f"Optuna storage {file} cannot be used ({error}); it is kept as {aside.name}", stacklevel=2)
            return create()


# SQLite's errors that do not mean a damaged file, but a problem of the disk, permissions or another process.
_NO_FAULT_OF_THE_FILE = frozenset({"PERM", "BUSY", "LOCKED", "READONLY", "IOERR", "FULL", "CANTOPEN"})


def _is_corrupt(error: BaseException) -> bool:
    # SQLITE_IOERR_WRITE and similar count as SQLITE_IOERR.
    name = getattr(_original(error), "sqlite_errorname", "")
    return not any(f"{name}_".startswith(f"SQLITE_{kind}_") for kind in _NO_FAULT_OF_THE_FILE)


def _original(error: BaseException) -> BaseException:
    """The database's own error, which SQLAlchemy wraps, and Optuna may wrap again."""
    return getattr(error, "orig", None) or getattr(error.__cause__, "orig", None) or error


def add_missing(
    storage: str | optuna.storages.BaseStorage,
    name: str,
    trials: Sequence[optuna.trial.FrozenTrial],
    objective: Objective = TIME,
) -> None:
    """Copy finished trials whose schedules the Optuna study does not have yet."""
    # SQLite allows one writer at a time, and studies of other tuners may be in the same file.
    with making(storage):
        study = open_optuna(storage, name, objective=objective)
        told = {trial.user_attrs.get(KEY) for trial in study.get_trials(deepcopy=False)}
        try:
            study.add_trials(trial for trial in trials if trial.user_attrs[KEY] not in told)
        except Exception as error:
            raise StudyError(f"Optuna storage {storage} cannot be written: {_original(error)}") from error


def sqlite_file(storage: Any) -> Path | None:
    """The file in a storage's URL if it is SQLite, else None."""
    if isinstance(storage, str) and storage.startswith("sqlite:///"):
        return Path(storage.removeprefix("sqlite:///"))
    return None


def making(storage: Any) -> AbstractContextManager[Any]:
    """The lock for creating a SQLite file's tables (two at once would fail) or copying many trials into it."""
    file = sqlite_file(storage)
    if file is None:
        return nullcontext()
    file.parent.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(file.with_name(f".{file.name}.lock"), is_singleton=True)


def optuna_name(space: Space, name: str, generator: str) -> str:
    """Name of a study in a storage, which may hold studies of several devices.

    It depends on the choices, which cannot change within an Optuna study, and on the generator, which changes times.
    """
    shape = json.dumps({knob: list(choices) for knob, choices in space.knobs.items()})
    digest = hashlib.sha256(shape.encode()).hexdigest()[:8]
    return f"{space.spec.facts.slug}/{name}@{generator}#{digest}"


def known_trial(
    space: Space, schedule: Knobs, line: dict[str, Any], objective: Objective = TIME
) -> optuna.trial.FrozenTrial | None:
    """A record as a finished trial; None if the space does not contain its schedule.

    Without all figures of the objective it counts as pruned: worse than those that have them, better than one that
    failed.
    """
    import optuna

    values = space.values(schedule)
    if values is None:
        return None
    ok = line["state"] == "ok"
    found = objective.values(line) if ok else None
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.COMPLETE if found else optuna.trial.TrialState.PRUNED,
        values=found,
        params=values,
        distributions=distributions(space),
        user_attrs={KEY: schedule.key, RECORD: line},
        constraints=None if ok else {RUNS: 1.0},
    )


def distributions(space: Space) -> dict[str, optuna.distributions.BaseDistribution]:
    """Optuna's distribution for every knob."""
    from optuna.distributions import CategoricalDistribution

    return {knob: CategoricalDistribution(choices) for knob, choices in space.knobs.items()}
