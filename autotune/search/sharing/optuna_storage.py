"""Share a study among many hosts through an Optuna storage: PostgreSQL, MySQL, or SQLite on one host.

A claim is a running trial, kept alive by heartbeats. Optuna fails the trials of dead tuners, which releases their
schedules. A finished trial carries its record, which every tuner writes to the trial file of its own results folder, so
each folder has the whole study. If the storage does not answer, a tuner waits and then ends with an error. Everything
measured is in its trial file, and reaches the storage with the next run.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
import warnings
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.database import trials as trial_records
from autotune.errors import StudyError
from autotune.search.samplers import KEY, RECORD, distributions
from autotune.search.sharing.claims import COMPARISON, Claims, FolderClaims, Sharing
from autotune.search.sharing.storage_access import WAIT_S, Access
from autotune.search.space import Space
from kernelgen.kernels.knobs import Knobs

if TYPE_CHECKING:
    import optuna

# A claim survives GRACE_S after its last heartbeat, longer than a tuner waits for a storage, so that waiting tuners
# keep their claims.
HEARTBEAT_S, GRACE_S = 15, 180
assert GRACE_S > WAIT_S + HEARTBEAT_S
POLL_S = 0.5
# Attribute of a claim: the tuner that has it.
TUNER = "tuner"


class Shared(Claims):
    """One tuner's claims in a study of a storage; ``folder``: claims of its results folder, which keeps the trials."""

    def __init__(
        self, folder: FolderClaims, storage: str | optuna.storages.BaseStorage, name: str, space: Space
    ) -> None:
        import optuna

        self._folder, self._space, self._tuner = folder, space, uuid.uuid4().hex
        self._access = Access(storage, folder.path, HEARTBEAT_S, GRACE_S)
        opened = self._access.open()
        # Only a storage opened by its URL has heartbeats.
        self._server = opened if isinstance(opened, optuna.storages.RDBStorage) else None
        self._storage = optuna.storages.get_storage(opened)
        self._study = self._access.patiently(
            lambda: optuna.create_study(storage=self._storage, study_name=name, load_if_exists=True)
        )
        self._id = self._access.patiently(lambda: self._storage.get_study_id_from_name(name))
        self._claims: dict[str, tuple[int, Knobs | None]] = {}
        self._given, self._met, self._reaped = set[int](), set[int](), 0.0
        self._end = threading.Event()
        # May be left behind at the end of a process, since nothing that it calls is C++: see misses._Notes.finish.
        threading.Thread(target=self._beat, daemon=True).start()

    def close(self) -> None:
        self._end.set()
        for key in list(self._claims):
            self.let_go(key)
        self._folder.close()

    @property
    def count(self) -> int:  # type: ignore[override]
        return self._folder.count

    def news(self) -> list[dict[str, Any]]:
        trials = self._access.patiently(self._reap_and_read)
        new = [trial for trial in trials if trial.number not in self._given and _has_record(trial)]
        if new:
            given = (trial_records.from_storage(trial.user_attrs[RECORD]) for trial in new)
            self._folder.keep(record for record in given if record is not None)
            self._given |= {trial.number for trial in new}
        return self._folder.news()

    def claim(self, key: str, schedule: Knobs | None = None) -> bool:
        return self._access.patiently(lambda: self._claim(key, schedule))

    def let_go(self, key: str) -> None:
        """Release a claim. If the storage does not answer, nothing need be done: the claim expires."""
        trial, _ = self._claims.pop(key, (None, None))
        if trial is None:
            return
        with contextlib.suppress(StudyError):
            self._access.patiently(lambda: self._fail(trial))

    def finish(self, key: str, line: dict[str, Any]) -> dict[str, Any]:
        """Store in the storage first, which counts for all; then in the file, also if the storage failed."""
        try:
            told = self._access.patiently(lambda: self._finish(key, line))
        except StudyError:
            self._folder.kept(line)
            raise
        self._claims.pop(key, None)
        return self._folder.kept(line) if told else line

    def contribute(self, key: str, schedule: Knobs, line: dict[str, Any]) -> None:
        held = self._access.patiently(lambda: _holder(self._trials(), key))
        if held is None and self.claim(key, schedule):
            self._access.patiently(lambda: self._finish(key, line))
            self._claims.pop(key, None)

    def others_at_work(self, wait: bool = False, comparing: bool = False) -> bool:
        """A dead tuner seems to be at work until its heartbeat expires, so ``wait`` waits that long."""
        end = time.monotonic() + (GRACE_S + HEARTBEAT_S if wait else 0)
        while keys := self._access.patiently(self._rivals):
            if (COMPARISON in keys and not comparing) or time.monotonic() > end:
                return True
            time.sleep(POLL_S)
        return False

    def _claim(self, key: str, schedule: Knobs | None) -> bool:
        """If several tuners claim at once, the first wins: trials are numbered in the order they become visible.

        A retry after a lost answer finds the trial of the first attempt.
        """
        if _holder(self._trials(), key) is None:
            self._storage.create_new_trial(self._id, template_trial=self._running(key, schedule))
        trials = self._trials()
        holder = _holder(trials, key)
        for trial in trials:
            if _is_running(trial, key, self._tuner) and trial is not holder:
                self._fail(self._number(trial))
        if holder is None or not _is_running(holder, key, self._tuner):
            return False
        self._claims[key] = (self._number(holder), schedule)
        self._record_heartbeat(self._number(holder))
        return True

    def _finish(self, key: str, line: dict[str, Any]) -> bool:
        """False if the claim was lost and another tuner has the schedule."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        state, values = (TrialState.COMPLETE, [line["time_us"]]) if line["state"] == "ok" else (TrialState.PRUNED, None)
        while True:
            trial, schedule = self._claims[key]
            try:
                self._storage.set_trial_user_attr(trial, RECORD, line)
                self._storage.set_trial_state_values(trial, state, values)
            except UpdateFinishedTrialError:
                # Either an earlier attempt succeeded and its answer was lost, or this tuner was suspended for so long
                # that it counted as dead.
                if self._storage.get_trial(trial).state != TrialState.FAIL:
                    return True
                if not self._claim(key, schedule):
                    return False
            else:
                return True

    def _fail(self, trial: int) -> None:
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        with contextlib.suppress(UpdateFinishedTrialError):
            self._storage.set_trial_state_values(trial, TrialState.FAIL)

    def _running(self, key: str, schedule: Knobs | None) -> optuna.trial.FrozenTrial:
        import optuna

        values = self._space.values(schedule) if schedule is not None else None
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=values or {},
            distributions=distributions(self._space) if values else {},
            user_attrs={KEY: key, TUNER: self._tuner},
        )

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return self._storage.get_all_trials(self._id, deepcopy=False)

    def _number(self, trial: optuna.trial.FrozenTrial) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, trial.number)

    def _rivals(self) -> set[str]:
        """Keys that other tuners have claimed."""
        self._reaped = 0.0
        running = [trial for trial in self._reap_and_read() if _is_running(trial)]
        return {str(trial.user_attrs.get(KEY)) for trial in running if trial.user_attrs[TUNER] != self._tuner}

    def _reap_and_read(self) -> list[optuna.trial.FrozenTrial]:
        if time.monotonic() - self._reaped >= HEARTBEAT_S:
            self._reap()
            self._reaped = time.monotonic()
        return self._trials()

    def _reap(self) -> None:
        """Fail trials without a recent heartbeat, and give a first heartbeat to old trials that never had one.

        Optuna never fails a trial without any heartbeat, as a tuner killed right after its claim leaves it.
        """
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.storages.fail_stale_trials(self._study)
        old = datetime.now() - timedelta(seconds=2 * GRACE_S)
        for trial in self._trials():
            met = trial.number in self._met or trial.datetime_start is None or trial.datetime_start > old
            if _is_running(trial) and not met:
                self._record_heartbeat(self._number(trial))
                self._met.add(trial.number)

    def _beat(self) -> None:
        while not self._end.wait(HEARTBEAT_S):
            for trial, _ in list(self._claims.values()):
                # The tuner itself notices and reports that the storage does not answer.
                with contextlib.suppress(Exception):
                    self._record_heartbeat(trial)

    def _record_heartbeat(self, trial: int) -> None:
        if self._server is not None:
            self._server.record_heartbeat(trial)


def open_claims(
    path: Path | None,
    sharing: Sharing,
    storage: str | optuna.storages.BaseStorage | None,
    name: str,
    space: Space,
) -> Claims:
    """The claims of the study with this trial file, and this name in a storage; without a file, a simulation's."""
    if path is None:
        return Claims()
    folder = FolderClaims(path, alone=sharing == "alone")
    if sharing != "storage":
        return folder
    if storage is None:
        raise StudyError(f"{name} is to be shared through an Optuna storage, and none was given; name its URL")
    try:
        return Shared(folder, storage, name, space)
    except BaseException:
        folder.close()
        raise


def _holder(trials: Iterable[optuna.trial.FrozenTrial], key: str) -> optuna.trial.FrozenTrial | None:
    """The trial that holds a schedule: the first that is running or finished."""
    having = (t for t in trials if t.user_attrs.get(KEY) == key and (_has_record(t) or _is_running(t)))
    return min(having, key=lambda trial: trial.number, default=None)


def _has_record(trial: optuna.trial.FrozenTrial) -> bool:
    return trial.state.name in ("COMPLETE", "PRUNED") and RECORD in trial.user_attrs


def _is_running(trial: optuna.trial.FrozenTrial, key: str | None = None, tuner: str | None = None) -> bool:
    """Whether the trial is a valid claim, of this schedule and this tuner if given."""
    own = trial.user_attrs
    wanted = key in (None, own.get(KEY)) and tuner in (None, own.get(TUNER))
    return trial.state.name == "RUNNING" and TUNER in own and wanted
