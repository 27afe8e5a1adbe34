"""The passes of a model that comparisons time, and the fewest bytes that each must move.

A pass is timed as a model runs it; it consists of the kernels of its directions (``KernelKind.passes``).
"""

from __future__ import annotations

from autotune.workload.graphs import build_graph
from autotune.workload.kinds.registry import KINDS
from autotune.workload.workload import Workload

# Of all kinds.
PASSES = tuple(dict.fromkeys(name for kind in KINDS for name in kind.passes))


def moved_bytes(workload: Workload, which: str) -> int:
    """Compulsory traffic of a pass: the fewest bytes that its kernels read and write."""
    graph = build_graph(workload.graph)
    size = (graph.num_edges, graph.num_nodes)
    return sum(workload.compulsory_bytes(direction, *size) for direction in workload.kind.passes[which])
