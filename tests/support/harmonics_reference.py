"""The reference for tests of harmonics: e3nn in float64, its derivatives by autograd, and test vectors."""

from __future__ import annotations

import torch
from e3nn import o3
from reference import float64

from kernelgen.problem.other_kinds import HarmonicsProblem


def reference(
    problem: HarmonicsProblem, v: torch.Tensor, t: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, first gradient, and both second derivatives, by e3nn and autograd."""
    with float64():
        v, g = v.clone().requires_grad_(), g.clone().requires_grad_()
        values = o3.spherical_harmonics(list(problem.degrees), v, problem.normalize, problem.normalization)
        # A constant l = 0 has no graph; 0 * v gives it one.
        first = torch.autograd.grad(values + 0 * v[:, :1], v, g, create_graph=True)[0]
        second = torch.autograd.grad(first, (v, g), t, allow_unused=True, materialize_grads=True)
        return values.detach(), first.detach(), second[0], second[1]


def vectors(count: int = 60) -> torch.Tensor:
    """Random vectors of lengths 1e-3 to 1e3, along the axes (two are e3nn's poles), and close to the poles."""
    generator = torch.Generator().manual_seed(5)
    random = torch.nn.functional.normalize(torch.randn(count, 3, generator=generator, dtype=torch.float64))
    lengths = torch.logspace(-3, 3, count, dtype=torch.float64)[:, None]
    axes = torch.cat([torch.eye(3, dtype=torch.float64), -torch.eye(3, dtype=torch.float64)])
    near = torch.tensor([[1e-9, 1, 0], [0, -1, 1e-6], [1e-4, 2, 1e-4]], dtype=torch.float64)
    return torch.cat([random * lengths, axes, 0.01 * axes, 7 * axes, near])


def operands(problem: HarmonicsProblem, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tangent and a cotangent for each vector."""
    generator = torch.Generator().manual_seed(7)
    t = torch.randn(len(v), 3, generator=generator, dtype=torch.float64)
    return t, torch.randn(len(v), problem.dim_out, generator=generator, dtype=torch.float64)


def worst(found: torch.Tensor, expected: torch.Tensor, degrees: tuple[int, ...]) -> float:
    """Largest error of a vector, relative to the largest value of its block (1 for a gradient's three components)."""
    assert found.shape == expected.shape and torch.isfinite(expected).all() and torch.isfinite(found).all()
    errors = [0.0]
    sizes = [2 * degree + 1 for degree in degrees]
    for a, b in zip(found.split(sizes, 1), expected.split(sizes, 1), strict=True):
        error, size = (a - b).abs().amax(1), b.abs().amax(1)
        assert (error[size == 0] == 0).all(), "not zero where e3nn is"
        errors += (error[size > 0] / size[size > 0]).tolist()
    return max(errors)
