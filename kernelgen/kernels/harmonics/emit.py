"""A kernel of spherical harmonics as C++ text, for GPU and host.

Both use the same function ``one_vector``, made of the statements of ``kernelgen.arithmetic.harmonics``. A GPU's
thread has one vector, and rows of harmonics may pass through shared memory. A host thread transposes blocks of vectors
to columns, one a component, so that the compiler vectorises over vectors. ``include/harmonics.hpp`` move the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from kernelgen.arithmetic.harmonics import Body, harmonics_body
from kernelgen.kernels.harmonics.plan import ROWS, HarmonicsPlan
from kernelgen.kernels.harmonics.schedule import HarmonicsCudaSchedule
from kernelgen.kernels.source import LaunchRule, Share, Source, included
from kernelgen.kernels.spec import BYTES, Spec, gpu_entry, host_entry
from kernelgen.problem.harmonics import HarmonicsProblem

INDENT = "    "


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
    yield f"using Real = {'float' if spec.dtype == 'float32' else 'double'};"
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
    functions = [vector_function("harmonics", _body(spec.harmonics, "forward"), False, ("v", "out_g"))]
    if "y" in spec.direction.live_outputs:
        gradient = _body(spec.harmonics, "backward")
        functions.append(vector_function("along_v", gradient, True, ("v", "g", "out_v")))
    return "\n".join(line for function in functions for line in function)


@functools.lru_cache(maxsize=64)
def _body(problem: HarmonicsProblem, direction: str) -> Body:
    return harmonics_body(problem, direction)
