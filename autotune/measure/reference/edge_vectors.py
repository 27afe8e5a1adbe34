"""Reference of convolutions of edge vectors: test tensors, and e3nn's values through harmonics and product."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from autotune.measure.reference.spherical_harmonics import e3nn_harmonics
from autotune.measure.reference.tensor_product import Reference, e3nn_product
from autotune.workload.tensors import Tensors, make_tensors
from autotune.workload.workload import Workload
from kernelgen.problem.harmonics import VectorProblem


def make_vector_tensors(workload: Workload, device: torch.device | str, seed: int = 0) -> Tensors:
    """As for the product, with vectors y (tangents ty) of lengths 0.5 to 1.5, so that none dominates."""
    tensors = make_tensors(workload, device, seed)
    generator = torch.Generator(device=tensors.y.device).manual_seed(seed + 1)

    def draw(width: int) -> torch.Tensor:
        shape = (tensors.num_edges, width)
        return torch.randn(*shape, generator=generator, dtype=tensors.y.dtype, device=tensors.y.device)

    directions, tangents = draw(3), draw(3)
    lengths = 0.5 + torch.rand(tensors.num_edges, 1, generator=generator, dtype=tangents.dtype, device=tangents.device)
    return dataclasses.replace(tensors, y=torch.nn.functional.normalize(directions) * lengths, ty=tangents)


class VectorsReference(Reference):
    """Exact values for one workload with vectors ``y``."""

    @property
    def dim_y(self) -> int:
        return 3

    def _widths(self, slot: str) -> list[int]:
        return [3] if slot == "y" else super()._widths(slot)

    def _make_product(self) -> Callable[..., torch.Tensor]:
        product = e3nn_product(self.problem, torch.float64, self.device)
        assert isinstance(self.workload.problem, VectorProblem)
        harmonics = e3nn_harmonics(self.workload.problem.harmonics)
        return lambda x, v, w: product(x, harmonics(v), w)
