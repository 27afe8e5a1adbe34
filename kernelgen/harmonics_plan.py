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
    """The statements for one vector, which of ROWS they touch (``live``), and where its rows of dim_out elements are.

    stride: elements from one row to the next where the statements find them. staged: rows of those outputs and
    operands (``g`` read, ``out_g`` written) lie in shared memory, ``shared_bytes`` for a block. resident: blocks of a
    multiprocessor, where a block goes through many tiles; 0 where every row has its own thread.
    """

    spec: HarmonicsSpec
    body: Body
    live: tuple[str, ...]
    stride: int
    staged: tuple[str, ...] = ()
    shared_bytes: int = 0
    resident: int = 0
    # As in the plan of a product: nothing is summed over edges, and every output is written.
    zeroed: frozenset[str] = frozenset()
    owner: str = ""
    partial_y: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.spec.facts.backend == "cuda"

    @property
    def staging(self) -> str:
        """As the schedule of a GPU has it; on the host ``none``."""
        return getattr(self.spec.schedule, "staging", "none")

    @property
    def block_size(self) -> int:
        schedule = self.spec.schedule
        assert isinstance(schedule, HarmonicsCudaSchedule | HarmonicsHostSchedule)
        return schedule.block_size


@dataclass(frozen=True)
class Row:
    """A row of one vector: the kernel's buffer that it is from, and its elements (0: dim_out)."""

    buffer: str
    elements: int = 0


# By the name that the statements know them by.
ROWS = {"v": Row("x", 3), "t": Row("tx", 3), "g": Row("g"), "out_v": Row("out_x", 3), "out_g": Row("out_g")}
# Shared memory that the system takes for itself of every block.
SHARED_OF_A_BLOCK = 1024


@functools.lru_cache(maxsize=1024)
def _body(problem: HarmonicsProblem, direction: HarmonicsDirection) -> Body:
    return harmonics_body(problem, direction.name, direction.outputs)


def live_rows(direction: HarmonicsDirection, body: Body) -> tuple[str, ...]:
    """Those of ROWS that a kernel reads or writes."""
    stems = {name.rstrip("0123456789") for name in body.reads}
    reads = [row for stem, row in (("vx", "v"), ("tx", "t"), ("g_", "g")) if stem in stems]
    return (*reads, *(row for slot, row in (("x", "out_v"), ("g", "out_g")) if slot in direction.outputs))


def tile_stride(elements: int, dtype: str) -> int:
    """From row to row of a tile: 16 bytes more than a row that is an even number of them, else a row."""
    width = 16 // BYTES[dtype]
    return elements + width if elements % (2 * width) == 0 else elements


def harmonics_plan(spec: HarmonicsSpec) -> HarmonicsPlan:
    """The plan of a spec; ScheduleError with the broken limit."""
    body, dim, schedule, facts = _body(spec.problem, spec.direction), spec.problem.dim_out, spec.schedule, spec.facts
    if isinstance(schedule, HarmonicsHostSchedule):
        facts.check_cores(schedule.threads)
        return HarmonicsPlan(spec, body, live_rows(spec.direction, body), schedule.block_size)
    assert isinstance(schedule, HarmonicsCudaSchedule)
    facts.check_threads(schedule.block_size, schedule.min_blocks)
    live, resident = live_rows(spec.direction, body), 0
    wide = tuple(row for row in live if not ROWS[row].elements)
    if schedule.staging == "none":
        return HarmonicsPlan(spec, body, live, dim)
    if schedule.staging == "ahead":
        stride = tile_stride(dim, spec.dtype)
        copies = {row: 1 if row.startswith("out") else schedule.stages for row in live}
        each = sum(count * (ROWS[row].elements or stride) for row, count in copies.items())
    else:
        stride = dim | 1
        each = len(wide) * stride
    shared = schedule.block_size * each * BYTES[spec.dtype]
    if shared > facts.shared_per_block:
        raise ScheduleError(
            f"block_size={schedule.block_size} with staging={schedule.staging!r} needs {shared} bytes of shared "
            f"memory; there are {facts.shared_per_block}: take smaller blocks or staging='none'"
        )
    if schedule.staging == "ahead":
        fit = facts.max_threads_per_unit // schedule.block_size
        resident = schedule.min_blocks or min(fit, facts.shared_per_unit // (shared + SHARED_OF_A_BLOCK))
    return HarmonicsPlan(spec, body, live, stride, wide, shared, resident)


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
