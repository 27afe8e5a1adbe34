"""Processes that outlive the one that started them: compilers of a compilation that was given up take measured time."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

# Of Python's own, which its children share: it tidies up after them and ends by itself.
_SPARED = b"multiprocessing.resource_tracker"


def descendants(pid: int) -> list[int]:
    """Living processes that ``pid`` started, those that they started, and so on; none where there is no ``/proc``."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in parentheses, may hold anything; state and parent follow it.
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found, waiting = [], [pid]
    while waiting:
        started = children.get(waiting.pop(), [])
        found += started
        waiting += started
    return found


def end(pids: list[int]) -> None:
    """Kill what still lives of them."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if _SPARED not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
