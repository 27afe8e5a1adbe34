"""Kernels of spherical harmonics, by themselves and inside products: schedules and spec, plan, and C++ text.

In: a spec. Out: a plan, or a ScheduleError with the broken limit; and the plan's source. There is a form for a GPU and
one for the host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from kernelgen.arithmetic.directions import BACKWARD, FORWARD, HarmonicsDirection
from kernelgen.arithmetic.harmonics import Body, harmonics_body
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.source import LaunchRule, Share, Source, included
from kernelgen.kernels.spec import BYTES, C_TYPES, INDENT, Spec, check_fields, gpu_entry, host_entry
from kernelgen.problem.other_kinds import HarmonicsProblem


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
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {
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
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_size": (16, 32, 64, 128, 256),
        "threads": tuple(range(0, 257)),
    }


HARMONICS_SCHEDULES: dict[str, type[HarmonicsSchedule]] = {"cuda": HarmonicsCudaSchedule, "cpu": HarmonicsHostSchedule}


@dataclass(frozen=True)
class HarmonicsSpec:
    """Everything that determines one kernel's source. dtype: ``float32`` or ``float64``. facts: the target device."""

    problem: HarmonicsProblem
    direction: HarmonicsDirection
    schedule: HarmonicsSchedule
    dtype: str
    facts: DeviceFacts
    # What other kernels are stored and looked up by too.
    operation: ClassVar[str] = "harmonics"
    layout: ClassVar[str] = "mul_ir"
    deterministic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def row_work(self) -> int:
        """The work of a vector, measured in elements."""
        return self.problem.dim_out


# The schedule of a product with harmonics of edge vectors: where the harmonics are computed.


@dataclass(frozen=True)
class VectorSchedule(Knobs):
    """harmonics: computed ``inside`` the product's kernel, or ``apart``, by separate kernels before and after it.

    ``unfused``: apart, and also gather, product and sum at nodes are separate steps.
    """

    harmonics: str = "inside"

    choices: ClassVar[dict[str, tuple[Any, ...]]] = {"harmonics": ("inside", "apart", "unfused")}


@dataclass(frozen=True)
class VectorCudaSchedule(VectorSchedule):
    backend: ClassVar[str] = "cuda"


@dataclass(frozen=True)
class VectorHostSchedule(VectorSchedule):
    backend: ClassVar[str] = "cpu"


VECTOR_SCHEDULES: dict[str, type[VectorSchedule]] = {"cuda": VectorCudaSchedule, "cpu": VectorHostSchedule}


# The plan of a kernel of spherical harmonics.
#
# The kernel takes the arguments of all kernels (``kernelgen.kernels.spec.BUFFERS``): vectors are ``x``, their
# tangents ``tx``, their gradients ``out_x``; harmonics, and gradients of cotangents, are ``out_g``. Every element of an
# output is written.


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


