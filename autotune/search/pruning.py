"""Skip compiled kernels that cannot win, judged by the registers that the compiler spills.

Evidence from 7,541 fused trials on an H200 (``results/trials``): 436 spill more than 640 bytes per thread (loads and
stores), and the fastest measured one of these took 1.39 times its study's best. At 580 bytes a kernel for one molecule,
where launch and latency matter most, came within 1.08 times. Smaller spills predict nothing: winners spill up to 464
bytes. Nor does occupancy: in most studies winners keep 8 warps on a multiprocessor, close to the fewest that occurred.
Spilled registers live in a multiprocessor's L1: with 8 warps these 640 bytes (320 of storage) fill 80 KB of an H200's
256 KB. So a multiprocessor with a smaller L1 has a smaller limit in proportion, which nothing but this reason supports.
If a problem makes every kernel spill (many paths, float64), the limit follows the spills of the fastest kernel so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelgen.device import DeviceFacts

# The limit that was found on an H200, and its unified L1 cache and shared memory.
SPILL_BYTES, L1_OF_H200 = 640, 256 << 10
SPILL_RATIO = 2


def spill_limit(facts: DeviceFacts) -> int:
    """Bytes a thread (loads and stores) from which on a kernel is hopeless; older records lack the size of L1."""
    return SPILL_BYTES * (facts.l1_per_unit or L1_OF_H200) // L1_OF_H200


def why_hopeless(resources: Mapping[str, Any], best: Mapping[str, Any] | None, facts: DeviceFacts) -> str | None:
    """Why a kernel with these resources cannot win, or None; ``best``: those of the fastest so far, None if none.

    Nothing is skipped before a first time, so the first schedule of a study is always measured.
    """
    if best is None:
        return None
    spills, limit = resources.get("spill_bytes", 0), max(spill_limit(facts), SPILL_RATIO * best.get("spill_bytes", 0))
    if spills <= limit:
        return None
    return (
        f"spills {spills} bytes a thread; the fastest so far spills {best.get('spill_bytes', 0)}, the limit is {limit}"
    )
