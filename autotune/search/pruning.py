"""Which compiled kernels are not worth a measurement: resources of the compiler enter, a reason or None leaves.

What 7,541 fused trials on an H200 say (``results/trials``): 436 spill more than 640 bytes a thread (loads and stores),
and the fastest of those that were measured took 1.39 times its study's best. At 580 bytes a kernel for one molecule,
where launch and latency weigh most, came within 1.08 times. Below that spilling is no sign: winners spill
up to 464 bytes. Occupancy is none either: winners keep 8 warps on a multiprocessor in most studies, which is
next to the least that there was. Where a problem makes every kernel spill (many paths, float64), the
limit follows what the fastest kernel so far spills.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SPILL_BYTES = 640
SPILL_RATIO = 2


def why_hopeless(resources: Mapping[str, Any], best: Mapping[str, Any] | None) -> str | None:
    """Why a kernel with these resources cannot win; ``best``: those of the fastest so far, None if nothing was timed.

    The first schedule of a study is therefore always measured.
    """
    if best is None:
        return None
    spills, limit = resources.get("spill_bytes", 0), max(SPILL_BYTES, SPILL_RATIO * best.get("spill_bytes", 0))
    if spills <= limit:
        return None
    return (
        f"spills {spills} bytes a thread; the fastest so far spills {best.get('spill_bytes', 0)}, the limit is {limit}"
    )
