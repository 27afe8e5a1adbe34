"""Convolutions with weights ``h @ matrix``: random cases, and their derivatives by e3nn in float64."""

from __future__ import annotations

import dataclasses

import torch
from reference import Case, forward, make_case, relayout

from kernelgen.problem.tensor_product import TensorProductProblem


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


def rows_of(rows: torch.Tensor, irreps: str, layout: str) -> torch.Tensor:
    """Rows in mul_ir as float32 rows of a layout."""
    return (relayout(rows, irreps, to_ir_mul=True) if layout == "ir_mul" else rows).float().contiguous()