def default_harmonics_schedule(
    problem: HarmonicsProblem, direction: HarmonicsDirection, dtype: str, facts: DeviceFacts
) -> HarmonicsSchedule:
    """A legal schedule by simple rules, without a search.

    CUDA: staged rows, with blocks small enough for two on a multiprocessor if possible.
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


# The kernel's C++ text, for GPU and host.
#
# Both use the same function ``one_vector``, made of the statements of ``kernelgen.arithmetic.harmonics``. A GPU's
# thread has one vector, and rows of harmonics may pass through shared memory. A host thread transposes blocks of
# vectors to columns, one a component, so that the compiler vectorises over vectors. ``include/harmonics.hpp`` moves the
# rows.


def emit_harmonics(plan: HarmonicsPlan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    ahead = plan.staging == "ahead"
    headers = [
        "harmonics.hpp:harmonics_gpu" if plan.on_gpu else "harmonics.hpp:harmonics_host",
        *(["harmonics.hpp:pipeline"] if ahead else []),
    ]
    kernel = _gpu_ahead(plan) if ahead else _gpu(plan) if plan.on_gpu else _host(plan)
    makes_x = "x" in plan.spec.direction.outputs
    one_vector = vector_function("one_vector", plan.body, makes_x, tuple(ROWS), " * STEP")
    parts = ["\n".join(_preamble(plan)), *map(included, headers), *one_vector, *kernel]
    return Source("\n".join(parts) + "\n", "cuda" if plan.on_gpu else "c++")


def harmonics_launch(plan: HarmonicsPlan) -> LaunchRule:
    """A block for so many rows as it has threads."""
    shares = (Share("edges", (plan.block_size,)),)
    return LaunchRule(plan.block_size, plan.shared_bytes, shares, most_of_unit=plan.resident)


def _preamble(plan: HarmonicsPlan) -> Iterator[str]:
    spec = plan.spec
    yield f"// problem    {spec.problem.key}"
    yield f"// direction  {spec.direction.text}, {spec.dtype}"
    yield f"// schedule   {spec.schedule.key}"
    if not plan.on_gpu:
        # Allow vectorisation even if some lanes compare or divide in vain.
        yield "#ifndef __clang__"
        yield '#pragma GCC optimize("no-trapping-math")'
        yield "#endif"
        yield from (f"#include <{name}>" for name in ("cstddef", "cstring", "utility", "math.h", "omp.h"))
    yield f"using Real = {C_TYPES[spec.dtype]};"
    yield "using index_t = long long;"  # the signature that all kernels share uses it
    yield f"constexpr int DIM = {spec.problem.dim_out}, BLOCK = {plan.block_size};"
    if isinstance(spec.schedule, HarmonicsCudaSchedule):
        width = 1 if plan.staging == "none" else 16 // BYTES[spec.dtype]
        yield f"constexpr int STRIDE = {plan.stride}, WIDTH = {width}, STAGES = {spec.schedule.stages};"


def _gpu(plan: HarmonicsPlan) -> Iterator[str]:
    schedule = plan.spec.schedule
    assert isinstance(schedule, HarmonicsCudaSchedule)
    yield from gpu_entry(schedule.block_size, schedule.min_blocks)
    yield f"{INDENT}const long long first = blockIdx.x * (long long)BLOCK, row = first + threadIdx.x;"
    if plan.staged:
        yield f"{INDENT}extern __shared__ __align__(16) unsigned char shared_bytes[];"
        yield f"{INDENT}const int count = int(min(num_edges - first, (long long)BLOCK)) * DIM;"
        for number, name in enumerate(plan.staged):
            begin = f" + {number} * BLOCK * STRIDE" if number else ""
            yield f"{INDENT}Real* const shared_{name} = reinterpret_cast<Real*>(shared_bytes){begin};"
    own = [name for name in plan.live if name in ("v", "t")] if "g" in plan.staged else []
    if own:
        # Loaded before the barrier, so that its latency overlaps with that of the rows.
        yield f"{INDENT}const long long mine = min(row, num_edges - 1) * 3;"
        for name in own:
            parts = ", ".join(f"{ROWS[name].buffer}[mine + {i}]" for i in range(3))
            yield f"{INDENT}const Real own_{name}[3] = {{{parts}}};"
    if "g" in plan.staged:
        yield f"{INDENT}load_rows(g + first * DIM, shared_g, count);"
        yield f"{INDENT}__syncthreads();"
    arguments = []
    for name, row in ROWS.items():
        staged = f"shared_{name} + threadIdx.x * STRIDE"
        direct = f"own_{name}" if name in own else f"{row.buffer} + row * {row.elements or 'DIM'}"
        arguments.append("nullptr" if name not in plan.live else staged if name in plan.staged else direct)
    yield f"{INDENT}if (row < num_edges) one_vector({', '.join(arguments)});"
    if "out_g" in plan.staged:
        yield f"{INDENT}__syncthreads();"
        yield f"{INDENT}store_rows(shared_out_g, out_g + first * DIM, count);"
    yield "}"


def _gpu_ahead(plan: HarmonicsPlan) -> Iterator[str]:
    """Each warp loops over tiles, read asynchronously to STAGES slots in turn; results are written from ``made``."""
    schedule = plan.spec.schedule
    assert isinstance(schedule, HarmonicsCudaSchedule)
    places, sizes = {}, {"read": 0, "made": 0}
    for name in plan.live:
        area = "made" if name.startswith("out") else "read"
        places[name] = f"{area} + {sizes[area]} * TILE"
        sizes[area] += ROWS[name].elements or plan.stride
    yield from gpu_entry(schedule.block_size, schedule.min_blocks)
    yield f"{INDENT}extern __shared__ __align__(16) unsigned char shared_bytes[];"
    yield f"{INDENT}constexpr int READ = {sizes['read']} * TILE, MADE = {sizes['made']} * TILE, WARPS = BLOCK / TILE;"
    yield f"{INDENT}const int lane = threadIdx.x % TILE, warp = threadIdx.x / TILE;"
    yield f"{INDENT}Real* const slots = reinterpret_cast<Real*>(shared_bytes) + warp * (STAGES * READ + MADE);"
    yield f"{INDENT}Real* const made = slots + STAGES * READ;"
    yield f"{INDENT}const long long tiles = (num_edges + TILE - 1) / TILE, step = gridDim.x * (long long)WARPS;"
    yield f"{INDENT}const auto fetch_tile = [&](long long tile, Real* read) {{"
    yield f"{INDENT * 2}if (tile < tiles) {{"
    yield f"{INDENT * 3}const int rows = rows_in(tile, num_edges);"
    yield from (f"{INDENT * 3}fetch_rows{moved}" for moved in _moved(plan, places, "read"))
    yield f"{INDENT * 2}}}"
    yield f"{INDENT * 2}close_tile();"
    yield f"{INDENT}}};"
    yield f"{INDENT}long long tile = blockIdx.x * (long long)WARPS + warp;"
    yield f"{INDENT}for (int s = 0; s < STAGES - 1; ++s) fetch_tile(tile + s * step, slots + s * READ);"
    yield f"{INDENT}for (int slot = 0; tile < tiles; tile += step, slot = slot + 1 < STAGES ? slot + 1 : 0) {{"
    yield f"{INDENT * 2}fetch_tile(tile + (STAGES - 1) * step, slots + (slot ? slot - 1 : STAGES - 1) * READ);"
    yield f"{INDENT * 2}await_tile();"
    yield f"{INDENT * 2}Real* const read = slots + slot * READ;"
    own = {name: f"{place} + lane * {ROWS[name].elements or 'STRIDE'}" for name, place in places.items()}
    yield f"{INDENT * 2}one_vector({', '.join(own.get(name, 'nullptr') for name in ROWS)});"
    yield f"{INDENT * 2}__syncwarp(0xffffffffu);"
    yield f"{INDENT * 2}const int rows = rows_in(tile, num_edges);"
    yield from (f"{INDENT * 2}put_rows{moved}" for moved in _moved(plan, places, "made"))
    yield f"{INDENT * 2}__syncwarp(0xffffffffu);"
    yield f"{INDENT}}}"
    yield "}"


def _moved(plan: HarmonicsPlan, places: dict[str, str], area: str) -> Iterator[str]:
    """Template and function arguments of fetch_rows or put_rows for a tile, for each row of the area."""
    for name, place in places.items():
        if place.startswith(area):
            size, row = ROWS[name].elements or "DIM", ROWS[name].buffer
            where, count = f"{row} + tile * (TILE * {size})", f"rows * {size}"
            sides = (where, place) if area == "read" else (place, where)
            yield f"<{size}, {ROWS[name].elements or 'STRIDE'}>({sides[0]}, {sides[1]}, lane, {count});"


def _host(plan: HarmonicsPlan) -> Iterator[str]:
    rows = [(name, ROWS[name].buffer, ROWS[name].elements or plan.spec.problem.dim_out) for name in plan.live]
    yield from host_entry()
    yield f"{INDENT}const long long blocks = (num_edges + BLOCK - 1) / BLOCK;"
    yield "#pragma omp parallel for schedule(static) num_threads(threads > 0 ? threads : omp_get_max_threads())"
    yield f"{INDENT}for (long long block = 0; block < blocks; ++block) {{"
    yield f"{INDENT * 2}const long long first = block * BLOCK;"
    yield f"{INDENT * 2}const int count = int(num_edges - first < BLOCK ? num_edges - first : BLOCK);"
    for name, buffer, size in rows:
        yield f"{INDENT * 2}alignas(64) Real columns_{name}[{size} * BLOCK];"
        if not name.startswith("out"):
            where = f"static_cast<const Real*>({buffer}) + first * {size}"
            yield f"{INDENT * 2}load_columns<{size}>({where}, count, columns_{name});"
    arguments = (f"columns_{name} + i" if name in plan.live else "nullptr" for name in ROWS)
    yield "#pragma omp simd"
    yield f"{INDENT * 2}for (int i = 0; i < BLOCK; ++i) one_vector({', '.join(arguments)});"
    for name, buffer, size in rows:
        if name.startswith("out"):
            where = f"static_cast<Real*>({buffer}) + first * {size}"
            yield f"{INDENT * 2}store_columns<{size}>(columns_{name}, count, {where});"
    yield f"{INDENT}}}"
    yield "}"


# The device function for one vector as C++ text, from the statements of ``kernelgen.arithmetic.harmonics``.
#
# Kernels of harmonics contain it, and so do kernels of products that compute y from vectors (:func:`inside`). The text
# around it defines ``Real`` and ``DEVICE``.


def vector_function(name: str, body: Body, makes_x: bool, rows: tuple[str, ...], step: str = "") -> Iterator[str]:
    """A function whose arguments are ``rows`` (v, t, g read; out_v, out_g written), indexed by ``[number{step}]``.

    Components of rows of harmonics are references, so that each is read only where it is used.
    """
    arguments = (f"{'' if row.startswith('out') else 'const '}Real* __restrict__ {row}" for row in rows)
    yield f"DEVICE void {name}({', '.join(arguments)})"
    yield "{"
    for read in sorted(body.reads, key=_place):
        stem, number = _place(read)
        row = {"vx": "v", "tx": "t", "g_": "g"}[stem]
        yield f"{INDENT}const Real{'&' if row == 'g' else ''} {read} = {row}[{number}{step}];"
    for written in sorted(body.writes, key=_place):
        yield f"{INDENT}Real& {written} = out_g[{_place(written)[1]}{step}];"
    if makes_x:
        yield f"{INDENT}Real ox0 = 0, ox1 = 0, ox2 = 0;"
    yield from (f"{INDENT}{statement}" for statement in body.statements)
    if makes_x:
        yield f"{INDENT}{' '.join(f'out_v[{i}{step}] = ox{i};' for i in range(3))}"
    yield "}"
    yield ""


def _place(name: str) -> tuple[str, int]:
    """Row and component of a name: ``vx1`` is component 1 of ``vx``, ``og_12`` component 12 of ``og_``."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :])


def inside(spec: Spec) -> str:
    """Functions for a product with harmonics: ``harmonics(v, out_g)``; for dF/dy also ``along_v(v, g, out_v)``."""
    if spec.harmonics is None:
        return ""
    functions = [vector_function("harmonics", _body(spec.harmonics, FORWARD), False, ("v", "out_g"))]
    if "y" in spec.direction.live_outputs:
        gradient = _body(spec.harmonics, BACKWARD)
        functions.append(vector_function("along_v", gradient, True, ("v", "g", "out_v")))
    return "\n".join(line for function in functions for line in function)
