"""MACE's convolution: gather by sender, product with edges' attributes, sum by receiver; a block for each path."""

from __future__ import annotations

from typing import Any

import torch
from mace_core.clebsch_gordan.irreps import Irreps
from mace_core.clebsch_gordan.real_basis import wigner_3j_real
from mace_core.kernels.capabilities import UnsupportedDescriptorError
from mace_core.kernels.paths import channelwise_paths
from torch import Tensor

from autotune.modules.convolution import TensorProductConv
from kernelgen.compat import o3


class BackendConvolution(torch.nn.Module):
    """Node features, edge attributes, weights ``[edges, paths, channels]``, senders, receivers, number of nodes ->
    ``[nodes, paths' components * channels]``; features in ``ir_mul``.
    """

    signs: Tensor | None

    def __init__(self, descriptor: Any) -> None:
        super().__init__()
        channels = descriptor.num_features
        nodes, edges = (Irreps.parse(irreps).terms for irreps in (descriptor.irreps_node, descriptor.irreps_edge))
        paths = channelwise_paths(descriptor.irreps_node, descriptor.irreps_edge, descriptor.irreps_out)
        # With a block of its own for each path, e3nn's normalisation is MACE's: the root of the block's dimension.
        self.convolution = TensorProductConv(
            "+".join(f"{channels}x{irrep}" for _, irrep in nodes),
            descriptor.irreps_edge,
            "+".join(f"{channels}x{path.irrep}" for path in paths),
            [(path.node_term, path.edge_term, place, "uvu", True) for place, path in enumerate(paths)],
            layout="ir_mul",
        )
        signs = [
            _sign(path.irrep.degree, nodes[path.node_term][1].degree, edges[path.edge_term][1].degree) for path in paths
        ]
        rows = [channels * path.irrep.dimension for path in paths]
        row = torch.tensor(signs, dtype=torch.float64).repeat_interleave(torch.tensor(rows))
        # Multiplied into the sums over edges, which are fewer than the weights.
        self.register_buffer("signs", None if all(sign > 0 for sign in signs) else row, persistent=False)

    def forward(
        self, features: Tensor, attributes: Tensor, weights: Tensor, sender: Tensor, receiver: Tensor, num_nodes: int
    ) -> Tensor:
        found = self.convolution(features, attributes, weights.flatten(1), sender, receiver, num_nodes=num_nodes)
        return found if self.signs is None else found * self.signs.to(found.dtype)

    @property
    def num_paths(self) -> int:
        """Weights of an edge and channel."""
        return len(self.convolution.problem.paths)


def _sign(out: int, node: int, edge: int) -> int:
    """Of MACE's coupling against e3nn's, which the kernels have: each is free to choose it."""
    mine = o3.wigner_3j(node, edge, out, dtype=torch.float64)
    theirs = torch.from_numpy(wigner_3j_real(out, node, edge)).permute(1, 2, 0)
    ratio = float((mine * theirs).sum())
    if abs(abs(ratio) - 1) > 1e-8:
        raise UnsupportedDescriptorError(
            f"mace_core couples degrees {node} and {edge} to {out} in another basis than e3nn's (overlap {ratio:.3g}, "
            "expected 1 or -1); build this model with MACE's reference backend"
        )
    return 1 if ratio > 0 else -1
