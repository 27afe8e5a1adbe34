"""Locks that end with their process, however it ends: nothing is left behind that somebody has to judge stale.

A file enters; numbers (bytes of it, which need not exist) can be locked through it, each as a lock of its own. They
are the system's locks of open files: a SIGKILL releases them, a process that is started takes none over.
"""

from __future__ import annotations

import fcntl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# struct flock of Linux: type, whence, start, length, process (0 for a lock of an open file).
FLOCK = "hhqqi"


class Locks:
    """Those of one user; two of a process exclude each other as two processes do."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        """Let all go."""
        self._file.close()

    def take(self, number: int) -> bool:
        """For this user alone; False if another has it."""
        return self._try(fcntl.F_WRLCK, number)

    def share(self, number: int) -> bool:
        """Together with others who share it; False if one took it for itself."""
        return self._try(fcntl.F_RDLCK, number)

    def let_go(self, number: int) -> None:
        self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, number, 1)

    @contextmanager
    def held(self, number: int) -> Iterator[None]:
        """Take, after waiting for others."""
        self._call(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, number, 1)
        try:
            yield
        finally:
            self.let_go(number)

    def taken_elsewhere(self, first: int) -> bool:
        """Does another have any lock from this number on?"""
        answer = self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, first, 0)
        return struct.unpack(FLOCK, answer)[0] != fcntl.F_UNLCK

    def _try(self, kind: int, number: int) -> bool:
        try:
            self._call(fcntl.F_OFD_SETLK, kind, number, 1)
        except BlockingIOError:
            return False
        return True

    def _call(self, command: int, kind: int, start: int, length: int) -> bytes:
        return fcntl.fcntl(self._file, command, struct.pack(FLOCK, kind, 0, start, length, 0))
