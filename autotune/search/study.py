"""One search for the best schedule of a problem, direction, dtype, layout and graph class on one device.

A study writes trial records (JSON lines), and copies them to an Optuna storage when it is closed. The records decide: a
trial is finished when its line is on the disk. The sampler learns in memory, from the records, because a database on a
disk takes longer per trial (15 commits, 270 ms measured) than the device. Optuna only samples; the loop is ours.

Several tuners may work on one study. Each claims a schedule through :class:`autotune.search.shared.Claims`
before it measures it, and reads the others' finished records there.
"""

from __future__ import annotations

import dataclasses
import operator
import random
import statistics
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.database import trials as trial_records
from autotune.database.trials import FAULTS, note_fault, quarantined
from autotune.errors import StudyError
from autotune.measure.space import Space
from autotune.measure.trial import Outcome
from autotune.search.samplers import KEY, RUNS, add_missing, known_trial, make_sampler, open_optuna, optuna_name
from autotune.search.shared import COMPARISON, COPY, Sharing, open_claims
from autotune.search.starting_points import untried_forms
from autotune.workload.objective import TIME, Objective
from autotune.workload.workload import Workload
from kernelgen.errors import ScheduleError
from kernelgen.kernels.knobs import Knobs
from kernelgen.version import GENERATOR_VERSION

if TYPE_CHECKING:
    import optuna

# A trial is a gain if it is better than all before by this fraction, which exceeds the noise of two measurements.
GAIN = 0.01
# Illegal or known answers of a sampler, in a row, before a random untried schedule is taken instead. A Gaussian process
# is slow, and then repeats its answer.
MISSES = {"tpe": 8, "climb": 8, "random": 8, "gp": 2, "brute": 0}
# Every second proposal of ``climb`` changes one or two knobs of one of this many fastest schedules.
PARENTS = 3
# Number of best trials of other generators that a study starts with.
OLDER_WINNERS = 3


@dataclass(frozen=True)
class Proposal:
    """A schedule to measure, and its Optuna trial (None if the space does not contain the schedule)."""

    schedule: Knobs
    trial: optuna.Trial | None


def study_name(workload: Workload, direction: str, objective: Objective = TIME) -> str:
    """The name of a study and of its trial file, which says the objective: trials of several are never mixed."""
    parts = (workload.label, workload.operation, direction, workload.dtype, workload.layout)
    kind = ("deterministic",) if workload.deterministic else ()
    return "-".join((*parts, workload.graph_class().text, *kind)) + objective.study_suffix


