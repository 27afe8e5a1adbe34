"""A network with one convolution, whose energies and forces a test computes in milliseconds."""

from __future__ import annotations

import torch

from autotune.modules.convolution import TensorProductConv
from autotune.workload.graphs import GraphSpec, RandomNeighbours, build_graph

NODES, EDGES = 40, 700
GRAPH = GraphSpec("small", RandomNeighbours(NODES, EDGES))


class SmallNet(torch.nn.Module):
    """Energy from positions and edges; the harmonics are e3nn's convention of l = 1, so that gradients flow."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = TensorProductConv("4x0e+4x1o", "0e+1o", filter_irreps_out="0e+1o", **options)  # type: ignore[arg-type]
        self.features = torch.nn.Parameter(torch.randn(1, 16))
        self.radial = torch.nn.Linear(1, self.conv.weight_numel)
        self.out = torch.nn.Linear(self.conv.irreps_out.dim, 1)

    def forward(self, positions: torch.Tensor, sender: torch.Tensor, receiver: torch.Tensor) -> torch.Tensor:
        vectors = positions[receiver] - positions[sender]
        lengths = (vectors.square().sum(1, keepdim=True) + 1e-3).sqrt()
        attrs = torch.cat([torch.ones_like(lengths), vectors / lengths], 1)
        nodes = self.features.expand(len(positions), -1)
        return self.out(self.conv(nodes, attrs, self.radial(lengths), sender, receiver)).sum()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions that require gradients, sender and receiver."""
    graph = build_graph(GRAPH)
    positions = torch.randn(NODES, 3, generator=torch.Generator().manual_seed(0))
    return positions.requires_grad_(), graph.sender, graph.receiver


def net_for_commands() -> tuple[SmallNet, tuple[torch.Tensor, ...]]:
    """For ``equitune tune model small_net:net_for_commands``."""
    return SmallNet(), batch()
