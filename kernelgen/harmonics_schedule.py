"""Schedules of the kernels of spherical harmonics: their knobs as frozen data, with a default for each device.

A schedule holds numbers and names only. What depends on the problem as well (shared memory) is checked by
:func:`kernelgen.harmonics_plan.harmonics_plan`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kernelgen.errors import ScheduleError


@dataclass(frozen=True)
class HarmonicsSchedule:
    """What the schedules of both backends share: ``choices`` are the legal values of each knob."""

    backend: ClassVar[str] = ""
    choices: ClassVar[dict[str, tuple]] = {}

    def __post_init__(self) -> None:
        for name, allowed in self.choices.items():
            value = getattr(self, name)
            if not any(value == a and type(value) is type(a) for a in allowed):
                shown = f"{allowed[0]}..{allowed[-1]}" if len(allowed) > 12 else allowed
                raise ScheduleError(f"{type(self).__name__}.{name} is {value!r}; expected one of {shown}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the backend's name; :func:`harmonics_schedule_from_dict` reads it back."""
        return {"backend": self.backend, **dataclasses.asdict(self)}

    @property
    def key(self) -> str:
        """Stable one-line text, equal for equal schedules."""
        return self.backend + ":" + ",".join(f"{k}={v}" for k, v in dataclasses.asdict(self).items())


@dataclass(frozen=True)
class HarmonicsCudaSchedule(HarmonicsSchedule):
    """Knobs of a CUDA kernel, where a thread has one vector.

    block_size: threads, and so vectors, of a block. min_blocks: blocks a multiprocessor that registers are limited for
    (0: no limit).
    staging: how rows of dim_out elements are read and written. ``none``: each thread its own row, element by element.
    ``words``: all of a block's rows, which lie together, pass through shared memory, where a row has an odd number of
    elements; neighbouring threads copy neighbouring elements. ``vectors``: the same, 16 bytes a thread at a time.
    """

    block_size: int = 128
    staging: str = "words"
    min_blocks: int = 0

    backend: ClassVar[str] = "cuda"
    choices: ClassVar[dict[str, tuple]] = {
        "block_size": (32, 64, 128, 256, 512),
        "staging": ("none", "words", "vectors"),
        "min_blocks": (0, 1, 2, 3, 4, 6, 8, 12, 16),
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
    knobs = dict(data)
    backend = knobs.pop("backend", None)
    if backend not in HARMONICS_SCHEDULES:
        raise ScheduleError(f"schedule backend is {backend!r}; expected one of {tuple(HARMONICS_SCHEDULES)}")
    kind = HARMONICS_SCHEDULES[backend]
    known = [field.name for field in dataclasses.fields(kind)]
    for name in knobs:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ScheduleError(
                f"unknown knob {name!r} of harmonics for {backend}; "
                + (f"did you mean {near[0]!r}?" if near else f"expected one of {tuple(known)}")
            )
    return kind(**knobs)
