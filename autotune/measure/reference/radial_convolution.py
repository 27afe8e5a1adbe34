"""Reference of radial convolutions: test tensors, and e3nn's values with weights ``h @ matrix`` in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from autotune.measure.reference.tensor_product import Reference, e3nn_product
from autotune.workload.graphs import build_graph
from autotune.workload.tensors import Tensors
from autotune.workload.workload import DTYPES, Workload
from kernelgen.problem.product import RadialProblem


def radial_problem(workload: Workload) -> RadialProblem:
    """The problem of a workload of operation ``radial``."""
    assert isinstance(workload.problem, RadialProblem)
    return workload.problem


def make_radial_tensors(workload: Workload, device: torch.device | str, seed: int = 0) -> Tensors:
    """Random normal tensors: w is h [edges, hidden], tw the matrix [hidden, weights], scaled to weights of size 1."""
    problem, graph, device = radial_problem(workload), build_graph(workload.graph), torch.device(device)
    product, edges, nodes = problem.product, graph.num_edges, graph.num_nodes
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=DTYPES[workload.dtype], device=device)

    x, y, h, g = (
        draw(nodes, product.dim_in1),
        draw(edges, product.dim_in2),
        draw(edges, problem.hidden),
        draw(nodes, product.dim_out),
    )
    matrix = draw(problem.hidden, product.weight_numel) / problem.hidden**0.5
    none = draw(0, 1)  # first derivatives alone: no tangents
    return Tensors(x, y, h, g, none, none, matrix, none, graph.sender.to(device), graph.receiver.to(device), nodes)


class RadialReference(Reference):
    """Exact values for one workload, with gradients of h in the place of those of weights."""

    def __init__(self, workload: Workload, device: torch.device | str, tensors: Tensors) -> None:
        self._hidden, self._matrix = radial_problem(workload).hidden, tensors.tw.double()
        super().__init__(workload, device, tensors)

    @property
    def dim_w(self) -> int:
        return self._hidden

    def _keep_rows(self, tensors: Tensors) -> None:
        of_slot = {"t" + slot: getattr(tensors, slot) for slot in "xywg"}  # not used
        super()._keep_rows(dataclasses.replace(tensors, **of_slot))

    def _widths(self, slot: str) -> list[int]:
        return [self._hidden] if slot == "w" else super()._widths(slot)

    def _make_product(self) -> Callable[..., torch.Tensor]:
        product = e3nn_product(self.problem, torch.float64, self.device)
        return lambda x, y, h: product(x, y, h @ self._matrix)
