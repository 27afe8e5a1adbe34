"""Zeros by a kernel that lets the next one begin beside it: of a small graph two launches take little more than one.

A tensor enters and is filled; the kernel launched next may be one with ``early`` in its schedule, which waits for the
zeros before it adds to them (programmatic dependent launch: CUDA C++ programming guide, 4.5).
"""

from __future__ import annotations

from torch import Tensor

from kernelgen.fixed import FixedKernel
from kernelgen.source import Source

ENTRY = "equitune_zeros"
THREADS, MOST_BLOCKS = 256, 1024
# Bytes of a thread's widest store.
WIDE = 16
SOURCE = f"""extern "C" __global__ void __launch_bounds__({THREADS}) {ENTRY}(unsigned* out, unsigned long long words) {{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    const unsigned long long first = blockIdx.x * {THREADS}ull + threadIdx.x, quads = words / 4;
    for (unsigned long long i = first; i < quads; i += gridDim.x * {THREADS}ull)
        reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
    if (first < words % 4) out[4 * quads + first] = 0;
}}
"""

_zeros = FixedKernel(Source(SOURCE, "cuda", ENTRY), 2, THREADS)


def fill_ahead(out: Tensor) -> None:
    """Fill a contiguous, 16-byte aligned tensor of the current GPU with zeros, on its current stream."""
    size = out.nbytes
    _zeros.launch(out.get_device(), min(MOST_BLOCKS, 1 + size // (WIDE * THREADS)), out.data_ptr(), size // 4)
