"""Zeros by a kernel that lets the next one begin beside it: of a small graph two launches take little more than one.

A tensor enters and is filled; the kernel launched next may be one with ``early`` in its schedule, which waits for the
zeros before it adds to them (programmatic dependent launch: CUDA C++ programming guide, 4.5).
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from kernelgen.compile import compile_source
from kernelgen.device import device_facts
from kernelgen.driver import Arguments, error_name, launch_function, launch_on
from kernelgen.errors import LaunchError
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


_arguments = Arguments(2)


def fill_ahead(out: Tensor) -> None:
    """Fill a contiguous, 16-byte aligned tensor of the current GPU with zeros, on its current stream."""
    device, blocks = out.get_device(), min(MOST_BLOCKS, 1 + out.nbytes // (WIDE * THREADS))
    packed = _arguments.pack(out.data_ptr(), out.nbytes // 4)
    status = launch_on(device, launch_function(), _handle(device)[0], (blocks, THREADS, 0), packed)
    if status != 0:
        raise LaunchError(f"zeros for {out.nbytes} bytes failed on cuda:{device}: {error_name(status)}")


@functools.cache
def _handle(device: int) -> tuple[int, Any]:
    """The kernel's handle, and what keeps its module loaded."""
    from cuda.core import ObjectCode

    binary = compile_source(Source(SOURCE, "cuda", ENTRY), device_facts(f"cuda:{device}"))
    kernel = ObjectCode.from_cubin(binary.path.read_bytes()).get_kernel(ENTRY)
    return int(kernel.handle), kernel
