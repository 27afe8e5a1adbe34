"""Schedules of kernels of spherical harmonics, for CUDA and for the host; and where a product computes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kernelgen.kernels.knobs import Knobs, read_schedule


@dataclass(frozen=True)
class HarmonicsSchedule(Knobs):
    """Base of the schedules of both backends."""


@dataclass(frozen=True)
class HarmonicsCudaSchedule(HarmonicsSchedule):
    """Knobs of a CUDA kernel with one vector a thread.

    block_size: threads, and so vectors, of a block. min_blocks: registers are limited so that this many blocks fit on a
    multiprocessor (0: no limit).
    staging: how rows of dim_out elements are read and written. ``none``: each thread accesses its own row, element by
    element. ``vectors``: a block's rows, which are contiguous, pass through shared memory, padded to an odd number of
    elements; neighbouring threads copy neighbouring 16 bytes. ``ahead``: the grid has only as many blocks as run at
    once (``min_blocks`` a multiprocessor, or as many as shared memory and threads allow). Their warps loop over tiles
    of 32 rows, read asynchronously and written together.
    stages: tiles in flight a warp, with ``ahead``.
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

    @property
    def canonical(self) -> HarmonicsCudaSchedule:
        return self if self.staging == "ahead" else dataclasses.replace(self, stages=HarmonicsCudaSchedule.stages)


@dataclass(frozen=True)
class HarmonicsHostSchedule(HarmonicsSchedule):
    """Knobs of a host C++ kernel.

    block_size: vectors computed together, component by component, with SIMD instructions.
    threads: most OpenMP threads, never more than torch's number; 0: by the amount of work, at most torch's number.
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


# The schedule of a product with harmonics of edge vectors: where the harmonics are computed.


@dataclass(frozen=True)
class VectorSchedule(Knobs):
    """harmonics: computed ``inside`` the product's kernel, or ``apart``, by separate kernels before and after it.

    ``unfused``: apart, and also gather, product and sum at nodes are separate steps.
    """

    harmonics: str = "inside"

    choices: ClassVar[dict[str, tuple]] = {"harmonics": ("inside", "apart", "unfused")}


@dataclass(frozen=True)
class VectorCudaSchedule(VectorSchedule):
    backend: ClassVar[str] = "cuda"


@dataclass(frozen=True)
class VectorHostSchedule(VectorSchedule):
    backend: ClassVar[str] = "cpu"


VECTOR_SCHEDULES: dict[str, type[VectorSchedule]] = {"cuda": VectorCudaSchedule, "cpu": VectorHostSchedule}
