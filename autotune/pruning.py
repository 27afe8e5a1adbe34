"""Which compiled kernels are not worth a measurement: resources of the compiler enter, a reason or None leaves.

What 3,219 trials on an H200 say (three problems, forward, backward and double backward, ``results/trials``): of the
2,778 fused ones, 290 spill more than 512 bytes a thread (loads and stores), and the fastest of these took 1.22 times
its study's best; in 11 of the 12 studies it took 1.36 times or more. Below that spilling is no sign: three winners
spill 256 to 332 bytes. Occupancy is none either: winners keep 8 warps on a multiprocessor in most studies, which is
next to the least that there was. Where a problem makes every kernel spill (many paths, float64), the
limit follows what the fastest kernel so far spills.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SPILL_BYTES = 512
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
