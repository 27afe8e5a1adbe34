"""Evicts a GPU's instruction caches: every multiprocessor executes more code than its caches hold.

A kernel that is called repeatedly finds its code in the caches; in a model, among other kernels, it does not. On an
H200 the kernels of one molecule took 0.1 to 6 us longer in turns with others; the largest code lost the most.
"""

from __future__ import annotations

import functools

import torch

from kernelgen.device import device_facts
from kernelgen.emit.source import Source
from kernelgen.runtime.kernel import FixedKernel

ENTRY = "equitune_long_code"
# Multiply-adds of 16 bytes each: 256 kB, twice the largest of a multiprocessor's instruction caches.
STEPS = 1 << 14
# Four warps reach the four parts of a multiprocessor; two blocks for each, in case one multiprocessor gets none.
THREADS, BLOCKS_EACH = 128, 2


@functools.cache
def source() -> Source:
    """A kernel without loops whose steps the compiler cannot remove."""
    steps = (f"    x = x * {1 + i * 1e-6:.7f}f + y;\n    y = y * {1 - i * 1e-6:.7f}f + x;\n" for i in range(STEPS // 2))
    head = (
        f'extern "C" __global__ void __launch_bounds__({THREADS}) {ENTRY}(float* out, unsigned long long wanted) {{\n'
    )
    body = "    float x = threadIdx.x, y = blockIdx.x;\n" + "".join(steps)
    return Source(head + body + "    if (wanted) *out = x + y;\n}\n", "cuda", ENTRY)


@functools.cache
def _long_code() -> FixedKernel:
    return FixedKernel(source(), 2, THREADS)


def evict_code(device: torch.device) -> None:
    """Queue the kernel on the current stream of the current device, which is ``device``."""
    index = torch.cuda.current_device() if device.index is None else device.index
    _long_code().launch(index, BLOCKS_EACH * device_facts(f"cuda:{index}").units, 0, 0)
