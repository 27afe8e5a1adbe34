"""Schedules of the kernels of spherical harmonics: their knobs as frozen data, for CUDA and for the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kernelgen.schedule.knobs import Knobs, read_schedule


@dataclass(frozen=True)
class HarmonicsSchedule(Knobs):
    """What the schedules of both backends share."""


@dataclass(frozen=True)
class HarmonicsCudaSchedule(HarmonicsSchedule):
    """Knobs of a CUDA kernel, where a thread has one vector.

    block_size: threads, and so vectors, of a block. min_blocks: blocks a multiprocessor that registers are limited for
    (0: no limit).
    staging: how rows of dim_out elements are read and written. ``none``: each thread its own row, element by element.
    ``vectors``: all of a block's rows, which lie together, pass through shared memory, where a row has an odd number of
    elements; neighbouring threads copy neighbouring 16 bytes.
    ``ahead``: no more blocks than fit at once (``min_blocks`` a multiprocessor, or as many as shared memory and threads
    allow), whose warps go through tiles of 32 rows, all of them read asynchronously and written together.
    stages: tiles that a warp has in flight, with ``ahead``.
    """

    block_size: int = 128
    staging: str = "vectors"
    min_blocks: int = 0
    stages: int = 1

    backend: ClassVar[str] = "cuda"
    choices: ClassVar[dict[str, tuple]] = {
        "block_size": (32, 64, 128, 256, 512),
        "staging": ("none", "vectors", "ahead"),
        "min_blocks": (0, 1, 2, 3, 4, 6, 8, 12, 16),
        "stages": (1, 2, 3, 4),
    }


@dataclass(frozen=True)
class HarmonicsHostSchedule(HarmonicsSchedule):
    """Knobs of a host C++ kernel.

    block_size: vectors that are worked on together, component by component in machine vectors.
    threads: OpenMP threads, 0 for as many as torch uses.
    """

    block_size: int = 32
    threads: int = 0

    backend: ClassVar[str] = "cpu"
    choices: ClassVar[dict[str, tuple]] = {
        "block_size": (16, 32, 64, 128, 256),
        "threads": tuple(range(0, 257)),
    }


HARMONICS_SCHEDULES: dict[str, type[HarmonicsSchedule]] = {"cuda": HarmonicsCudaSchedule, "cpu": HarmonicsHostSchedule}


def harmonics_schedule_from_dict(data: Mapping[str, Any]) -> HarmonicsSchedule:
    """The schedule written by ``to_dict``; ScheduleError for an unknown backend, knob or value."""
    return read_schedule(data, HARMONICS_SCHEDULES)
