"""Flags by which kernels that zero their own outputs signal that the zeros are written (``include/zero_outputs.hpp``).

Flags are memory lines of the device. Each stream has its own, since kernels of one stream run one after the other.
Launches have distinct numbers, so flags need no reset between them. A captured graph may be replayed on any stream,
with the launch numbers of its capture; so each of its launches has its own lines, which the graph clears.

Two streams with the same handle at once (an external stream destroyed with work left, its handle reused) would share
lines; torch's own streams live as long as the process.

The lines of streams are allocated by the driver, because torch's current memory pool may belong to a captured graph.
"""

from __future__ import annotations

import itertools
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from kernelgen.runtime.cuda_driver import clean_memory

# CU_STREAM_PER_THREAD: one handle for a stream of each thread.
_OF_EACH_THREAD = 2
# Bytes of one stream's lines (1 + COPIES of them, see the header), and the number of streams an allocation serves.
_SPACING, _AT_A_TIME = 128 * 33, 64
_launches = itertools.count(1)
_lock = threading.Lock()
# By device, stream and (where it matters) thread.
_lines: dict[tuple[int, int, int], int] = {}
_unused: dict[int, list[int]] = {}


class Launch(NamedTuple):
    """kept: must live until the launch is queued. address: of the lines. number: unique to this launch."""

    kept: Tensor | None
    address: int
    number: int


def next_launch(device: int) -> Launch:
    """The flags for a launch on the current stream of ``device``, which must be the current device."""
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
