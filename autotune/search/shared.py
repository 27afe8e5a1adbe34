"""Claims of the tuners of one study: each schedule is measured by one tuner, and all read every finished record.

:class:`FolderClaims` connects the tuners of one results folder, through its trial file and locks that end with their
process. A tuner that works alone takes the same steps, which cost microseconds, and locks others out.
``autotune.search.shared`` connects several hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import struct
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from autotune.database import trials as trial_records
from autotune.errors import StudyError
from autotune.measure.space import Space
from autotune.search.samplers import KEY, RECORD, distributions, making, sqlite_file
from autotune.workload.objective import Objective
from kernelgen.kernels.knobs import Knobs

if TYPE_CHECKING:
    import optuna

# Who may share a study: nobody; tuners of the same results folder; all that name the same Optuna storage.
Sharing = Literal["alone", "folder", "storage"]
# Other claims than schedules: the comparison that publishes a workload's winners, and the copy to the Optuna storage.
COMPARISON, COPY = "comparison", "copy"
# Lock numbers of a study: taking part, writing its file, copying it; claims that use the device have higher numbers.
PART, WRITING, COPYING, CLAIMS = range(4)


class Claims:
    """Claims of a simulated search: no other tuners, and nothing is stored."""

    # Number of records so far, those of other generator versions included.
    count = 0

    def news(self) -> list[dict[str, Any]]:
        """Records not returned before: at first all, later those finished meanwhile by any tuner."""
        return []

    def claim(self, key: str, schedule: Knobs | None = None) -> bool:
        """Claim a schedule (or what else the key stands for); False if another tuner has it."""
        return True

    def let_go(self, key: str) -> None:
        """Release a claim without a result."""

    def finish(self, key: str, line: dict[str, Any]) -> dict[str, Any]:
        """Store the record of a claimed schedule durably; returns it as stored, with its number."""
        line = {**line, "number": self.count}
        self.count += 1
        return line

    def amend(self, line: dict[str, Any]) -> None:
        """Store a finished trial's record again, with more in it, in the file alone."""

    def contribute(self, key: str, schedule: Knobs, line: dict[str, Any]) -> None:
        """Share a record of an earlier run that others may not have."""

    def others_at_work(self, wait: bool = False, comparing: bool = False) -> bool:
        """Whether another tuner is measuring or comparing. ``wait``: if this is uncertain, wait until it is certain.

        A claimed comparison counts as certain unless ``comparing``.
        """
        return False

    def close(self) -> None:
        """Leave the study; this tuner's claims end."""


class FolderClaims(Claims):
    """Claims of tuners that share a results folder, or of one that works there ``alone``."""

    def __init__(self, path: Path, alone: bool) -> None:
        self.path = path
        # Kept with the Optuna storage and not among the results.
        self._locks = Locks(path.parents[2] / "studies" / f"{path.parent.name}-{path.stem}.lock")
        self._offset, self._unread, self._known = 0, list[dict[str, Any]](), set[tuple[str, str]]()
        self._begun = False
        if not self._locks.take(PART, shared=not alone):
            self._locks.close()
            what = "another process is tuning" if alone else "a tuner without --shared is tuning"
            raise StudyError(
                f"{what} {path}; wait for it, choose another results folder, or start all tuners of this one with "
                "--shared (those of several GPUs with --devices)"
            )

    def close(self) -> None:
        self._locks.close()

    def news(self) -> list[dict[str, Any]]:
        self._catch_up()
        lines, self._unread = self._unread, []
        return lines

    def claim(self, key: str, schedule: Knobs | None = None) -> bool:
        return self._locks.take(_number(key))

    def let_go(self, key: str) -> None:
        self._locks.let_go(_number(key))

    def finish(self, key: str, line: dict[str, Any]) -> dict[str, Any]:
        """End the claim after the record is on the disk, so that the next tuner to claim it finds the record."""
        line = self.kept(line)
        self.let_go(key)
        return line

    def kept(self, line: dict[str, Any]) -> dict[str, Any]:
        """The record as stored in the file."""
        self.keep([line])
        return next(
            (known for known in self._unread if trial_records.identity(known) == trial_records.identity(line)), line
        )

    def keep(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append the records that the file lacks."""
        with self._locks.held(WRITING):
            self._catch_up()
            for line in lines:
                if trial_records.identity(line) not in self._known:
                    trial_records.append(self.path, {**line, "number": self.count})
                    self._catch_up()

    def amend(self, line: dict[str, Any]) -> None:
        with self._locks.held(WRITING):
            self._catch_up()
            trial_records.append(self.path, {**line, trial_records.AMENDS: True})

    def others_at_work(self, wait: bool = False, comparing: bool = False) -> bool:
        return self._locks.taken_elsewhere(CLAIMS)

    def _catch_up(self) -> None:
        lines, self._offset = trial_records.read_from(self.path, self._offset)
        known = {trial_records.identity(line) for line in lines}
        if not self._begun:
            packed, self._begun = trial_records.packed_only(self.path, known), True
            lines = packed + lines
            known |= {trial_records.identity(line) for line in packed}
        self.count += len(lines)
        self._known |= known
        self._unread += lines


def _number(key: str) -> int:
    """The lock number of a key. A collision is harmless: the two keys just cannot be claimed at the same time."""
    if key == COPY:
        return COPYING
    return CLAIMS + int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")


# struct flock of Linux: type, whence, start, length, process (0 for a lock of an open file).
FLOCK = "hhqqi"


class Locks:
    """The locks of one user, which end with its process, however that ends: there are no stale locks.

    Each number (a byte of the lock file, which need not exist) is a separate lock. They are the system's locks of open
    files: a SIGKILL releases them, child processes do not inherit them, and two objects in one process exclude each
    other as two processes do.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        self._file.close()

    def take(self, number: int, shared: bool = False) -> bool:
        """Take a lock, which excludes all others or those that are not shared; False if another user's excludes it."""
        try:
            self._call(fcntl.F_OFD_SETLK, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, number, 1)
        except BlockingIOError:
            return False
        return True

    def let_go(self, number: int) -> None:
        self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, number, 1)

    @contextmanager
    def held(self, number: int) -> Iterator[None]:
        """Wait for an exclusive lock and hold it during the block."""
        self._call(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, number, 1)
        try:
            yield
        finally:
            self.let_go(number)

    def taken_elsewhere(self, first: int) -> bool:
        """Whether another user has any lock from this number on."""
        answer = self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, first, 0)
        return struct.unpack(FLOCK, answer)[0] != fcntl.F_UNLCK

    def _call(self, command: int, kind: int, start: int, length: int) -> bytes:
        return fcntl.fcntl(self._file, command, struct.pack(FLOCK, kind, 0, start, length, 0))


