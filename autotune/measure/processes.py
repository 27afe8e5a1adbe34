"""End processes that outlive their parent: leftover compilers disturb timings, leftover workers hold devices."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from pathlib import Path

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
    # Left behind at the end of this process: it only waits, in no C++.
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
