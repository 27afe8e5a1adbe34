"""Convolutions with weights ``h @ matrix``: random cases, and their derivatives by e3nn in float64."""

from __future__ import annotations

import dataclasses

import torch
from reference import Case, forward, make_case, relayout

from kernelgen.problem.product import TensorProductProblem

# Edges of each receiver. Shares of warps have 16 edges or fewer, so that the long ones are in up to seven of them.
GRAPHS = {
    "hubs": [70, 0, 3, 1, 0, 0, 45, 8, 2, 0, 0],
    "hubs-last": [0, 1, 5, 2, 0, 91],
    "whole-shares": [8, 8, 16, 0, 16, 16],
    "one-node": [50],
    "one-edge": [0, 1, 0],
    "fewer-edges-than-shares": [1, 2, 0],
    "most-have-none": [1, 0, 20, 0, 0] * 2 + [0] * 70,
}


@dataclasses.dataclass(frozen=True)
class RadialCase:
    """A case whose weights are the product of h [edges, hidden] and matrix [hidden, weights], all float64."""

    case: Case
    h: torch.Tensor
    matrix: torch.Tensor

    @property
    def problem(self) -> TensorProductProblem:
        return self.case.problem

    def expected(self, slots: str = "xyh") -> dict[str, torch.Tensor]:
        """The value ``out`` and the gradients of some of x, y, h and m (the matrix) by e3nn, in mul_ir."""
        given = self.case.tensors
        leaf = {"x": given["x"], "y": given["y"], "h": self.h, "m": self.matrix}
        leaf = {name: tensor.clone().requires_grad_() for name, tensor in leaf.items()}
        out = forward(self.case, leaf["x"], leaf["y"], leaf["h"] @ leaf["m"])
        found = torch.autograd.grad(out, [leaf[slot] for slot in slots], given["g"])
        return {"out": out.detach(), **dict(zip(slots, found, strict=True))}


def make_radial_case(
    problem: TensorProductProblem, hidden: int, *, range_of_h: float = 1.0, **sizes: int
) -> RadialCase:
    """A random case. range_of_h: edges' h differ by powers up to this; one edge has h = 0 if it is above 1."""
    case = make_case(problem, "conv", **sizes)
    generator = torch.Generator().manual_seed(hidden)
    edges = len(case.tensors["y"])
    h = torch.randn(edges, hidden, generator=generator, dtype=torch.float64)
    matrix = torch.randn(hidden, problem.weight_numel, generator=generator, dtype=torch.float64)
    if range_of_h > 1 and edges:
        h *= range_of_h ** torch.rand(edges, 1, generator=generator, dtype=torch.float64)
        h[0] = 0
    return RadialCase(case, h, matrix)


def case_of(problem: TensorProductProblem, degrees: list[int], hidden: int = 8, is_sorted: bool = False) -> RadialCase:
    """A random case with these numbers of edges of receivers."""
    receiver = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees))
    if not is_sorted:
        receiver = receiver[torch.randperm(len(receiver), generator=torch.Generator().manual_seed(1))]
    given = make_radial_case(problem, hidden, edges=len(receiver), num_out=len(degrees))
    return dataclasses.replace(given, case=dataclasses.replace(given.case, receiver=receiver))


def rows_of(rows: torch.Tensor, irreps: str, layout: str) -> torch.Tensor:
    """Rows in mul_ir as float32 rows of a layout."""
    return (relayout(rows, irreps, to_ir_mul=True) if layout == "ir_mul" else rows).float().contiguous()
