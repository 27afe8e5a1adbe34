"""The schedule of a product with harmonics of edge vectors: where the harmonics are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kernelgen.schedule.knobs import Knobs, read_schedule


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


def vector_schedule_from_dict(data: Mapping[str, Any]) -> VectorSchedule:
    """The schedule written by ``to_dict``; ScheduleError for an unknown backend, knob or value."""
    return read_schedule(data, VECTOR_SCHEDULES)
