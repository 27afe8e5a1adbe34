"""Classify graphs by size and mean degree, in powers of two, and by skew; tuned entries are looked up by the class."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import torch

from autotune.errors import ConfigError
from autotune.workload.kinds.registry import CONVOLUTIONS, OPERATIONS
from kernelgen.device import DeviceFacts
from kernelgen.kernels.product.defaults import SMALL_GRAPH_EDGES, small_graph_edges
from kernelgen.problem.sizes import size_class

# A node is long from this many times the edges of a mean node, as a power of two.
LONG_NODE = 3
# Warps that a multiprocessor holds of a convolution's kernel, at least: 255 registers a lane leave room for eight.
WARPS_HELD = 8
# A GPU waits for a node with so many times the edges of a warp's share.
LONG_SHARE = 2


@dataclass(frozen=True)
class GraphClass:
    """Size and mean degree of a graph in powers of two; convolutions alone have a degree.

    log2_skew: how many times the edges of a mean node the longest has, rounded down; 0 if that is less than 8.
    """

    operation: str
    log2_edges: int
    log2_degree: int = 0
    log2_skew: int = 0

    @classmethod
    def of(cls, operation: str, num_edges: int, num_nodes: int) -> GraphClass:
        """The class of a graph; ``num_nodes`` counts the destinations."""
        if operation not in OPERATIONS:
            raise ConfigError(f"operation is {operation!r}; expected one of {OPERATIONS}")
        log2_edges, log2_degree = size_class(num_edges, num_nodes)
        return cls(operation, log2_edges, log2_degree if operation in CONVOLUTIONS else 0)

    @classmethod
    def of_graph(cls, operation: str, receiver: torch.Tensor, num_nodes: int) -> GraphClass:
        """The class of a graph with its skew. receiver: [num_edges]; a GPU is waited for. Small graphs have no skew."""
        found = cls.of(operation, len(receiver), num_nodes)
        if operation not in CONVOLUTIONS or 2**found.log2_edges <= SMALL_GRAPH_EDGES:
            return found
        counts = receiver.unique(return_counts=True)[1]
        skew = int(counts.max() * len(counts) // len(receiver)).bit_length() - 1
        return replace(found, log2_skew=skew) if skew >= LONG_NODE else found

    @property
    def text(self) -> str:
        """For example ``conv-e14-d5``, ``conv-e17-d5-s4`` with skew, ``plain-e16`` or ``harmonics-e20``."""
        degree = f"-d{self.log2_degree}" if self.operation in CONVOLUTIONS else ""
        return f"{self.operation}-e{self.log2_edges}{degree}" + (f"-s{self.log2_skew}" if self.log2_skew else "")

    @classmethod
    def parse(cls, text: str) -> GraphClass:
        """Inverse of :attr:`text`."""
        match = re.fullmatch(r"([a-z_]+)-e(\d{1,3})(?:-d(\d{1,3})(?:-s(\d{1,3}))?)?", text)
        # Those of convolutions have a degree, others have none.
        if not match or match[1] not in OPERATIONS or (match[1] in CONVOLUTIONS) != (match[3] is not None):
            raise ConfigError(f"{text!r} is not a graph class; expected for example 'conv-e14-d5' or 'plain-e16'")
        return cls(match[1], int(match[2]), int(match[3] or 0), int(match[4] or 0))

    def is_small(self, facts: DeviceFacts) -> bool:
        """Whether launches and latencies dominate on this device, not bandwidth."""
        return 2**self.log2_edges <= small_graph_edges(facts)

    def waits_for_longest(self, facts: DeviceFacts) -> bool:
        """Whether a GPU would wait for the node with most edges, if one worker took all edges of a node.

        The warps of all multiprocessors share the edges. One that takes twice its share ends last: it is alone then,
        but an edge takes it a latency of memory (0.7 us), about as long as with all others at work. On a graph of even
        degrees that is so where nodes are fewer than warps; nothing is gained there, so skew is needed too.
        """
        longest, share = 2.0 ** (self.log2_degree + self.log2_skew), 2.0**self.log2_edges / (facts.units * WARPS_HELD)
        return facts.backend == "cuda" and bool(self.log2_skew) and longest >= LONG_SHARE * share

    def distance(self, other: GraphClass) -> float:
        """How far apart two classes are, in factors of two; infinite between different operations."""
        if self.operation != other.operation:
            return math.inf
        skew = abs(self.log2_skew - other.log2_skew)
        return abs(self.log2_edges - other.log2_edges) + abs(self.log2_degree - other.log2_degree) + skew
