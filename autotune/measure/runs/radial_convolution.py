"""How convolutions that form their edge weights in registers are run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autotune.measure.autograd_passes import Call
from autotune.measure.reference.radial_convolution import RadialReference, make_radial_tensors, radial_problem
from autotune.measure.reference.tensor_product import Reference
from autotune.measure.runs.base import Run, Runs
from autotune.workload.kinds.radial_convolution import RadialKind
from autotune.workload.tensors import Tensors
from autotune.workload.workload import Workload
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.ops.product import Operator, build
from kernelgen.ops.radial_convolution import FusedRadial, radial_product
from kernelgen.runtime.graph import EdgeOrder


class RadialOperator:
    """The kernels of a workload, and the operator of the product with weights in memory, for graphs."""

    def __init__(self, fused: FusedRadial, product: Operator) -> None:
        self.fused, self.product = fused, product

    def resources(self, direction: str) -> Mapping[str, Any]:
        """What a direction's kernel needs, as its compiler reports it."""
        return self.fused.kernel(DIRECTIONS[direction]).resources


class RadialRuns(Runs):
    """Runs radial convolutions."""

    operations = RadialKind.operations

    def tensors(self, workload: Workload, device: Any) -> Tensors:
        return make_radial_tensors(workload, device)

    def reference(self, workload: Workload, device: Any, tensors: Tensors) -> Reference:
        return RadialReference(workload, device, tensors)

    def build(self, workload: Workload, schedules: Mapping[str, Any], device: str) -> RadialOperator:
        problem, place = radial_problem(workload), torch.device(device)
        fused = FusedRadial(problem.product, problem.hidden, problem.accuracy, workload.layout, place, dict(schedules))
        kernel: dict[str, Any] = {"operation": "conv", "dtype": getattr(torch, workload.dtype)}
        return RadialOperator(fused, build(problem.product, layout=workload.layout, device=place, **kernel))

    def specs(self, operator: Any, directions: Iterable[str]) -> list[Any]:
        return [operator.fused.spec(DIRECTIONS[name]) for name in directions]

    def call(self, workload: Workload, operator: Any, tensors: Tensors, order: EdgeOrder | None) -> Call:
        assert tensors.sender is not None and tensors.receiver is not None
        rest = tensors.tw, tensors.sender, tensors.receiver, tensors.num_nodes, operator.product, tensors.num_edges
        return lambda x, y, h: radial_product(x, y, h, *rest, fused=operator.fused)

    def run(
        self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool = False
    ) -> Run:
        t, asked = tensors, DIRECTIONS[direction]
        given = {name: getattr(t, name) for name in ("x", "y", "w", "g", "tw")}
        graph = operator.product.graph(t.x, t.y, t.sender, t.receiver, t.num_nodes, None)
        return lambda: operator.fused.run(asked, given, graph, poison)


RUNS = RadialRuns()
