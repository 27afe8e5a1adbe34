"""Products with harmonics of vectors, and their reference by e3nn."""

from __future__ import annotations

import dataclasses

import torch
from e3nn import o3
from reference import Case, forward, make_case

from kernelgen.arithmetic.directions import Direction
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.problem.product import TensorProductProblem

PRODUCT = TensorProductProblem.channelwise("6x0e+6x1o", "0e+1o+2e", "0e+1o+2e")


def vectors_case(operation: str, problem: TensorProductProblem = PRODUCT, **sizes: int) -> Case:
    """A case with vectors instead of y; one of them is zero."""
    case = make_case(problem, operation, **sizes)
    vectors = case.tensors["y"][:, :3].clone(memory_format=torch.contiguous_format)
    vectors[2] = 0
    return dataclasses.replace(case, tensors=case.tensors | {"y": vectors})


def expected(case: Case, harmonics: HarmonicsProblem, direction: Direction) -> dict[str, torch.Tensor]:
    """The results of a direction by e3nn, with autograd through both steps."""
    leaf = {name: case.tensors[name].clone().requires_grad_() for name in "xyw"}
    y = o3.spherical_harmonics(list(harmonics.degrees), leaf["y"], harmonics.normalize, harmonics.normalization)
    out = forward(case, leaf["x"], y, leaf["w"])
    if direction.outputs == "g":
        return {"g": out.detach()}
    found = torch.autograd.grad(out, [leaf[slot] for slot in direction.outputs], case.tensors["g"])
    return dict(zip(direction.outputs, found, strict=True))


def without_zero_vector(slot: str, rows: torch.Tensor) -> torch.Tensor:
    """Drop the row of the zero vector, whose gradient (1e12 times a constant) would hide all others in a norm."""
    return torch.cat([rows[:2], rows[3:]]) if slot == "y" else rows
