"""A disposable process that holds a session and answers: it may crash, hang or lose its device, and the caller goes on.

The ``open()`` of a picklable setting runs in the new process and returns the session: any object. A job is a method of
it with arguments, ``worker.ask(limit_s, TrialSession.measure, job)``; all are picklable, and so is the answer. If the
process ends (by a signal or a time limit), the caller gets :class:`WorkerLost` with the reason, and the next job gets a
new process.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import context, popen_forkserver, reduction, spawn
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize, close_fds  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from autotune.errors import StudyError, WorkerError
from kernelgen.errors import EquituneError, InputError

START_LIMIT_S = 600.0
IDLE_EXIT_S = 5.0
Given = ParamSpec("Given")
Answered = TypeVar("Answered")


class Setting(Protocol):
    """What a worker keeps between jobs; picklable, and opened in the worker's process."""

    def open(self) -> Any:
        """The session."""


class WorkerLost(WorkerError):
    """The process ended before it answered; ``state`` is ``timeout`` or ``crashed``."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason


class Worker:
    """One process at a time, started by the first job after construction, loss or :meth:`close`."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.starts = setting, 0
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

    def ask(
        self,
        limit_s: float,
        method: Callable[Concatenate[Any, Given], Answered],
        *given: Given.args,
        **named: Given.kwargs,
    ) -> Answered:
        """What a method of the session, or a function of it, answers within ``limit_s`` seconds.

        Raises WorkerLost, or WorkerError if the set-up failed or the method raised.
        """
        if self._busy and not self._pending:
            self.close()  # an earlier call was interrupted: its answer, still to come, would be taken for this one's
        connection = self._ready()
        self._busy = True
        try:
            connection.send((method, given, named))
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
            started = descendants(self._process.pid or 0) if self._process.is_alive() else []
            self._process.kill()
            end(started)
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
            self.close()  # as in ask
            return
        self._pending, self._busy = self._pending + 1, True
        try:
            self._connection.send((None, (setting,), {}))
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
                self._receive(connection, START_LIMIT_S)
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
    end_with_parent()
    # A caller that is done closes the connection, even with unread answers.
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            session = setting.open()
            connection.send((False, None))
            while True:
                method, given, named = connection.recv()
                if method is None:
                    # The last session's memory must be free before the next one is opened.
                    del session
                    gc.collect()
                    session = given[0].open()
                connection.send((False, None if method is None else method(session, *given, **named)))
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            connection.send((True, f"{type(error).__name__}: {error}"))


# End processes that outlive their parent: leftover compilers disturb timings, leftover workers hold devices.

# Python's resource tracker, shared by children: it cleans up after them and ends by itself.
_SPARED = b"multiprocessing.resource_tracker"


def descendants(pid: int) -> list[int]:
    """Living descendants of process ``pid``; none without ``/proc``."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in parentheses, may contain anything; state and parent follow it.
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found, waiting = [], [pid]
    while waiting:
        started = children.get(waiting.pop(), [])
        found += started
        waiting += started
    return found


def end(pids: list[int]) -> None:
    """Kill those that still live."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if _SPARED not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def end_with_parent() -> None:
    """Make this process end when its parent does, even inside a kernel that hangs.

    A killed parent cannot end its children itself.
    """

    def follow(parent: BaseProcess) -> None:
        parent.join()
        os._exit(1)

    if (parent := multiprocessing.parent_process()) is not None:
        # Left behind at the end of this process: it only waits, in no C++.
        threading.Thread(target=follow, args=(parent,), daemon=True).start()


# Run a function on several devices of one host, with one process per device.
#
# The function's files on the disk are the result. Ctrl-C is forwarded once to each process. A process that dies loses
# only its current work.

FAILED = 2


def devices_named(text: str, resolve: Callable[[str], str]) -> list[str]:
    """Devices from ``all`` (GPUs), ``0,1`` or ``cpu,cpu``; ``resolve`` rejects missing ones."""
    import torch

    if text.strip() == "all":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise InputError("--devices all: torch sees no CUDA device; expected GPUs, or devices by name: cpu,cpu")
        return [f"cuda:{index}" for index in range(count)]
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InputError(
            f"--devices is {text!r}; expected all, numbers of GPUs (0,1), or names (cuda:0,cuda:1 or cpu,cpu)"
        )
    devices = [resolve(f"cuda:{name}" if name.isdecimal() else name) for name in names]
    if len({device.split(":")[0] for device in devices}) > 1:
        raise InputError(f"--devices is {text!r}; expected GPUs or the CPU, not both: they share no studies")
    twice = sorted({device for device in devices if devices.count(device) > 1} - {"cpu"})
    if twice:
        raise InputError(
            f"--devices names {', '.join(twice)} twice; expected each GPU once: "
            "two tuners on one GPU disturb each other's times"
        )
    return devices


def names_of(devices: Sequence[str]) -> list[str]:
    """Unique names of the devices' processes."""
    return [device if devices.count(device) == 1 else f"{device} {n}" for n, device in enumerate(devices, 1)]


