"""Processes that outlive the one that started them: left compilers take measured time, left workers hold devices."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
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


def end_with_parent() -> None:
    """From now on this process ends when the one that spawned it does, even inside a kernel that hangs.

    A killed process cannot end those that it started.
    """
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
