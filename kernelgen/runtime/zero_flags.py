"""Where the kernels of a stream that write their own zeros say that these are there (see ``include/zero_outputs.hpp``).

Each stream has its own lines, since kernels of one stream run one after the other. A launch is known by its number, so
nothing has to be cleared in between. A captured graph may be replayed on any stream, under the numbers of its capture:
each of its launches has lines of its own, which the graph clears.

Two streams of one handle at once (an external one that is destroyed with work left, its handle given to the next) would
share lines; torch's own streams live as long as the process.

Lasting lines are the driver's memory, not torch's: whatever pool torch allocates from just then may belong to a graph.
"""

from __future__ import annotations

import itertools
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from kernelgen.runtime.cuda_driver import clean_memory

# CU_STREAM_PER_THREAD: one handle, a stream for each thread.
_OF_EACH_THREAD = 2
# Bytes of one stream's lines (1 + COPIES of them, see the header), and streams that are provided for at a time.
_SPACING, _AT_A_TIME = 128 * 33, 64
_launches = itertools.count(1)
_lock = threading.Lock()
# By device, stream and (where it matters) thread.
_lines: dict[tuple[int, int, int], int] = {}
_unused: dict[int, list[int]] = {}


class Launch(NamedTuple):
    """kept: must live until the launch is queued; ``address``: of the lines; ``number``: of no other launch."""

    kept: Tensor | None
    address: int
    number: int


def next_launch(device: int) -> Launch:
    """For a launch on the current stream of ``device``, which is the current device."""
    if torch._C._cuda_isCurrentStreamCapturing():
        lines = _cleared_in_the_graph(device)
        return Launch(lines, lines.data_ptr(), next(_launches))
    stream = torch._C._cuda_getCurrentRawStream(device)
    key = (device, stream, threading.get_ident() if stream == _OF_EACH_THREAD else 0)
    address = _lines.get(key)
    return Launch(None, _lines_of(key) if address is None else address, next(_launches))


def _cleared_in_the_graph(device: int) -> Tensor:
    return torch.zeros(_SPACING // 8, dtype=torch.int64, device=f"cuda:{device}")


def _lines_of(key: tuple[int, int, int]) -> int:
    with _lock:
        if key not in _lines:
            unused = _unused.setdefault(key[0], [])
            if not unused:
                first = clean_memory(key[0], _SPACING * _AT_A_TIME)
                unused += range(first, first + _SPACING * _AT_A_TIME, _SPACING)
            _lines[key] = unused.pop()
        return _lines[key]
