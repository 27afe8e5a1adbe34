"""A disposable process that answers jobs: it may crash, hang or lose its device, and the caller continues.

The ``open()`` of a picklable setting runs in the new process and returns the function that answers jobs. Jobs and
answers are picklable values. If the process ends (by a signal or a time limit), the caller gets :class:`WorkerLost`
with the reason, and the next job gets a new process.
"""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from autotune.errors import WorkerError
from autotune.measure import processes
from autotune.measure.fork_server import CONTEXT

START_LIMIT_S = 600.0
IDLE_EXIT_S = 5.0


class Setting(Protocol):
    """What a worker keeps between jobs; picklable, and opened in the worker's process."""

    def open(self) -> Callable[[Any], Any]: ...


@dataclass(frozen=True)
class _Reopen:
    setting: Setting


class WorkerLost(WorkerError):
    """The process ended before it answered; ``state`` is ``timeout`` or ``crashed``."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason


class Worker:
    """One process at a time, started by the first job after construction, loss or :meth:`close`."""

    def __init__(self, setting: Setting, start_limit_s: float = START_LIMIT_S) -> None:
        self.setting = setting
        self.start_limit_s = start_limit_s
        self.starts = 0
        # Number of set-ups requested from the process and not yet confirmed.
        self._pending = 0
        # True until the present process has answered a job: the first job fills caches and may take longer.
        self.fresh = True
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._busy = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, job: Any, limit_s: float) -> Any:
        """The answer to one job. Raises WorkerLost, or WorkerError if the set-up failed or the job raised."""
        if self._busy and not self._pending:
            self.close()  # an earlier call was interrupted: its answer, still to come, would be taken for this one's
        connection = self._ready()
        self._busy = True
        try:
            connection.send(job)
        except (BrokenPipeError, ConnectionResetError):
            raise self._lost() from None
        answer = self._receive(connection, limit_s)
        self.fresh = False
        return answer

    def close(self) -> None:
        """End the process and its children: an idle one ends when its connection closes, a busy one is killed."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            if not self._busy:
                self._process.join(IDLE_EXIT_S)
            started = processes.descendants(self._process.pid or 0) if self._process.is_alive() else []
            self._process.kill()
            processes.end(started)
            self._process.join()
            self._process.close()
        self._process = self._connection = None
        self._pending, self.fresh = 0, True

    def launch(self) -> Connection:
        """Start the process if there is none, without waiting: it sets up while the caller works."""
        if self._connection is None:
            connection, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(theirs, self.setting), daemon=True)
            process.start()
            theirs.close()
            self._connection, self._process = connection, process
            self.starts += 1
            self._pending, self._busy = 1, True
        return self._connection

    def reopen(self, setting: Setting) -> None:
        """Switch to another setting, without waiting. A living process is reused, with what its modules cached."""
        self.setting = setting
        if self._connection is None:
            return
        if self._busy and not self._pending:
            self.close()  # as in call
            return
        self._pending, self._busy = self._pending + 1, True
        try:
            self._connection.send(_Reopen(setting))
        except (BrokenPipeError, ConnectionResetError):
            self.close()

    def settle(self) -> None:
        """Wait until the process, if any, is set up and idle. WorkerError if its set-up failed."""
        if self._connection is not None:
            self._ready()

    def _ready(self) -> Connection:
        connection = self.launch()
        while self._pending:
            try:
                self._receive(connection, self.start_limit_s)
            except WorkerLost as lost:
                # No schedule caused this, so it must not be recorded as a trial's outcome.
                raise WorkerError(f"a worker process could not be set up: {lost.reason}") from None
            self._pending -= 1
        return connection

    def _receive(self, connection: Connection, limit_s: float) -> Any:
        self._busy = True
        try:
            if not connection.poll(limit_s):
                self.close()
                raise WorkerLost("timeout", f"no answer within {limit_s:.0f} s")
            failed, answer = connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._lost() from None
        self._busy = False
        if failed:
            self.close()
            raise WorkerError(answer)
        return answer

    def _lost(self) -> WorkerLost:
        assert self._process is not None
        self._process.join(10.0)
        code = self._process.exitcode
        self.close()
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return WorkerLost("crashed", f"the process was ended by {signal.Signals(-code).name}")
        return WorkerLost("crashed", f"the process ended with exit code {code}")


def _serve(connection: Connection, setting: Setting) -> None:
    # Ctrl-C reaches the whole process group; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.end_with_parent()
    # A caller that is done closes the connection, even with unread answers.
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            answer = setting.open()
            connection.send((False, None))
            while True:
                job = connection.recv()
                if isinstance(job, _Reopen):
                    # The last setting's memory must be free before the next one is opened.
                    del answer
                    gc.collect()
                    answer = job.setting.open()
                    connection.send((False, None))
                else:
                    connection.send((False, answer(job)))
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            connection.send((True, f"{type(error).__name__}: {error}"))
