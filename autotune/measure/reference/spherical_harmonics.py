"""Reference of spherical harmonics: test vectors, and e3nn's values and derivatives in float64.

Vectors are independent, so an evenly spread sample is compared, which includes the first and the last (and so all
positions in a block of threads or a machine vector); outputs of the others must be finite.
"""

from __future__ import annotations

from typing import Any

import torch

from autotune.measure.reference.tensor_product import CHUNK_ELEMENTS, Reference
from autotune.workload.tensors import Tensors
from autotune.workload.workload import DTYPES, Workload
from kernelgen.arithmetic.directions import HARMONICS_DIRECTIONS, HarmonicsDirection
from kernelgen.compat import o3
from kernelgen.problem.harmonics import HarmonicsProblem

MAX_VECTORS = {"cpu": 8192, "cuda": 65536}


def e3nn_harmonics(problem: HarmonicsProblem) -> o3.SphericalHarmonics:
    """e3nn's module."""
    return o3.SphericalHarmonics(list(problem.degrees), problem.normalize, problem.normalization)


def make_vectors(workload: Workload, device: torch.device | str, seed: int = 0) -> Tensors:
    """Vectors x of random directions and lengths 0.5 to 1.5, so that none dominates; their tangents and g.

    One vector per edge of the workload's graph. Everything else is empty.
    """
    count, dim, device = workload.num_edges, workload.harmonics.dim_out, torch.device(device)
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(count, width, generator=generator, dtype=DTYPES[workload.dtype], device=device)

    directions, g, tx, none = draw(3), draw(dim), draw(3), draw(0)
    lengths = 0.5 + torch.rand(count, 1, generator=generator, dtype=directions.dtype, device=device)
    x = torch.nn.functional.normalize(directions) * lengths
    return Tensors(x, none, none, g, tx, none, none, none, None, None, count)


class HarmonicsReference(Reference):
    """Exact values for one workload's vectors."""

    def __init__(
        self,
        workload: Workload,
        device: torch.device | str,
        tensors: Tensors,
        max_edges: int | None = None,
    ) -> None:
        self.harmonics, self.is_conv = workload.harmonics, False
        self.device = torch.device(device)
        self._expected = {}
        self._choose_rows(tensors, max_edges or MAX_VECTORS[self.device.type])
        self._shapes = {"x": list(tensors.x.shape), "g": list(tensors.g.shape)}
        self._operands = {name: getattr(tensors, name)[self.edges] for name in ("x", "g", "tx")}

    def rows(self, slot: str) -> torch.Tensor:
        return self.edges

    def direction(self, name: Any) -> HarmonicsDirection:
        return HARMONICS_DIRECTIONS[name] if isinstance(name, str) else name

    def _widths(self, slot: str) -> list[int]:
        return [3] if slot == "x" else [2 * degree + 1 for degree in self.harmonics.degrees]

    def _compute(self, direction: Any) -> dict[str, torch.Tensor]:
        size = max(1, CHUNK_ELEMENTS[self.device.type] // (8 * self.harmonics.dim_out))
        chunks = torch.arange(len(self.edges), device=self.device).split(size)
        pieces = [self._chunk(direction, chunk) for chunk in chunks]
        return {slot: torch.cat([piece[slot] for piece in pieces]) for slot in direction.outputs}

    def _chunk(self, direction: Any, chunk: torch.Tensor) -> dict[str, torch.Tensor]:
        v, g, t = (self._operands[name][chunk].to(torch.float64) for name in ("x", "g", "tx"))
        v, g = v.requires_grad_(), g.requires_grad_()
        # Degree 0 alone has no autograd graph; 0 * v gives it one.
        values = e3nn_harmonics(self.harmonics)(v) + 0 * v[:, :1]
        if direction.name == "forward":
            return {"g": values.detach()}
        (first,) = torch.autograd.grad(values, v, g, create_graph=True)
        if direction.name == "backward":
            return {"x": first.detach()}
        second = torch.autograd.grad(first, (v, g), t, allow_unused=True, materialize_grads=True)
        return dict(zip("xg", second, strict=True))
