"""How the kernels of tensor products are run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autotune.measure.autograd_passes import Call
from autotune.measure.reference.tensor_product import Reference
from autotune.measure.runs.base import Run, Runs
from autotune.workload.kinds.tensor_product import ProductKind
from autotune.workload.tensors import Tensors, make_tensors
from autotune.workload.workload import Workload
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.ops.product import build
from kernelgen.runtime.graph import EdgeOrder


class ProductRuns(Runs):
    """Runs tensor products."""

    operations = ProductKind.operations

    def tensors(self, workload: Workload, device: Any) -> Tensors:
        return make_tensors(workload, device)

    def reference(self, workload: Workload, device: Any, tensors: Tensors) -> Reference:
        return Reference(workload, device, tensors)

    def build(self, workload: Workload, schedules: Mapping[str, Any], device: str) -> Any:
        return build(
            workload.product,
            dict(schedules) or None,
            operation=workload.operation,
            dtype=getattr(torch, workload.dtype),
            layout=workload.layout,
            device=device,
            deterministic=workload.deterministic,
        )

    def specs(self, operator: Any, directions: Iterable[str]) -> list[Any]:
        return [spec for name in directions for spec in operator.specs(name)]

    def call(self, workload: Workload, operator: Any, tensors: Tensors, order: EdgeOrder | None) -> Call:
        if not workload.is_conv:
            return operator
        edges = (tensors.sender, tensors.receiver)
        return lambda x, y, w: operator(x, y, w, *edges, num_out=tensors.num_nodes, order=order)

    def run(
        self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool = False
    ) -> Run:
        t, conv = tensors, operator.operation == "conv"
        edges: tuple[Any, ...] = (t.sender, t.receiver, t.num_nodes, order) if conv else (None,) * 4
        asked = DIRECTIONS[direction]
        given: dict[str, Any] = {"outputs": asked.outputs, "poison": poison}
        if direction == "forward":
            return lambda: {"g": operator.run_forward(t.x, t.y, t.w, *edges, poison=poison)}
        if not asked.tangents:
            return lambda: operator.run_backward(t.x, t.y, t.w, t.g, *edges, **given)
        tangents = {slot: getattr(t, "t" + slot) for slot in asked.tangents}
        return lambda: operator.run_double_backward(t.x, t.y, t.w, t.g, tangents, *edges, **given)


RUNS = ProductRuns()
