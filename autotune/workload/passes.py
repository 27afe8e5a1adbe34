"""The passes of a model that comparisons time, and the fewest bytes that each must move."""

from __future__ import annotations

from autotune.workload.graphs import build_graph
from autotune.workload.workload import Workload
from kernelgen.terms.directions import DIRECTIONS

# A pass is timed as a model runs it; it consists of the kernels of its directions.
DIRECTIONS_OF: dict[str, tuple[str, ...]] = {name: (name,) for name in DIRECTIONS} | {
    "forward+backward": ("forward", "backward"),
    "force_step": ("forward", "edge_backward", "joint_backward"),
}
PASSES = tuple(DIRECTIONS_OF)


def moved_bytes(workload: Workload, which: str) -> int:
    """Compulsory traffic of a pass: the fewest bytes that its kernels read and write."""
    graph = build_graph(workload.graph)
    size = (graph.num_edges, graph.num_nodes)
    return sum(workload.compulsory_bytes(direction, *size) for direction in DIRECTIONS_OF[which])
