"""The plan of a kernel of spherical harmonics: a :class:`HarmonicsSpec` enters, a legal :class:`HarmonicsPlan` leaves.

Directions, with v the vectors [rows, 3], Y their harmonics [rows, dim_out], g cotangents of Y and t tangents of v:

    forward           Y                                              reads v
    backward          grad sum_i g_i Y_i                             reads v and g
    double_backward   x: Hessian(sum_i g_i Y_i) t,  g: t . grad Y_i  reads v, t and, for x, g

A kernel has the arguments of all kernels (``kernelgen.spec.BUFFERS``): v is ``x``, t is ``tx``, what is made for v is
``out_x``, and Y and what is made for g are ``out_g``. Every element of an output is written.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.harmonics import HarmonicsProblem, harmonics_body
from kernelgen.harmonics_schedule import HarmonicsCudaSchedule, HarmonicsHostSchedule, HarmonicsSchedule
from kernelgen.spec import BYTES
from kernelgen.statements import Body


@dataclass(frozen=True)
class HarmonicsDirection:
    """``name`` of the direction; ``outputs``: what it makes, of ``x`` (for v) and ``g`` (Y, or for its cotangent)."""

    name: str
    outputs: str

    @property
    def text(self) -> str:
        return f"harmonics {self.name} -> {' '.join(self.outputs)}"


FORWARD = HarmonicsDirection("forward", "g")
BACKWARD = HarmonicsDirection("backward", "x")
DOUBLE_BACKWARD = {outputs: HarmonicsDirection("double_backward", outputs) for outputs in ("xg", "x", "g")}
# By name, each with all of its outputs.
HARMONICS_DIRECTIONS = {d.name: d for d in (FORWARD, BACKWARD, DOUBLE_BACKWARD["xg"])}


@dataclass(frozen=True)
class HarmonicsSpec:
    """All that determines one kernel's source. dtype: ``float32`` or ``float64``. facts: the device compiled for."""

    problem: HarmonicsProblem
    direction: HarmonicsDirection
    schedule: HarmonicsSchedule
    dtype: str
    facts: DeviceFacts

    def __post_init__(self) -> None:
        if self.dtype not in BYTES:
            raise ScheduleError(f"dtype is {self.dtype!r}; expected one of {tuple(BYTES)}")
        if self.schedule.backend != self.facts.backend:
            raise ScheduleError(f"a {self.schedule.backend or 'plain'} schedule cannot run on {self.facts.name}")


@dataclass(frozen=True)
class HarmonicsPlan:
    """The statements for one vector, and where its rows of dim_out elements are.

    stride: elements from one row to the next where the statements find them. staged: rows of those outputs and
    operands (``g`` read, ``out_g`` written) lie in shared memory, ``shared_bytes`` for a block.
    """

    spec: HarmonicsSpec
    body: Body
    stride: int
    staged: tuple[str, ...] = ()
    shared_bytes: int = 0
    # As in the plan of a product: nothing is summed over edges, and every output is written.
    zeroed: frozenset[str] = frozenset()
    owner: str = ""
    partial_y: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.spec.facts.backend == "cuda"

    @property
    def block_size(self) -> int:
        schedule = self.spec.schedule
        assert isinstance(schedule, HarmonicsCudaSchedule | HarmonicsHostSchedule)
        return schedule.block_size


@functools.lru_cache(maxsize=1024)
def _body(problem: HarmonicsProblem, direction: HarmonicsDirection) -> Body:
    return harmonics_body(problem, direction.name, direction.outputs)


def rows_of(direction: HarmonicsDirection, body: Body) -> tuple[str, ...]:
    """Which rows of dim_out elements a kernel reads (``g``) and writes (``out_g``)."""
    reads = [name for name in body.reads if name.startswith("g_")]
    return (*["g"] * bool(reads), *["out_g"] * ("g" in direction.outputs))


def harmonics_plan(spec: HarmonicsSpec) -> HarmonicsPlan:
    """The plan of a spec; ScheduleError with the broken limit."""
    body, dim, schedule, facts = _body(spec.problem, spec.direction), spec.problem.dim_out, spec.schedule, spec.facts
    if isinstance(schedule, HarmonicsHostSchedule):
        facts.check_cores(schedule.threads)
        return HarmonicsPlan(spec, body, schedule.block_size)
    assert isinstance(schedule, HarmonicsCudaSchedule)
    facts.check_threads(schedule.block_size, schedule.min_blocks)
    if schedule.staging == "none":
        return HarmonicsPlan(spec, body, dim)
    staged, stride = rows_of(spec.direction, body), dim | 1
    shared = len(staged) * schedule.block_size * stride * BYTES[spec.dtype]
    if shared > facts.shared_per_block:
        raise ScheduleError(
            f"block_size={schedule.block_size} with staging={schedule.staging!r} needs {shared} bytes of shared "
            f"memory; there are {facts.shared_per_block}: take smaller blocks or staging='none'"
        )
    return HarmonicsPlan(spec, body, stride, staged, shared)


def default_harmonics_schedule(
    problem: HarmonicsProblem, direction: HarmonicsDirection, dtype: str, facts: DeviceFacts
) -> HarmonicsSchedule:
    """A legal schedule from simple facts, never searched.

    CUDA: staged rows in blocks that leave room for at least two on a multiprocessor, or fewer threads if need be.
    """
    if facts.backend == "cpu":
        return HarmonicsHostSchedule()
    for block_size in (128, 64, 32):
        schedule = HarmonicsCudaSchedule(block_size=block_size)
        spec = HarmonicsSpec(problem, direction, schedule, dtype, facts)
        try:
            if 2 * harmonics_plan(spec).shared_bytes <= facts.shared_per_unit:
                return schedule
        except ScheduleError:
            continue
    return HarmonicsCudaSchedule(staging="none")
