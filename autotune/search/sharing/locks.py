"""Locks that end with their process, however it ends: there are no stale locks.

Each number (a byte of the lock file, which need not exist) is a separate lock. They are the system's locks of open
files: a SIGKILL releases them, and child processes do not inherit them.
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
    """The locks of one user. Two objects in one process exclude each other as two processes do."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        """Release all locks."""
        self._file.close()

    def take(self, number: int) -> bool:
        """Take an exclusive lock; False if another user has it."""
        return self._try(fcntl.F_WRLCK, number)

    def share(self, number: int) -> bool:
        """Take a shared lock; False if another user holds it exclusively."""
        return self._try(fcntl.F_RDLCK, number)

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

    def _try(self, kind: int, number: int) -> bool:
        try:
            self._call(fcntl.F_OFD_SETLK, kind, number, 1)
        except BlockingIOError:
            return False
        return True

    def _call(self, command: int, kind: int, start: int, length: int) -> bytes:
        return fcntl.fcntl(self._file, command, struct.pack(FLOCK, kind, 0, start, length, 0))
