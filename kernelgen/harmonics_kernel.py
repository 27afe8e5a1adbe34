"""A kernel of spherical harmonics as C++ text, for the GPU and the host: a HarmonicsPlan enters, source leaves.

``one_vector`` is the same text for both: the statements of ``kernelgen.harmonics`` between rows. A GPU's thread has one
vector, and rows of harmonics may pass through shared memory; a host's thread takes blocks of vectors component by
component, so that the compiler works on several at once. ``include/harmonics.hpp`` moves the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import resources

from kernelgen.harmonics_plan import HarmonicsPlan
from kernelgen.harmonics_schedule import HarmonicsCudaSchedule
from kernelgen.signature import gpu_entry, host_entry
from kernelgen.source import Source
from kernelgen.spec import BYTES

INDENT = "    "
# What one_vector takes, with the buffers of the kernel that they come from and the elements of a row (None: dim_out).
_ROWS: tuple[tuple[str, str, int | None], ...] = (
    ("v", "x", 3),
    ("t", "tx", 3),
    ("g", "g", None),
    ("out_v", "out_x", 3),
    ("out_g", "out_g", None),
)


@functools.cache
def _header() -> str:
    return resources.files("kernelgen").joinpath("include/harmonics.hpp").read_text()


def emit_harmonics(plan: HarmonicsPlan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    kernel = _gpu(plan) if plan.on_gpu else _host(plan)
    parts = ["\n".join(_preamble(plan)), _header(), *_one_vector(plan), *kernel]
    return Source("\n".join(parts) + "\n", "cuda" if plan.on_gpu else "c++")


def harmonics_geometry(plan: HarmonicsPlan, num_rows: int) -> tuple[int, int, int]:
    """Blocks, threads a block, and dynamic shared memory in bytes."""
    return -(-num_rows // plan.block_size), plan.block_size, plan.shared_bytes


def _preamble(plan: HarmonicsPlan) -> Iterator[str]:
    spec = plan.spec
    yield f"// problem    {spec.problem.key}"
    yield f"// direction  {spec.direction.text}, {spec.dtype}"
    yield f"// schedule   {spec.schedule.key}"
    if plan.on_gpu:
        yield "#define ON_GPU"
    else:
        # Comparisons and divisions that a vector does in vain may not keep the compiler from vectorising.
        yield "#ifndef __clang__"
        yield '#pragma GCC optimize("no-trapping-math")'
        yield "#endif"
        yield from (f"#include <{name}>" for name in ("cstddef", "cstring", "utility", "math.h", "omp.h"))
    yield f"using Real = {'float' if spec.dtype == 'float32' else 'double'};"
    yield "using index_t = long long;"  # stands in the signature that all kernels share
    yield f"constexpr int DIM = {spec.problem.dim_out}, BLOCK = {plan.block_size};"
    if isinstance(spec.schedule, HarmonicsCudaSchedule):
        width = 16 // BYTES[spec.dtype] if spec.schedule.staging == "vectors" else 1
        yield f"constexpr int STRIDE = {plan.stride}, WIDTH = {width};"


def _one_vector(plan: HarmonicsPlan) -> Iterator[str]:
    """The function of one vector. Components of rows are references, so that each is read where it is used."""
    body, makes_x = plan.body, "x" in plan.spec.direction.outputs
    arguments = (f"{'' if name.startswith('out') else 'const '}Real* __restrict__ {name}" for name, _, _ in _ROWS)
    yield f"DEVICE void one_vector({', '.join(arguments)})"
    yield "{"
    for name in sorted(body.reads, key=_place):
        stem, number = _place(name)
        row = {"vx": "v", "tx": "t", "g_": "g"}[stem]
        yield f"{INDENT}const Real{'&' if row == 'g' else ''} {name} = {row}[{number} * STEP];"
    for name in sorted(body.writes, key=_place):
        yield f"{INDENT}Real& {name} = out_g[{_place(name)[1]} * STEP];"
    if makes_x:
        yield f"{INDENT}Real ox0 = 0, ox1 = 0, ox2 = 0;"
    yield from (f"{INDENT}{statement}" for statement in body.statements)
    if makes_x:
        yield f"{INDENT}{' '.join(f'out_v[{i} * STEP] = ox{i};' for i in range(3))}"
    yield "}"
    yield ""


def _place(name: str) -> tuple[str, int]:
    """``vx1`` is component 1 of ``vx``, ``og_12`` component 12 of ``og_``."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :])


def _live(plan: HarmonicsPlan) -> list[str]:
    """The arguments of one_vector that the statements touch."""
    stems = {_place(name)[0] for name in plan.body.reads}
    reads = [row for stem, row in (("vx", "v"), ("tx", "t"), ("g_", "g")) if stem in stems]
    return reads + [row for slot, row in (("x", "out_v"), ("g", "out_g")) if slot in plan.spec.direction.outputs]


def _gpu(plan: HarmonicsPlan) -> Iterator[str]:
    schedule, live = plan.spec.schedule, _live(plan)
    assert isinstance(schedule, HarmonicsCudaSchedule)
    yield from gpu_entry(schedule.block_size, schedule.min_blocks)
    yield f"{INDENT}const long long first = blockIdx.x * (long long)BLOCK, row = first + threadIdx.x;"
    if plan.staged:
        yield f"{INDENT}extern __shared__ __align__(16) unsigned char shared_bytes[];"
        yield f"{INDENT}const int count = int(min(num_edges - first, (long long)BLOCK)) * DIM;"
        for number, name in enumerate(plan.staged):
            begin = f" + {number} * BLOCK * STRIDE" if number else ""
            yield f"{INDENT}Real* const shared_{name} = reinterpret_cast<Real*>(shared_bytes){begin};"
    if "g" in plan.staged:
        yield f"{INDENT}load_rows(g + first * DIM, shared_g, count);"
        yield f"{INDENT}__syncthreads();"
    arguments = []
    for name, buffer, size in _ROWS:
        staged = f"shared_{name} + threadIdx.x * STRIDE"
        direct = f"{buffer} + row * {size or 'DIM'}"
        arguments.append("nullptr" if name not in live else staged if name in plan.staged else direct)
    yield f"{INDENT}if (row < num_edges) one_vector({', '.join(arguments)});"
    if "out_g" in plan.staged:
        yield f"{INDENT}__syncthreads();"
        yield f"{INDENT}store_rows(shared_out_g, out_g + first * DIM, count);"
    yield "}"


def _host(plan: HarmonicsPlan) -> Iterator[str]:
    live = _live(plan)
    rows = [(name, buffer, size or plan.spec.problem.dim_out) for name, buffer, size in _ROWS if name in live]
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
    arguments = (f"columns_{name} + i" if name in live else "nullptr" for name, _, _ in _ROWS)
    yield "#pragma omp simd"
    yield f"{INDENT * 2}for (int i = 0; i < BLOCK; ++i) one_vector({', '.join(arguments)});"
    for name, buffer, size in rows:
        if name.startswith("out"):
            where = f"static_cast<Real*>({buffer}) + first * {size}"
            yield f"{INDENT * 2}store_columns<{size}>(columns_{name}, count, {where});"
    yield f"{INDENT}}}"
    yield "}"
