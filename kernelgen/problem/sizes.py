"""What the speed of a kernel depends on: the shape of its problem, and the size class of its graph."""

from __future__ import annotations

import functools
import re

# The shape of a problem: what its kernels' speed depends on, so that a schedule tuned for one serves its likes.


@functools.lru_cache(maxsize=4096)
def shape_of(key: str) -> str:
    """A problem's ``key`` without parities, and with its paths sorted by output; equal for problems of equal shape.

    Parities change no arithmetic. The order of paths is only that of their weights: MACE and SevenNet sort them by
    output, NequIP by input.
    """
    parts = key.split("|")
    if len(parts) != 8 or parts[0] not in ("uvu", "tp"):
        return key
    irreps = [re.sub(r"(\d)[eo]", r"\1", text) for text in parts[1:4]]
    return "|".join([parts[0], *irreps, ",".join(sorted(parts[4].split(","), key=_by_output)), *parts[5:]])


def _by_output(path: str) -> tuple[int, str]:
    blocks = re.match(r"\d+\.\d+\.(\d+)", path)
    return (int(blocks[1]) if blocks else -1, path)


def size_class(num_edges: int, num_nodes: int) -> tuple[int, int]:
    """Rounded log2 of the number of edges, and of the edges a node; both at least 0. ``num_nodes``: destinations.

    >>> size_class(460_710, 5184)
    (19, 6)
    """
    edges, nodes = num_edges or 1, num_nodes if num_nodes > 0 else 1
    square = edges * edges
    # bit_length is 1 + floor(log2), so for a square half of it is the rounded log2 of its root.
    return square.bit_length() >> 1, (square // (nodes * nodes)).bit_length() >> 1
