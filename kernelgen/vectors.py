"""A product of harmonics of vectors as one problem, and the one knob that it has beyond those of its parts.

``VectorProblem`` and ``VectorSchedule`` are what a tuner stores a decision by; :mod:`kernelgen.fused` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kernelgen.errors import ProblemError
from kernelgen.harmonics import HarmonicsProblem
from kernelgen.problem import TensorProductProblem
from kernelgen.schedule import Knobs, read_schedule

SEPARATOR = ">"


@dataclass(frozen=True)
class VectorProblem:
    """A product whose second input are harmonics of vectors; ProblemError where they do not fit together."""

    product: TensorProductProblem
    harmonics: HarmonicsProblem

    def __post_init__(self) -> None:
        if self.harmonics.dim_out != self.product.dim_in2:
            raise ProblemError(
                f"harmonics of degrees {self.harmonics.degrees} have {self.harmonics.dim_out} components; the second "
                f"input {self.product.irreps_in2} has {self.product.dim_in2}"
            )

    @property
    def key(self) -> str:
        """Stable text, readable by :meth:`from_key`: the keys of both."""
        return f"{self.harmonics.key}{SEPARATOR}{self.product.key}"

    @classmethod
    def from_key(cls, key: str) -> VectorProblem:
        """Inverse of :attr:`key`; ProblemError if the text is not one."""
        harmonics, separator, product = key.partition(SEPARATOR)
        if not separator:
            raise ProblemError(f"{key!r} is not a key of a product of vectors; expected 'sh|...{SEPARATOR}uvu|...'")
        return cls(TensorProductProblem.from_key(product), HarmonicsProblem.from_key(harmonics))


@dataclass(frozen=True)
class VectorSchedule(Knobs):
    """harmonics: ``inside`` the product's kernel, or ``apart``, by kernels of their own before and after it.

    ``unfused``: apart, and the gather, the product and the sum at nodes are steps of their own too.
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
