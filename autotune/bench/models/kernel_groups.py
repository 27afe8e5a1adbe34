"""What the kernels of a step are for, by their names: what limits a model next."""

from __future__ import annotations

import re
from collections.abc import Iterable

OTHER = "other kernels"
# Words for a group, and what names of its kernels contain. The first that fits counts: copies are elementwise too.
GROUPS = (
    ("Equitune's contractions", r"equitune_contraction"),
    ("Equitune's products and harmonics", r"equitune_kernel|equitune_radial"),
    ("Equitune's matrix products", r"equitune_tall|equitune_block_matrices"),
    ("cuEquivariance's", r"cuequivariance|segmented|uniform_1d|fused_tp|tp_channel"),
    ("matrix products", r"gemm|gemv|cutlass|cublas|nvjet|splitk|xmma|dot_kernel"),
    ("copies and fills", r"copy|catarray|fill|memcpy|memset|transpose"),
    ("gathers and sums by index", r"index|scatter|gather|segment_reduce|embedding"),
    ("sorting", r"sort|radix|scan|searchsorted|unique|histogram"),
    ("sums", r"reduce"),
    ("elementwise", r"elementwise|vectorized|triton_poi|softmax"),
)


def group_of(name: str) -> str:
    """The group of a kernel."""
    lower = name.lower()
    return next((words for words, pattern in GROUPS if re.search(pattern, lower)), OTHER)


def milliseconds_by_group(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Of (name, microseconds) the milliseconds of each group, largest first."""
    found: dict[str, float] = {}
    for name, time_us in kernels:
        group = group_of(name)
        found[group] = found.get(group, 0.0) + time_us / 1e3
    return {group: round(time_ms, 4) for group, time_ms in sorted(found.items(), key=lambda item: -item[1])}


def shares_text(parts: dict[str, float]) -> str:
    """Such as ``matrix products 45%, copies and fills 20%``; groups of less than a hundredth are left out."""
    total = sum(parts.values())
    return ", ".join(f"{part} {size / total:.0%}" for part, size in parts.items() if size >= 0.01 * total)