# How long to wait for a storage that does not answer, and the pause between two tries.
WAIT_S, RETRY_S = 120, 0.5
# Tries before a warning: if two tuners create the tables at once, one fails, and succeeds at the next try.
QUIET_TRIES = 3
T = TypeVar("T")
# One storage per URL and process, because opening it takes longer than a trial, and every study needs it.
_opened: dict[tuple[str, int, int], optuna.storages.RDBStorage] = {}


class Access:
    """Access to an Optuna storage that may be temporarily unavailable, as when its server restarts.

    Messages never show the URL's password. kept_in: the file that holds all measurements, even if the storage fails.
    heartbeat_s, grace_s: as Optuna's ``heartbeat_interval`` and ``grace_period``.
    """

    def __init__(
        self, storage: str | optuna.storages.BaseStorage, kept_in: Path, heartbeat_s: int, grace_s: int
    ) -> None:
        self._storage, self._kept_in, self._beats = storage, kept_in, (heartbeat_s, grace_s)
        self._shown, self._gone = _shown(storage), False

    def open(self) -> optuna.storages.BaseStorage:
        """Open the storage; StudyError at once for an invalid URL."""
        return self.patiently(lambda: _open(self._storage, *self._beats))

    def patiently(self, action: Callable[[], T]) -> T:
        """Run the action, and retry for a while if the storage does not answer."""
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import DBAPIError

        tries, end = 0, time.monotonic() + WAIT_S
        while True:
            try:
                result = action()
            except (StorageInternalError, DBAPIError) as error:
                reason = " ".join(str(error.__cause__ or error).split())[:200]
                self._gone = self._gone or time.monotonic() >= end
                if self._gone:
                    raise StudyError(
                        f"the storage {self._shown} does not answer ({reason}). No measurement is lost: all "
                        f"are in {self._kept_in}. Check that the storage runs, then run the same command again"
                    ) from error
                tries += 1
                if tries == QUIET_TRIES:
                    _tell(f"the storage {self._shown} does not answer ({reason}); waiting up to {WAIT_S} s")
                time.sleep(RETRY_S)
            else:
                if tries >= QUIET_TRIES:
                    _tell(f"the storage {self._shown} answers again")
                return result


