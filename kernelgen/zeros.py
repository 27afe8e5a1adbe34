"""Where the kernels of a stream that write their own zeros say that these are there (see ``include/zeros.hpp``).

Each stream has its own words, since kernels of one stream run one after the other. A launch is known by its number, so
nothing has to be cleared in between. A captured graph may be replayed on any stream, under the numbers of its capture:
each of its launches has words of its own, which the graph clears.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

# CU_STREAM_PER_THREAD: one handle, a stream for each thread.
_OF_EACH_THREAD = 2
_launches = itertools.count(1)
_words: dict[tuple[int, int], tuple[Tensor, int]] = {}


class Launch(NamedTuple):
    """words: must live until the launch is queued; ``address``: where they are; ``number``: of no other launch."""

    words: Tensor
    address: int
    number: int


def next_launch(device: int) -> Launch:
    """For a launch on the current stream of ``device``, which is the current device."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    if stream == _OF_EACH_THREAD or torch._C._cuda_isCurrentStreamCapturing():
        return Launch(*_fresh(device), next(_launches))
    found = _words.get((device, stream))
    if found is None:
        found = _words.setdefault((device, stream), _fresh(device))
    return Launch(*found, next(_launches))


def _fresh(device: int) -> tuple[Tensor, int]:
    words = torch.zeros(2, dtype=torch.int64, device=f"cuda:{device}")
    return words, words.data_ptr()