class Study:
    """Proposes untried schedules, and stores every outcome durably before the next.

    ``finished``: records by the key of their schedule, in order of arrival.
    ``name`` names the trial file ``path``. Trials of other generator versions are in the same file, and only serve as
    starting points. A study that is not shared locks other tuners out until :meth:`close`. Others may take part if it
    is shared in the ``folder`` or through the ``storage`` (see :mod:`autotune.search.shared`); otherwise the
    storage is only a copy. Without a path nothing is stored (a simulated search), without a storage there is no copy.
    ``quarantine``: the device's list of failed schedules. ``objective``: what is minimised. Trials that are far
    slower than the fastest have no energy (:data:`autotune.measure.trial.ENERGY_WITHIN`), so they are not ranked by it.
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
        sharing: Sharing = "alone",
        objective: Objective = TIME,
    ) -> None:
        self.space, self.objective, self._quarantine = space, objective, quarantine
        self.finished: dict[str, dict[str, Any]] = {}
        # Why its search ended, as ``search`` says; empty before.
        self.ended = ""
        self.name, self._path, self.generator, self.sampler = name, path, generator, sampler
        self._claims = open_claims(path, sharing, storage, self._optuna_name(), space, objective)
        try:
            old = self._claims.news()
            if sharing != "alone":
                # With equal seeds, tuners would propose the same schedules.
                seed += random.SystemRandom().randrange(2**16)
            self._tried: set[str] = set()
            # Schedules measured by other generators, best first.
            others = (line for line in self._readable(old) if line.get("generator") != generator)
            ranked = objective.ranked(line for line in others if line["state"] == "ok")
            older = [self.schedule_of(line) for line in ranked]
            winners, forms = older[:OLDER_WINNERS], untried_forms(space, older)
            moved = [space.nearest(schedule) for schedule in (*winners, *forms, *starts)]
            # Proposed before all others. A schedule that another tuner has claimed goes back to the end.
            self._first = deque((space.default, *moved, *space.probes))
            self._untried = space.shuffled(seed)
            self._random, self._turn = random.Random(seed + len(old)), 0
            self._study = open_optuna(None, name, make_sampler(sampler, seed + len(old)), objective)
            self._learn(old)
            for key, line in self.finished.items():
                self._claims.contribute(key, self.schedule_of(line), line)
            self._copy = storage if sharing != "storage" else None
            if storage is not None and sharing == "alone":
                # An unusable storage is an error now, not at the end.
                open_optuna(storage, self._optuna_name(), objective=objective)
        except BaseException:
            self._claims.close()
            raise

    def close(self) -> None:
        """Update the storage, unless another tuner will, and release the file."""
        try:
            if self._copy and not self.others_at_work() and self._claims.claim(COPY):
                trials = [self._as_trial(line) for line in self.finished.values()]
                told = [trial for trial in trials if trial is not None]
                add_missing(self._copy, self._optuna_name(), told, self.objective)
        except StudyError as error:
            warnings.warn(f"{error}; the trials are in {self._path}, and the next run copies them", stacklevel=2)
        finally:
            self._claims.close()

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The trial file; StudyError for a study without one."""
        if self._path is None:
            raise StudyError(f"the study {self.name} keeps no records")
        return self._path

    def schedule_of(self, line: dict[str, Any]) -> Knobs:
        return self.space.kind.read(line["schedule"])

    @property
    def ranking(self) -> list[dict[str, Any]]:
        """Records of schedules that passed and were fully measured, best first by the objective."""
        return self.objective.ranked(self._passed)

    @property
    def _passed(self) -> list[dict[str, Any]]:
        return [line for line in self.finished.values() if line["state"] == "ok" and not line.get("cut")]

    @property
    def best(self) -> dict[str, Any] | None:
        return next(iter(self.ranking), None)

    @property
    def best_us(self) -> float | None:
        return self.best["time_us"] if self.best else None

    @property
    def pace_us(self) -> float | None:
        """The least time so far, by which far slower schedules are given up; None if those may be the best."""
        return min((line["time_us"] for line in self._passed), default=None) if self.objective.follows_time else None

    @property
    def stale(self) -> int:
        """Number of measured trials since the last gain (:data:`GAIN`)."""
        count, bounds = 0, list[list[float]]()
        for line in self.finished.values():
            values = self.objective.values(line) if line["state"] == "ok" and not line.get("cut") else None
            if values and all(any(map(operator.lt, values, bound)) for bound in bounds):
                bound = [value * (1 - GAIN) for value in values]
                bounds, count = [*bounds, bound] if self.objective.is_front else [bound], 0
            else:
                count += line["state"] != "pruned"
        return count

    @property
    def default(self) -> dict[str, Any] | None:
        return self.finished.get(self.space.default.key)

    @property
    def default_us(self) -> float | None:
        return self.default["time_us"] if self.default else None

    @property
    def failures(self) -> int:
        return sum(line["state"] not in ("ok", "pruned") for line in self.finished.values())

    def others_at_work(self, wait: bool = False, comparing: bool = False) -> bool:
        """Whether another tuner is measuring for this study or comparing its winners; arguments as in ``Claims``."""
        return self._claims.others_at_work(wait, comparing)

    def claim_comparison(self) -> bool:
        """Claim the comparison and publication of the winners until :meth:`close`; False if another tuner has it."""
        return self._claims.claim(COMPARISON)

    def refresh(self) -> None:
        """Read the records that other tuners have finished."""
        self._learn(self._claims.news())

    def propose(self) -> Proposal | None:
        """The next schedule that is legal, untried and not claimed elsewhere, or None if there is none."""
        self.refresh()
        for _ in range(len(self._first)):
            if proposal := self._propose_fixed(self._first.popleft()):
                return proposal
        self._turn += 1
        if self.sampler == "climb" and self._turn % 2 and (neighbour := self._neighbour()) is not None:
            return neighbour
        for _ in range(MISSES.get(self.sampler, MISSES["tpe"])):
            trial = self._study.ask()
            schedule = self.space.suggest(trial)
            if self._is_candidate(schedule) and self._claim(schedule):
                return self._proposed(trial, schedule)
            if schedule.key in self._tried or schedule in self._first:
                self._forget(trial)
            else:
                self._tell(trial, None, runs=False)
        for schedule in self._untried:
            if proposal := self._propose_fixed(schedule):
                return proposal
        return None

    def finish(self, proposal: Proposal, outcome: Outcome) -> dict[str, Any]:
        """Write the record, then tell the sampler; after a kill in between, the sampler learns it at the next start."""
        line = {
            "study": self.name,
            "number": 0,  # set when it is stored
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "state": outcome.state,
            "reason": outcome.reason,
            "schedule": proposal.schedule.to_dict(),
            "time_us": outcome.time_us,
            "q1_us": outcome.q1_us,
            "q3_us": outcome.q3_us,
            "samples_us": list(outcome.samples_us),
            **({"objective": str(self.objective)} if self.objective != TIME else {}),
            **outcome.figures,
            "cut": outcome.cut,
            "errors": dict(outcome.errors),
            "resources": dict(outcome.resources),
            "clocks": outcome.clocks,
            "conditions": dict(outcome.conditions),
            "compile_s": outcome.compile_s,
            "measure_s": outcome.measure_s,
            "generator": self.generator,
        }
        line = self._claims.finish(proposal.schedule.key, line)
        self.finished[proposal.schedule.key] = line
        if self._quarantine and line["state"] in FAULTS:
            note_fault(self._quarantine, self.space.spec, proposal.schedule, line)
        if proposal.trial is not None:
            runs = line["state"] == "ok"
            self._tell(proposal.trial, self.objective.values(line) if runs else None, runs)
        self.refresh()
        return line

    def add_resources(self, schedule: Knobs, found: Mapping[str, float]) -> None:
        """Add to the resources of a finished trial; nothing if there is none of the schedule."""
        if line := self.finished.get(schedule.key):
            line["resources"] = {**line["resources"], **found}
            self._claims.amend(line)

    def trial_s(self, compilers: int) -> float:
        """Seconds that a trial takes, without starts and waiting: the median of compiling and measuring."""
        lines = self.finished.values()
        seconds = [line.get("compile_s", 0.0) / compilers + line.get("measure_s", 0.0) for line in lines]
        return statistics.median(seconds) if seconds else 0.0

    def drop(self, proposal: Proposal) -> None:
        """Discard a proposal that was not measured; it may be proposed again later."""
        self._tried.discard(proposal.schedule.key)
        self._claims.let_go(proposal.schedule.key)
        if proposal.trial is not None:
            self._forget(proposal.trial)

    def _learn(self, lines: list[dict[str, Any]]) -> None:
        """Add finished trials of this generator, from earlier runs and other tuners."""
        new = []
        for line in self._readable(lines):
            key = self.schedule_of(line).key
            if line.get("generator") == self.generator and key not in self.finished:
                self.finished[key] = line
                self._tried.add(key)
                new.append(self._as_trial(line))
        self._study.add_trials(trial for trial in new if trial is not None)

    def _claim(self, schedule: Knobs) -> bool:
        """Claim a schedule; one that another tuner has is remembered, in case that tuner dies."""
        if not self._claims.claim(schedule.key, schedule):
            if schedule not in self._first:
                self._first.append(schedule)
            return False
        # Another tuner may have finished it, and so released it, since the last refresh.
        self.refresh()
        if schedule.key in self._tried:
            self._claims.let_go(schedule.key)
            return False
        self._tried.add(schedule.key)
        return True

    def _neighbour(self) -> Proposal | None:
        """Propose an untried schedule that differs from one of the fastest in one or two knobs."""
        parents = [self.schedule_of(line) for line in self.ranking[:PARENTS]]
        for _ in range(32 if parents else 0):
            parent, count = self._random.choice(parents), self._random.choice((1, 1, 2))
            changed = self._random.sample(list(self.space.knobs), min(count, len(self.space.knobs)))
            values = {knob: self._random.choice(self.space.knobs[knob]) for knob in changed}
            schedule = self.space.canonical(dataclasses.replace(parent, **values))
            if proposal := self._propose_fixed(schedule):
                return proposal
        return None

    def _is_candidate(self, schedule: Knobs) -> bool:
        """Whether it is legal, untried and not quarantined for this kernel."""
        if schedule.key in self._tried or self.space.broken_limit(schedule) is not None:
            return False
        return not self._quarantine or schedule.key not in quarantined([self._quarantine], self.space.spec)

    def _propose_fixed(self, schedule: Knobs) -> Proposal | None:
        """Propose a schedule not chosen by a sampler; None if it is illegal, known or claimed elsewhere."""
        if not (self._is_candidate(schedule) and self._claim(schedule)):
            return None
        values = self.space.values(schedule)
        if values is None:
            return Proposal(schedule, None)
        self._study.enqueue_trial(values)
        trial = self._study.ask()
        suggested = self.space.suggest(trial)
        assert suggested == schedule, f"asked for {schedule.key}, was given {suggested.key}"
        return self._proposed(trial, schedule)

    def _proposed(self, trial: optuna.Trial, schedule: Knobs) -> Proposal:
        trial.set_user_attr(KEY, schedule.key)
        return Proposal(schedule, trial)

    def _forget(self, trial: optuna.Trial) -> None:
        from optuna.trial import TrialState

        self._study.tell(trial, state=TrialState.FAIL)

    def _tell(self, trial: optuna.Trial, values: list[float] | None, runs: bool) -> None:
        """Tell the sampler figures, or that there are none: if it did not run, similar ones are unwanted."""
        from optuna.trial import TrialState

        if not runs:
            trial.set_constraint(RUNS, 1.0)
        self._study.tell(trial, values, TrialState.COMPLETE if values else TrialState.PRUNED)

    def _optuna_name(self) -> str:
        return optuna_name(self.space, self.name, self.generator)

    def _readable(self, lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Records whose schedules this version understands."""
        for line in lines:
            try:
                self.schedule_of(line)
            except (ScheduleError, KeyError, TypeError):
                continue
            if trial_records.is_trial(line):
                yield line

    def _as_trial(self, line: dict[str, Any]) -> optuna.trial.FrozenTrial | None:
        return known_trial(self.space, self.schedule_of(line), line, self.objective)
