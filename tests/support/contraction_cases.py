"""Symmetric contractions as a plain sum of monomials in torch, with inputs for operators and kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.ops.symmetric_contraction import ContractionOperator, build_contraction
from kernelgen.problem.other_kinds import ContractionProblem

SMALL = ContractionProblem("0e+1o", "0e+1o", 2, 3)
Function = Callable[[Tensor, Tensor], Tensor]


def build_small(**options: object) -> ContractionOperator:
    """The operator of ``SMALL``, in float64 unless told otherwise."""
    return build_contraction(SMALL, **{"dtype": torch.float64, **options})


def by_component(problem: ContractionProblem, x: Tensor, layout: str) -> Tensor:
    """Features [nodes, dim_in * channels] as [nodes, dim_in, channels]."""
    if layout == "ir_mul":
        return x.view(len(x), problem.dim_in, problem.channels)
    return x.view(len(x), problem.channels, problem.dim_in).transpose(1, 2)


def from_components(problem: ContractionProblem, y: Tensor, layout: str) -> Tensor:
    """An output [nodes, dim_out, channels] as [nodes, dim_out * channels] in a layout."""
    if layout == "ir_mul":
        return y.flatten(1)
    return torch.cat(
        [y[:, block.offset : block.offset + block.dim].transpose(1, 2).flatten(1) for block in problem.out], 1
    )


def plain(problem: ContractionProblem, x: Tensor, w: Tensor, elements: Tensor, layout: str = "ir_mul") -> Tensor:
    """Each term by itself: coefficient, weight, factors."""
    features, weights = by_component(problem, x, layout), w[elements]
    # Also where no polynomial has an input, its gradient is zero.
    out = [0 * (features.sum(1) + weights.sum(1)) for _ in range(problem.dim_out)]
    for r, one in enumerate(polynomials(problem)):
        for m, terms in enumerate(one.components):
            at = problem.out[one.block].offset + m
            for monomial, coefficient in terms:
                term = coefficient * weights[:, r]
                for number in monomial:  # second derivatives of torch's prod divide by factors, which may be small
                    term = term * features[:, number]
                out[at] = out[at] + term
    return from_components(problem, torch.stack(out, 1), layout)


def some_elements(nodes: int, rows: int, index: torch.dtype = torch.int64) -> Tensor:
    """Unsorted; of three or more elements, the second and the last never occur."""
    occurring = [row for row in range(rows) if rows < 3 or row not in (1, rows - 1)]
    generator = torch.Generator().manual_seed(nodes)
    return torch.tensor(occurring)[torch.randint(len(occurring), (nodes,), generator=generator)].to(index)


def operands(problem: ContractionProblem, nodes: int, rows: int) -> dict[str, Tensor]:
    """Values by the names of a kernel's buffers: x, w, g, and tangents tx, tw."""
    generator = torch.Generator().manual_seed(nodes + rows)
    shapes = {
        "x": (nodes, problem.dim_in * problem.channels),
        "w": (rows, len(polynomials(problem)), problem.channels),
        "g": (nodes, problem.dim_out * problem.channels),
    }
    return {
        name: torch.randn(shapes[name[-1]], generator=generator, dtype=torch.float64)
        for name in ("x", "w", "g", "tx", "tw")
    }


def derivatives(function: Function, given: dict[str, Tensor], tangents: str = "xw") -> dict[str, Tensor]:
    """The value, first gradients (``x``, ``w``) and second ones (``2x``, ``2w``, ``2g``) for the given tangents."""
    x, w, g = (given[name].clone().requires_grad_() for name in "xwg")
    out = function(x, w)
    first = dict(zip("xw", torch.autograd.grad(out, (x, w), g, create_graph=True), strict=True))
    total = sum((first[slot] * given["t" + slot]).sum() for slot in tangents or "xw")
    second = torch.autograd.grad(total, (x, w, g), allow_unused=True, materialize_grads=True)
    found = {"out": out, **first, **{"2" + slot: grad for slot, grad in zip("xwg", second, strict=True)}}
    return {name: value.detach() for name, value in found.items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Each within the tolerance of its largest value."""
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        size = float(value.abs().max()) if value.numel() else 0.0
        error = float((found[name].detach().to(value) - value).abs().max()) if value.numel() else 0.0
        assert error <= tolerance * (size or 1.0), f"{name} differs by {error:.1e} of {size:.1e}"