def on_each(devices: Sequence[str], what: str, work: Callable[..., None], *arguments: Any) -> None:
    """Start one process per device, which calls ``work(device, name, *arguments)``. ``what``: its noun in messages.

    Each sees only its own GPU, as cuda:0, because some libraries always use the first GPU.
    Returns when all have ended. Raises KeyboardInterrupt if the user ended them, StudyError if one failed.
    """
    if devices.count("cpu") > 1:
        print(
            f"note: a {what} beside another on one CPU disturbs its timings; compare nothing with them", file=sys.stderr
        )
    # Not daemons, because they start processes themselves.
    started = {
        name: CONTEXT.Process(target=_work, args=(work, device, name, arguments))
        for name, device in zip(names_of(devices), devices, strict=True)
    }
    for process in started.values():
        process.start()
    interrupted = False
    for process in started.values():
        while process.is_alive():
            try:
                process.join()
            except KeyboardInterrupt:
                interrupted = True
                for other in started.values():
                    if other.is_alive() and other.pid is not None:
                        os.kill(other.pid, signal.SIGINT)
    lost = [f"the {what} on {name} {_end(process)}" for name, process in started.items() if process.exitcode]
    if lost:
        raise StudyError(f"{'; '.join(lost)}. Finished work is kept; to continue, run the same command again")
    if interrupted:
        raise KeyboardInterrupt


def _end(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed (exit code {code}, see above)"


def _work(work: Callable[..., None], device: str, name: str, arguments: tuple[Any, ...]) -> None:
    # A new process group: the terminal's Ctrl-C reaches the parent alone, which forwards it once.
    os.setpgrp()
    end_with_parent()
    warnings.showwarning = lambda message, *_, **__: print(f"[{name}] warning: {message}", file=sys.stderr)
    try:
        work(_alone(device), name, *arguments)
    except EquituneError as error:
        print(f"[{name}] error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(0)


def _alone(device: str) -> str:
    """Hide all other GPUs from this process, which must not have used one yet; returns the device's new name."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return device
    index = number or "0"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(index)].strip() if visible else index
    return "cuda:0"


# Processes that start in a tenth of a second: forked from a server that has imported torch and what a trial needs.
#
# A process that Python spawns imports them anew, for seconds. The server only imports: it runs no kernel, starts no
# threads and never touches a device, so what is forked from it is as good as new. A process gets the caller's
# environment, folder, ``sys.path``, standard output and standard error of the moment when it is started.
#
# In: nothing. Out: :data:`CONTEXT`, used like ``multiprocessing.get_context("spawn")``.

PRELOADED = ("torch._dynamo", "autotune.measure.trial")
# Variables that nothing reads while it is imported. Others may have been read by the server, so a change of one of them
# (OMP_NUM_THREADS, LD_PRELOAD) needs another server.
_READ_LATE = ("EQUITUNE_", "PYTEST_", "CUDA_VISIBLE_DEVICES", "CXX", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")

# Run in the new process before it imports anything of the caller's, thus plain text.
_TAKE_OVER = """
import os
import signal
import sys
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
os.environ.clear()
os.environ.update(environment)
for number, sent in streams:
    descriptor = sent.detach()
    os.dup2(descriptor, number)
    os.close(descriptor)
kernel = sys.modules.get("kernelgen.runtime.kernel")
if kernel is not None:
    kernel.note_fresh()
"""


class _Caller:
    """What a process takes over from its caller; unpickled, it does."""

    def __reduce__(self) -> tuple[Any, ...]:
        streams = []
        for number in (1, 2):
            with contextlib.suppress(OSError):  # a closed one stays the server's
                os.fstat(number)
                streams.append((number, reduction.DupFd(number)))
        return exec, (_TAKE_OVER, {"environment": dict(os.environ), "streams": streams})


class _Servers:
    """The server for the present environment; an earlier one ends with the last process forked from it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: Any = None
        self._imported_under: dict[str, str] = {}
        self._retired: list[int] = []

    def present(self) -> Any:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_READ_LATE)}
        with self._lock:
            if self._server is None or environment != self._imported_under:
                self._retired = [pid for pid in self._retired if not _has_ended(pid)]
                if self._server is not None and self._server._forkserver_pid is not None:
                    # Its processes have this descriptor too; without any it ends.
                    os.close(self._server._forkserver_alive_fd)
                    self._retired.append(self._server._forkserver_pid)
                self._server, self._imported_under = ForkServer(), environment
                self._server.set_forkserver_preload(list(PRELOADED))
            # The server keeps this mask: a Ctrl-C, which reaches it too, must not end it while it imports.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._server.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return self._server


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


_servers = _Servers()


def launch_server() -> None:
    """Have the server import what workers need while the caller goes on; the first worker would wait for it."""
    _servers.present()


class _Popen(popen_forkserver.Popen):
    """As the standard library's, but from our own server: another may have imported anything."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            # A key that ``spawn.prepare`` ignores, in what is unpickled first.
            reduction.dump({"caller": _Caller(), **spawn.get_preparation_data(process_obj._name)}, data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, written = _servers.present().connect_to_new_process(self._fds)
        self.finalizer = Finalize(self, close_fds, (os.dup(written), self.sentinel))
        with open(written, "wb", closefd=True) as file:
            file.write(data.getbuffer())
        try:
            # The first call waits until the server has imported.
            self.pid = read_signed(self.sentinel)
        except EOFError:
            names = ", ".join(PRELOADED)
            raise WorkerError(
                f"the process that worker processes are forked from ended while it imported {names}; "
                "import these in a Python of your own to see why"
            ) from None


class _Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


class _Context(context.ForkServerContext):
    Process = _Process


CONTEXT = _Context()
