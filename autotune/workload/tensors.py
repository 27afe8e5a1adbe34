"""The tensors of a workload (operands, cotangent and tangents on a device), and conversions between layouts.

They are drawn from a seeded generator of the device: the same seed gives the same numbers on the same kind of device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autotune.workload.graphs import Graph, build_graph
from autotune.workload.workload import DTYPES, Workload
from kernelgen.problem.irreps import blocks_of


@dataclass(frozen=True, eq=False)
class Tensors:
    """Operands, cotangent ``g`` and tangents of one workload, all contiguous and on one device.

    Rows of x, tx, g and tg are nodes for ``conv`` (``num_nodes``), else edges; then sender and receiver are None.
    y and ty have a row per edge, and so have w and tw unless the weights are shared (then they are one row, 1-d).
    Harmonics have vectors x, their tangents tx, and g; the others are empty. Contractions have no y: rows of x and g
    are nodes, w is [elements, weights, channels], and sender has the element of each node.
    """

    x: torch.Tensor
    y: torch.Tensor
    w: torch.Tensor
    g: torch.Tensor
    tx: torch.Tensor
    ty: torch.Tensor
    tw: torch.Tensor
    tg: torch.Tensor
    sender: torch.Tensor | None
    receiver: torch.Tensor | None
    num_nodes: int

    @property
    def num_edges(self) -> int:
        return self.y.shape[0]


def make_tensors(workload: Workload, device: torch.device | str, seed: int = 0, graph: Graph | None = None) -> Tensors:
    """Random normal tensors for a workload; ``graph`` is built from the workload if not given."""
    graph = graph or build_graph(workload.graph)
    problem, device = workload.product, torch.device(device)
    edges, conv = graph.num_edges, workload.is_conv
    rows = graph.num_nodes if conv else edges
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=DTYPES[workload.dtype], device=device)

    weights = (problem.weight_numel,) if problem.shared_weights else (edges, problem.weight_numel)
    x, y, w, g = draw(rows, problem.dim_in1), draw(edges, problem.dim_in2), draw(*weights), draw(rows, problem.dim_out)
    tx, ty, tw = draw(rows, problem.dim_in1), draw(edges, problem.dim_in2), draw(*weights)
    tg = draw(rows, problem.dim_out)
    sender = graph.sender.to(device) if conv else None
    receiver = graph.receiver.to(device) if conv else None
    return Tensors(x, y, w, g, tx, ty, tw, tg, sender, receiver, rows)


def to_ir_mul(tensor: torch.Tensor, irreps: str) -> torch.Tensor:
    """Rearrange rows of ``mul_ir`` features (channel, then component: e3nn's) to ``ir_mul``; differentiable."""
    return _transpose(tensor, [(block.mul, block.dim) for block in blocks_of(irreps)])


def to_mul_ir(tensor: torch.Tensor, irreps: str) -> torch.Tensor:
    """Rearrange rows of ``ir_mul`` features (component, then channel) to ``mul_ir``; differentiable."""
    return _transpose(tensor, [(block.dim, block.mul) for block in blocks_of(irreps)])


def relayout(tensor: torch.Tensor, irreps: str, source: str, target: str) -> torch.Tensor:
    """Convert rows of features between layouts; returns the tensor itself if they agree."""
    if source == target:
        return tensor
    return to_ir_mul(tensor, irreps) if target == "ir_mul" else to_mul_ir(tensor, irreps)


def _transpose(tensor: torch.Tensor, shapes: list[tuple[int, int]]) -> torch.Tensor:
    rows = tensor.shape[:-1]
    parts = tensor.split([a * b for a, b in shapes], dim=-1)
    turned = [
        part.reshape(*rows, a, b).transpose(-1, -2).reshape(*rows, a * b)
        for part, (a, b) in zip(parts, shapes, strict=True)
    ]
    return torch.cat(turned, dim=-1) if turned else tensor
