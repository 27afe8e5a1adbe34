"""Classify graphs by size and mean degree, in powers of two; tuned entries are looked up by the class."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autotune.errors import ConfigError
from autotune.workload.kinds.registry import CONVOLUTIONS, OPERATIONS
from kernelgen.device import DeviceFacts
from kernelgen.plan.defaults import small_graph_edges
from kernelgen.plan.size_class import size_class


@dataclass(frozen=True)
class GraphClass:
    """Size and mean degree of a graph in powers of two; convolutions alone have a degree."""

    operation: str
    log2_edges: int
    log2_degree: int = 0

    @classmethod
    def of(cls, operation: str, num_edges: int, num_nodes: int) -> GraphClass:
        """The class of a graph; ``num_nodes`` counts the destinations."""
        if operation not in OPERATIONS:
            raise ConfigError(f"operation is {operation!r}; expected one of {OPERATIONS}")
        log2_edges, log2_degree = size_class(num_edges, num_nodes)
        return cls(operation, log2_edges, log2_degree if operation in CONVOLUTIONS else 0)

    @property
    def text(self) -> str:
        """For example ``conv-e14-d5``, ``plain-e16`` or ``harmonics-e20``."""
        return f"{self.operation}-e{self.log2_edges}" + (
            f"-d{self.log2_degree}" if self.operation in CONVOLUTIONS else ""
        )

    @classmethod
    def parse(cls, text: str) -> GraphClass:
        """Inverse of :attr:`text`."""
        match = re.fullmatch(r"([a-z_]+)-e(\d{1,3})(?:-d(\d{1,3}))?", text)
        # Those of convolutions have a degree, others have none.
        if not match or match[1] not in OPERATIONS or (match[1] in CONVOLUTIONS) != (match[3] is not None):
            raise ConfigError(f"{text!r} is not a graph class; expected for example 'conv-e14-d5' or 'plain-e16'")
        return cls(match[1], int(match[2]), int(match[3] or 0))

    def is_small(self, facts: DeviceFacts) -> bool:
        """Whether launches and latencies dominate on this device, not bandwidth."""
        return 2**self.log2_edges <= small_graph_edges(facts)

    def distance(self, other: GraphClass) -> float:
        """How far apart two classes are, in factors of two; infinite between different operations."""
        if self.operation != other.operation:
            return math.inf
        return abs(self.log2_edges - other.log2_edges) + abs(self.log2_degree - other.log2_degree)
