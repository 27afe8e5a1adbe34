"""One search: which schedule is fastest for one problem, direction, dtype, layout and graph class on one device.

A :class:`Space`, starting points and a sampler enter; trial records (JSON lines) leave, and a copy of them in an
Optuna storage. The records are the truth: a trial is finished when its line is on the disk. The sampler learns in
memory, from the records, because a database on a disk takes longer over one trial (15 commits, 270 ms measured) than
the device does; the storage is brought up to date when a study is closed. Optuna is asked and told, never in charge.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
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
from autotune.quarantine import FAULTS, note_fault, quarantined
from autotune.sampling import make_sampler, open_optuna
from autotune.space import Space
from kernelgen.errors import ScheduleError
from kernelgen.schedule import Knobs
from kernelgen.version import GENERATOR_VERSION

if TYPE_CHECKING:
    import optuna

# Answers of a sampler that are illegal or known, in a row, before an untried schedule is taken at random.
# A Gaussian process thinks for long and then says the same again.
MISSES = {"tpe": 8, "climb": 8, "random": 8, "gp": 2, "brute": 0}
# Of the proposals of a climb, those that change a knob or two of one of this many fastest schedules: every second.
PARENTS = 3
# Name of the constraint that failed trials violate. Told as FAIL they would be ignored, and suggested again.
RUNS = "runs"
KEY = "schedule"
# A trial gains something if it is faster than the fastest before by more than the noise of two measurements.
GAIN = 0.01


@dataclass(frozen=True)
class Proposal:
    """A schedule to measure, and the Optuna trial that hears of it; None where the sampler cannot express it."""

    schedule: Knobs
    trial: optuna.Trial | None


class Study:
    """Proposes schedules that were never tried, and makes every outcome durable before the next.

    ``name`` names the trial file ``path``. Trials of another generator version stand in the same file and serve as
    starting points only. Holds a lock on the file until :meth:`close`. Without a path nothing is kept, without a
    storage there is no copy: a rehearsal. ``quarantine``: the device's list of faulty schedules.
    """

    def __init__(
        self,
        space: Space,
        name: str,
        path: Path | None = None,
        storage: str | optuna.storages.BaseStorage | None = None,
        *,
        sampler: str = "tpe",
        seed: int = 0,
        starts: Iterable[Knobs] = (),
        generator: str = GENERATOR_VERSION,
        quarantine: Path | None = None,
    ) -> None:
        self._quarantine = quarantine
        self.space, self.name, self._path, self.generator, self.sampler = space, name, path, generator, sampler
        self._lock = _locked(path) if path else None
        old = records.read(path) if path else []
        self.count = len(old)
        current = [line for line in self._readable(old) if line.get("generator") == generator]
        self.finished = {self.schedule_of(line).key: line for line in current}
        self._tried = set(self.finished)
        moved = (space.nearest(schedule) for schedule in (*self._older_winners(old), *starts))
        self._starts = deque((space.default, *moved, *space.probes))
        self._untried = space.shuffled(seed)
        self._random, self._turn = random.Random(seed + self.count), 0
        self._study = open_optuna(None, name, make_sampler(sampler, seed + self.count))
        self._study.add_trials(self._known_trials())
        try:
            self._copy = open_optuna(storage, self._optuna_name()) if storage is not None else None
        except BaseException:
            self._unlock()
            raise

    def close(self) -> None:
        """Bring the storage up to date and let the file go."""
        try:
            if self._copy is not None:
                told = {trial.user_attrs.get(KEY) for trial in self._copy.get_trials(deepcopy=False)}
                self._copy.add_trials(trial for trial in self._known_trials() if trial.user_attrs[KEY] not in told)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The trial file; StudyError for a rehearsal."""
        if self._path is None:
            raise StudyError(f"the study {self.name} keeps no records")
        return self._path

    def schedule_of(self, line: dict[str, Any]) -> Knobs:
        """Of a record."""
        return self.space.family.read(line["schedule"])

    @property
    def ranking(self) -> list[dict[str, Any]]:
        """Records of schedules that passed and were measured in full, fastest first."""
        passed = [line for line in self.finished.values() if line["state"] == "ok" and not line.get("cut")]
        return sorted(passed, key=lambda line: line["time_us"])

    @property
    def best(self) -> dict[str, Any] | None:
        return next(iter(self.ranking), None)

    @property
    def best_us(self) -> float | None:
        return self.best["time_us"] if self.best else None

    @property
    def stale(self) -> int:
        """Measured trials since the last one that was faster than all before by more than :data:`GAIN`."""
        count, best_us = 0, math.inf
        for line in self.finished.values():
            gained = line["state"] == "ok" and not line.get("cut") and line["time_us"] < best_us * (1 - GAIN)
            count = 0 if gained else count + (line["state"] != "pruned")
            best_us = line["time_us"] if gained else best_us
        return count

    @property
    def default_us(self) -> float | None:
        line = self.finished.get(self.space.default.key)
        return line["time_us"] if line else None

    @property
    def failures(self) -> int:
        return sum(line["state"] not in ("ok", "pruned") for line in self.finished.values())

    def propose(self) -> Proposal | None:
        """The next schedule that is legal and untried, or None when there is no such schedule."""
        while self._starts:
            if self._is_candidate(schedule := self._starts.popleft()):
                return self._propose_fixed(schedule)
        self._turn += 1
        if self.sampler == "climb" and self._turn % 2 and (neighbour := self._neighbour()) is not None:
            return self._propose_fixed(neighbour)
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
        """Write the record, then tell the sampler; one that is killed in between learns of it at the next start."""
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
        if self._path:
            records.append(self._path, line)
        self.count += 1
        self.finished[proposal.schedule.key] = line
        if self._quarantine and line["state"] in FAULTS:
            note_fault(self._quarantine, self.space.spec, proposal.schedule, line)
        self._tell(proposal.trial, line)
        return line

    def drop(self, proposal: Proposal) -> None:
        """Forget a proposal that was not measured; it may be proposed again later."""
        from optuna.trial import TrialState

        self._tried.discard(proposal.schedule.key)
        if proposal.trial is not None:
            self._study.tell(proposal.trial, state=TrialState.FAIL)

    def _neighbour(self) -> Knobs | None:
        """An untried schedule that differs from one of the fastest in a knob or two."""
        parents = [self.schedule_of(line) for line in self.ranking[:PARENTS]]
        for _ in range(32 if parents else 0):
            parent, count = self._random.choice(parents), self._random.choice((1, 1, 2))
            changed = self._random.sample(list(self.space.knobs), min(count, len(self.space.knobs)))
            values = {knob: self._random.choice(self.space.knobs[knob]) for knob in changed}
            schedule = self.space.canonical(dataclasses.replace(parent, **values))
            if self._is_candidate(schedule):
                return schedule
        return None

    def _is_candidate(self, schedule: Knobs) -> bool:
        """Whether it is legal, untried and, as far as any study of this kernel knows, sound."""
        if schedule.key in self._tried or self.space.broken_limit(schedule) is not None:
            return False
        return not self._quarantine or schedule.key not in quarantined([self._quarantine], self.space.spec)

    def _propose_fixed(self, schedule: Knobs) -> Proposal:
        values = self.space.values(schedule)
        if values is None:
            self._tried.add(schedule.key)
            return Proposal(schedule, None)
        self._study.enqueue_trial(values)
        trial = self._study.ask()
        suggested = self.space.suggest(trial)
        assert suggested == schedule, f"asked for {schedule.key}, was given {suggested.key}"
        return self._proposed(trial, schedule)

    def _proposed(self, trial: optuna.Trial, schedule: Knobs) -> Proposal:
        trial.set_user_attr(KEY, schedule.key)
        self._tried.add(schedule.key)
        return Proposal(schedule, trial)

    def _tell_refused(self, trial: optuna.Trial, schedule: Knobs) -> None:
        from optuna.trial import TrialState

        if schedule.key in self._tried:
            self._study.tell(trial, state=TrialState.FAIL)
            return
        trial.set_constraint(RUNS, 1.0)
        self._study.tell(trial, state=TrialState.PRUNED)

    def _tell(self, trial: optuna.Trial | None, line: dict[str, Any]) -> None:
        """A schedule that was pruned breaks the constraint as well: it has no time, and its like are not wanted."""
        from optuna.trial import TrialState

        if trial is None:
            return
        if line["state"] == "ok":
            self._study.tell(trial, line["time_us"])
            return
        trial.set_constraint(RUNS, 1.0)
        self._study.tell(trial, state=TrialState.PRUNED)

    def _optuna_name(self) -> str:
        """Choices cannot change within an Optuna study, and times of another generator mean nothing to this one."""
        shape = json.dumps({knob: list(choices) for knob, choices in self.space.knobs.items()})
        return f"{self.name}@{self.generator}#{hashlib.sha256(shape.encode()).hexdigest()[:8]}"

    def _older_winners(self, lines: list[dict[str, Any]]) -> list[Knobs]:
        others = (line for line in self._readable(lines) if line.get("generator") != self.generator)
        older = [line for line in others if line["state"] == "ok"]
        ranked = sorted(older, key=lambda line: line["time_us"])
        return [self.schedule_of(line) for line in ranked[:3]]

    def _readable(self, lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Records whose schedule this version understands."""
        for line in lines:
            try:
                self.schedule_of(line)
            except (ScheduleError, KeyError, TypeError):
                continue
            yield line

    def _known_trials(self) -> list[optuna.trial.FrozenTrial]:
        trials = (self._as_trial(line) for line in self.finished.values())
        return [trial for trial in trials if trial is not None]

    def _as_trial(self, line: dict[str, Any]) -> optuna.trial.FrozenTrial | None:
        import optuna

        schedule = self.schedule_of(line)
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


def _locked(path: Path) -> filelock.BaseFileLock:
    lock_path = records.lock_path(path)
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(lock_path, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise StudyError(f"another process is tuning {path}; wait for it, or choose another results folder") from error
    return lock
