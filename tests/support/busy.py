"""Other work on this machine: processes that keep cores busy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spinning(count: int | None = None) -> Iterator[None]:
    """Within the block, so many processes compute without end; by default one for each core that this one may use."""
    command = [sys.executable, "-Sc", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(count or len(os.sched_getaffinity(0)))]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
