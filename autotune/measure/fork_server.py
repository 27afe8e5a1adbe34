"""Processes that start in a tenth of a second: forked from a server that has imported torch and what a trial needs.

A process that Python spawns imports them anew, for seconds. The server only imports: it runs no kernel, starts no
threads and never touches a device, so what is forked from it is as good as new. A process gets the caller's
environment, folder, ``sys.path``, standard output and standard error of the moment when it is started.

In: nothing. Out: :data:`CONTEXT`, used like ``multiprocessing.get_context("spawn")``.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
from multiprocessing import context, popen_forkserver, reduction, spawn
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.util import Finalize
from typing import Any

from autotune.errors import WorkerError

PRELOADED = ("torch._dynamo", "autotune.measure.trial")
# Variables that nothing reads while it is imported. Others may have been read by the server, so a change of one of them
# (OMP_NUM_THREADS, LD_PRELOAD) needs another server.
_READ_LATE = ("EQUITUNE_", "PYTEST_", "CUDA_VISIBLE_DEVICES", "CXX", "TMPDIR")

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
                self._retire()
                self._server, self._imported_under = ForkServer(), environment
                self._server.set_forkserver_preload(list(PRELOADED))
            # The server keeps this mask: a Ctrl-C, which reaches it too, must not end it while it imports.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._server.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return self._server

    def _retire(self) -> None:
        self._retired = [pid for pid in self._retired if not _has_ended(pid)]
        if self._server is not None and self._server._forkserver_pid is not None:
            # Its processes have this descriptor too; without any it ends.
            os.close(self._server._forkserver_alive_fd)
            self._retired.append(self._server._forkserver_pid)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


_servers = _Servers()


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
        self.finalizer = Finalize(self, _close, (os.dup(written), self.sentinel))
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


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


class _Context(context.ForkServerContext):
    Process = _Process


CONTEXT = _Context()
