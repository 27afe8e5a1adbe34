"""The plan of a kernel of spherical harmonics.

The kernel takes the arguments of all kernels (``kernelgen.kernels.spec.BUFFERS``): vectors are ``x``, their
tangents ``tx``, their gradients ``out_x``; harmonics, and gradients of cotangents, are ``out_g``. Every element of an
output is written.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kernelgen.arithmetic.directions import HarmonicsDirection
from kernelgen.arithmetic.harmonics import Body, harmonics_body
from kernelgen.errors import ScheduleError
from kernelgen.kernels.harmonics.schedule import HarmonicsCudaSchedule, HarmonicsHostSchedule
from kernelgen.kernels.spec import BYTES, HarmonicsSpec
from kernelgen.problem.harmonics import HarmonicsProblem


@dataclass(frozen=True)
class HarmonicsPlan:
    """The statements for one vector (``body``), the ROWS they use (``live``), and where its long rows are.

    stride: elements from one row of dim_out to the next where the statements access them. staged: those of ``g`` (read)
    and ``out_g`` (written) that lie in shared memory, ``shared_bytes`` for a block. resident: blocks of a
    multiprocessor if a block loops over tiles; 0 if every row has its own thread.
    """

    spec: HarmonicsSpec
    body: Body
    live: tuple[str, ...]
    stride: int
    staged: tuple[str, ...] = ()
    shared_bytes: int = 0
    resident: int = 0
    # Fields of a product's plan: nothing is summed over edges, and every output is written.
    zeroed: frozenset[str] = frozenset()
    owner: str = ""
    partial_y: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.spec.facts.backend == "cuda"

    @property
    def staging(self) -> str:
        """The CUDA schedule's ``staging``; ``none`` on the host."""
        return getattr(self.spec.schedule, "staging", "none")

    @property
    def block_size(self) -> int:
        schedule = self.spec.schedule
        assert isinstance(schedule, HarmonicsCudaSchedule | HarmonicsHostSchedule)
        return schedule.block_size


@dataclass(frozen=True)
class Row:
    """A row of one vector: its buffer among the kernel's arguments, and its elements (0: dim_out)."""

    buffer: str
    elements: int = 0


# By their names in the statements.
ROWS = {"v": Row("x", 3), "t": Row("tx", 3), "g": Row("g"), "out_v": Row("out_x", 3), "out_g": Row("out_g")}
# Bytes of shared memory that the system reserves for every block.
SHARED_OF_A_BLOCK = 1024


@functools.lru_cache(maxsize=1024)
def _body(problem: HarmonicsProblem, direction: HarmonicsDirection) -> Body:
    return harmonics_body(problem, direction.name, direction.outputs)


def live_rows(direction: HarmonicsDirection, body: Body) -> tuple[str, ...]:
    """The ROWS that a kernel reads or writes."""
    stems = {name.rstrip("0123456789") for name in body.reads}
    reads = [row for stem, row in (("vx", "v"), ("tx", "t"), ("g_", "g")) if stem in stems]
    return (*reads, *(row for slot, row in (("x", "out_v"), ("g", "out_g")) if slot in direction.outputs))


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
        # A row of an even number of 16-byte pieces is padded by one piece.
        width = 16 // BYTES[spec.dtype]
        stride = dim + width if dim % (2 * width) == 0 else dim
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
