"""One search: which schedule is fastest for one problem, direction, dtype, layout and graph class on one device.

A :class:`Space`, starting points and a sampler enter; trial records (JSON lines) leave, and a copy of them in an
Optuna storage from which the sampler learns. The records are the truth: a trial is finished when its line is on the
disk, and a storage that lags behind (or was lost) is filled up from them. Optuna is asked and told, never in charge.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from autotune import records
from autotune.errors import StudyError
from autotune.jobs import Outcome
from autotune.sampling import make_sampler, open_optuna
from autotune.space import Space
from kernelgen.errors import ScheduleError
from kernelgen.schedule import Schedule, schedule_from_dict
from kernelgen.version import GENERATOR_VERSION

if TYPE_CHECKING:
    import optuna

# Answers of a sampler that are illegal or known, in a row, before an untried schedule is taken at random.
# A Gaussian process thinks for long and then says the same again.
MISSES = {"tpe": 8, "random": 8, "gp": 2, "brute": 0}
# Name of the constraint that failed trials violate. Told as FAIL they would be ignored, and suggested again.
RUNS = "runs"
KEY = "schedule"


@dataclass(frozen=True)
class Proposal:
    """A schedule to measure, and the Optuna trial that hears of it."""

    schedule: Schedule
    trial: optuna.Trial


class Study:
    """Proposes schedules that were never tried, and makes every outcome durable before the next.

    ``name`` names the trial file ``path``. Trials of another generator version stand in the same file and serve as
    starting points only. Holds a lock on the file until :meth:`close`.
    """

    def __init__(
        self,
        space: Space,
        name: str,
        path: Path,
        storage: str | optuna.storages.BaseStorage,
        *,
        sampler: str = "tpe",
        seed: int = 0,
        starts: Iterable[Schedule] = (),
        generator: str = GENERATOR_VERSION,
    ) -> None:
        self.space, self.name, self.path, self.generator, self.sampler = space, name, path, generator, sampler
        self._lock = _locked(path)
        old = records.read(path)
        self.count = len(old)
        self.finished = {_schedule_of(line).key: line for line in _readable(old) if line.get("generator") == generator}
        self._tried = set(self.finished)
        self._starts = deque([space.default, *starts, *self._older_winners(old)])
        self._untried = space.shuffled(seed)
        self._study = open_optuna(storage, self._optuna_name(), make_sampler(sampler, seed + self.count))
        self._reconcile()

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ranking(self) -> list[dict[str, Any]]:
        """Records of schedules that passed and were measured in full, fastest first."""
        passed = [line for line in self.finished.values() if line["state"] == "ok" and not line.get("cut")]
        return sorted(passed, key=lambda line: line["time_us"])

    @property
    def best_us(self) -> float | None:
        return self.ranking[0]["time_us"] if self.ranking else None

    @property
    def default_us(self) -> float | None:
        line = self.finished.get(self.space.default.key)
        return line["time_us"] if line else None

    @property
    def failures(self) -> int:
        return sum(line["state"] != "ok" for line in self.finished.values())

    def propose(self) -> Proposal | None:
        """The next schedule that is legal and untried, or None when there is no such schedule."""
        while self._starts:
            if self._is_candidate(schedule := self.space.nearest(self._starts.popleft())):
                return self._propose_fixed(schedule)
        for _ in range(MISSES[self.sampler]):
            trial = self._study.ask()
            schedule = self.space.suggest(trial)
            if self._is_candidate(schedule):
                return self._proposed(trial, schedule)
            self._tell_refused(trial, schedule)
        for schedule in self._untried:
            if self._is_candidate(schedule):
                return self._propose_fixed(schedule)
        return None

    def finish(self, proposal: Proposal, outcome: Outcome) -> dict[str, Any]:
        """Write the record, then tell Optuna. A kill between the two is made good by the next start."""
        line = {
            "study": self.name,
            "number": self.count,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "state": outcome.state,
            "reason": outcome.reason,
            "schedule": proposal.schedule.to_dict(),
            "time_us": outcome.time_us,
            "q1_us": outcome.q1_us,
            "q3_us": outcome.q3_us,
            "samples_us": list(outcome.samples_us),
            "cut": outcome.cut,
            "errors": dict(outcome.errors),
            "resources": dict(outcome.resources),
            "clocks": outcome.clocks,
            "compile_s": outcome.compile_s,
            "generator": self.generator,
        }
        records.append(self.path, line)
        self.count += 1
        self.finished[proposal.schedule.key] = line
        self._tell(proposal.trial, line)
        return line

    def drop(self, proposal: Proposal) -> None:
        """Forget a proposal that was not measured; it may be proposed again later."""
        from optuna.trial import TrialState

        self._tried.discard(proposal.schedule.key)
        self._study.tell(proposal.trial, state=TrialState.FAIL)

    def _is_candidate(self, schedule: Schedule) -> bool:
        return schedule.key not in self._tried and self.space.broken_limit(schedule) is None

    def _propose_fixed(self, schedule: Schedule) -> Proposal:
        values = self.space.values(schedule)
        assert values is not None, f"{schedule.key} is outside its space"
        self._study.enqueue_trial(values)
        trial = self._study.ask()
        suggested = self.space.suggest(trial)
        assert suggested == schedule, f"asked for {schedule.key}, was given {suggested.key}"
        return self._proposed(trial, schedule)

    def _proposed(self, trial: optuna.Trial, schedule: Schedule) -> Proposal:
        trial.set_user_attr(KEY, schedule.key)
        self._tried.add(schedule.key)
        return Proposal(schedule, trial)

    def _tell_refused(self, trial: optuna.Trial, schedule: Schedule) -> None:
        from optuna.trial import TrialState

        if schedule.key in self._tried:
            self._study.tell(trial, state=TrialState.FAIL)
            return
        trial.set_constraint(RUNS, 1.0)
        self._study.tell(trial, state=TrialState.PRUNED)

    def _tell(self, trial: optuna.Trial, line: dict[str, Any]) -> None:
        from optuna.trial import TrialState

        if line["state"] == "ok":
            self._study.tell(trial, line["time_us"])
            return
        trial.set_constraint(RUNS, 1.0)
        self._study.tell(trial, state=TrialState.PRUNED)

    def _optuna_name(self) -> str:
        """Choices cannot change within an Optuna study, and times of another generator mean nothing to this one."""
        shape = json.dumps({knob: list(choices) for knob, choices in self.space.knobs.items()})
        return f"{self.name}@{self.generator}#{hashlib.sha256(shape.encode()).hexdigest()[:8]}"

    def _older_winners(self, lines: list[dict[str, Any]]) -> list[Schedule]:
        older = [line for line in _readable(lines) if line.get("generator") != self.generator and line["state"] == "ok"]
        ranked = sorted(older, key=lambda line: line["time_us"])
        return [_schedule_of(line) for line in ranked[:3]]

    def _reconcile(self) -> None:
        """Make the storage agree with the records: end what a killed run left open, add what it never told."""
        from optuna.trial import TrialState

        told = set()
        while any(trial.state == TrialState.WAITING for trial in self._study.get_trials(deepcopy=False)):
            self._study.ask()
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state == TrialState.RUNNING:
                self._study.tell(trial.number, state=TrialState.FAIL)
            elif trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
                told.add(trial.user_attrs.get(KEY))
        missing = (self._as_trial(line) for key, line in self.finished.items() if key not in told)
        self._study.add_trials(trial for trial in missing if trial is not None)

    def _as_trial(self, line: dict[str, Any]) -> optuna.trial.FrozenTrial | None:
        import optuna

        schedule = _schedule_of(line)
        values = self.space.values(schedule)
        if values is None:
            return None
        ok = line["state"] == "ok"
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState.COMPLETE if ok else optuna.trial.TrialState.PRUNED,
            value=line["time_us"] if ok else None,
            params=values,
            distributions={
                knob: optuna.distributions.CategoricalDistribution(choices)
                for knob, choices in self.space.knobs.items()
            },
            user_attrs={KEY: schedule.key},
            constraints=None if ok else {RUNS: 1.0},
        )


def _schedule_of(line: dict[str, Any]) -> Schedule:
    return schedule_from_dict(line["schedule"])


def _readable(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Records whose schedule this version understands."""
    for line in lines:
        try:
            _schedule_of(line)
        except (ScheduleError, KeyError, TypeError):
            continue
        yield line


def _locked(path: Path) -> filelock.BaseFileLock:
    lock_path = records.lock_path(path)
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(lock_path, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise StudyError(f"another process is tuning {path}; wait for it, or choose another results folder") from error
    return lock