def _open(storage: str | optuna.storages.BaseStorage, heartbeat_s: int, grace_s: int) -> optuna.storages.BaseStorage:
    import optuna
    from sqlalchemy.exc import ArgumentError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if not isinstance(storage, str):
        return storage
    if (given := (storage, heartbeat_s, grace_s)) in _opened:
        return _opened[given]
    options = {"connect_args": {"timeout": WAIT_S}} if sqlite_file(storage) else {"pool_pre_ping": True}
    with warnings.catch_warnings(), making(storage):
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            opened = optuna.storages.RDBStorage(storage, options, heartbeat_interval=heartbeat_s, grace_period=grace_s)
        except ImportError as error:
            raise StudyError(
                f"Optuna storage {_shown(storage)} needs a package that is not installed ({error.__cause__ or error}); "
                "for PostgreSQL: pip install 'equitune[postgres]' and postgresql+psycopg://USER@HOST/DATABASE"
            ) from error
        except (ArgumentError, ValueError, RuntimeError) as error:
            raise StudyError(f"Optuna storage {_shown(storage)} cannot be used: {error}") from error
    _opened[given] = opened
    return opened


def _shown(storage: Any) -> str:
    """The storage's URL without its password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    if not isinstance(storage, str):
        return type(storage).__name__
    try:
        return make_url(storage).render_as_string(hide_password=True)
    except ArgumentError:
        return repr(storage)


def _tell(text: str) -> None:
    """Warn, with the time in the text, because Python shows equal warnings only once."""
    warnings.warn(f"{datetime.now(timezone.utc):%H:%M:%S} UTC: {text}", stacklevel=2)


# Share a study among many hosts through an Optuna storage: PostgreSQL, MySQL, or SQLite on one host.
#
# A claim is a running trial, kept alive by heartbeats. Optuna fails the trials of dead tuners, which releases their
# schedules. A finished trial carries its record, which every tuner writes to the trial file of its own results folder,
# so each folder has the whole study. If the storage does not answer, a tuner waits and then ends with an error.
# Everything measured is in its trial file, and reaches the storage with the next run.

# A claim survives GRACE_S after its last heartbeat, longer than a tuner waits for a storage, so that waiting tuners
# keep their claims.
HEARTBEAT_S, GRACE_S = 15, 180
assert GRACE_S > WAIT_S + HEARTBEAT_S
POLL_S = 0.5
# Attribute of a claim: the tuner that has it.
TUNER = "tuner"


class Shared(FolderClaims):
    """One tuner's claims in a study of a storage; its results folder keeps the trials too."""

    def __init__(
        self, path: Path, storage: str | optuna.storages.BaseStorage, name: str, space: Space, objective: Objective
    ) -> None:
        super().__init__(path, alone=False)
        self._space, self._objective, self._tuner = space, objective, uuid.uuid4().hex
        self._access = Access(storage, path, HEARTBEAT_S, GRACE_S)
        try:
            self._join(name)
        except BaseException:
            super().close()
            raise
        self._claims: dict[str, tuple[int, Knobs | None]] = {}
        self._given, self._met, self._reaped = set[int](), set[int](), 0.0
        self._end = threading.Event()
        # May be left behind at the end of a process, since nothing that it calls is C++: see misses._Notes.finish.
        threading.Thread(target=self._beat, daemon=True).start()

    def _join(self, name: str) -> None:
        import optuna

        opened = self._access.open()
        # Only a storage opened by its URL has heartbeats.
        self._server = opened if isinstance(opened, optuna.storages.RDBStorage) else None
        self._storage = optuna.storages.get_storage(opened)
        known: dict[str, Any] = {"study_name": name, "load_if_exists": True, "directions": self._objective.directions}
        self._study = self._access.patiently(lambda: optuna.create_study(storage=self._storage, **known))
        self._id = self._access.patiently(lambda: self._storage.get_study_id_from_name(name))

    def close(self) -> None:
        self._end.set()
        for key in list(self._claims):
            self.let_go(key)
        super().close()

    def news(self) -> list[dict[str, Any]]:
        trials = self._access.patiently(self._reap_and_read)
        new = [trial for trial in trials if trial.number not in self._given and _has_record(trial)]
        if new:
            given = (trial_records.from_storage(trial.user_attrs[RECORD]) for trial in new)
            self.keep(record for record in given if record is not None)
            self._given |= {trial.number for trial in new}
        return super().news()

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
            self.kept(line)
            raise
        self._claims.pop(key, None)
        return self.kept(line) if told else line

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

        values = self._objective.values(line) if line["state"] == "ok" else None
        state = TrialState.COMPLETE if values else TrialState.PRUNED
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
    objective: Objective,
) -> Claims:
    """The claims of the study with this trial file, and this name in a storage; without a file, a simulation's."""
    if path is None:
        return Claims()
    if sharing != "storage":
        return FolderClaims(path, alone=sharing == "alone")
    if storage is None:
        raise StudyError(f"{name} is to be shared through an Optuna storage, and none was given; name its URL")
    return Shared(path, storage, name, space, objective)


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
