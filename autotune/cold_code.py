"""Cold instruction caches: every multiprocessor of a GPU is sent through more code than its caches hold.

A kernel called again and again finds its code where it left it, which in a model, between other kernels, it does not:
on an H200 the kernels of one molecule took 0.1 to 6 us longer in turns with others, the most where the code is largest.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelgen.compile import compile_source
from kernelgen.device import device_facts
from kernelgen.driver import Arguments, error_name, launch_function, launch_on
from kernelgen.errors import LaunchError
from kernelgen.source import Source

ENTRY = "equitune_long_code"
# Multiply-adds of 16 bytes each: 256 kB, twice the largest of a multiprocessor's instruction caches.
STEPS = 1 << 14
# Four warps reach the four parts of a multiprocessor; two blocks each, should one of them get none.
THREADS, BLOCKS_EACH = 128, 2


@functools.cache
def source() -> Source:
    """A kernel without loops, none of whose steps can be left out."""
    steps = (f"    x = x * {1 + i * 1e-6:.7f}f + y;\n    y = y * {1 - i * 1e-6:.7f}f + x;\n" for i in range(STEPS // 2))
    head = (
        f'extern "C" __global__ void __launch_bounds__({THREADS}) {ENTRY}(float* out, unsigned long long wanted) {{\n'
    )
    body = "    float x = threadIdx.x, y = blockIdx.x;\n" + "".join(steps)
    return Source(head + body + "    if (wanted) *out = x + y;\n}\n", "cuda", ENTRY)


@functools.cache
def _handle(device: int) -> tuple[int, int, Any]:
    """The kernel's handle, its blocks, and what keeps its module loaded."""
    from cuda.core import ObjectCode

    facts = device_facts(f"cuda:{device}")
    kernel = ObjectCode.from_cubin(compile_source(source(), facts).path.read_bytes()).get_kernel(ENTRY)
    return int(kernel.handle), BLOCKS_EACH * facts.units, kernel


_arguments = Arguments(2)


def evict_code(device: torch.device) -> None:
    """Queue the kernel on the current stream of the current device, which is ``device``."""
    index = torch.cuda.current_device() if device.index is None else device.index
    handle, blocks, _ = _handle(index)
    status = launch_on(index, launch_function(), handle, (blocks, THREADS, 0), _arguments.pack(0, 0))
    if status != 0:
        raise LaunchError(f"the kernel that makes instruction caches cold failed on cuda:{index}: {error_name(status)}")
