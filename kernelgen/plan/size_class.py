"""The size class of a graph: its number of edges, and of edges a node, as rounded logarithms to base 2.

Schedules are chosen by it, in every call: integers alone, so that this costs no measurable time.
"""

from __future__ import annotations


def size_class(num_edges: int, num_nodes: int) -> tuple[int, int]:
    """Rounded log2 of the number of edges, and of the edges a node; both at least 0. ``num_nodes``: destinations.

    >>> size_class(460_710, 5184)
    (19, 6)
    """
    edges, nodes = num_edges or 1, num_nodes if num_nodes > 0 else 1
    square = edges * edges
    # bit_length is 1 + floor(log2), so for a square half of it is the rounded log2 of its root.
    return square.bit_length() >> 1, (square // (nodes * nodes)).bit_length() >> 1
