"""Kernels for GPUs whose text no schedule decides, which Python launches beside those of operators."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernelgen.emit.source import Source
from kernelgen.ops.contraction.elements import sums_source
from kernelgen.ops.edges import networks, tall_matrices
from kernelgen.ops.nodes import gates, matrices

# Features of an edge at which the packages' radial networks end.
HIDDEN = (8, 16, 32, 64, 128)
# Hidden features and layers of the packages' radial networks: MACE's three, SevenNet's two, NequIP's one or two.
NETWORKS = ((64, 1), (64, 2), (64, 3), (128, 1))


def node_sources(dtype: str) -> Iterator[Source]:
    """What happens at nodes, in float32 or float64: linear layers and products by element, gates, sums by element."""
    of_torch = getattr(torch, dtype)
    yield from (matrices.source(of_torch, of_weights) for of_weights in (False, True))
    yield gates.source(of_torch)
    yield sums_source(of_torch)


def edge_sources() -> Iterator[Source]:
    """Products of edges with the last matrix of the usual radial networks, and their hidden layers, in float32."""
    yield from tall_matrices.sources(HIDDEN)
    yield from networks.sources(NETWORKS)
