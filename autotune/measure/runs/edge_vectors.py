"""How convolutions of harmonics of edge vectors are run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.database.edge_vectors import build_vectors
from autotune.measure.reference.edge_vectors import VectorsReference, make_vector_tensors
from autotune.measure.reference.tensor_product import Reference
from autotune.measure.runs.base import Run
from autotune.measure.runs.tensor_product import ProductRuns
from autotune.workload.kinds.edge_vectors import VectorsKind
from autotune.workload.tensors import Tensors
from autotune.workload.workload import Workload
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import device_facts
from kernelgen.problem.harmonics import VectorProblem
from kernelgen.runtime.graph import EdgeOrder


class VectorsRuns(ProductRuns):
    """Runs convolutions of harmonics of edge vectors."""

    operations = VectorsKind.operations

    def tensors(self, workload: Workload, device: Any) -> Tensors:
        return make_vector_tensors(workload, device)

    def reference(self, workload: Workload, device: Any, tensors: Tensors) -> Reference:
        return VectorsReference(workload, device, tensors)

    def build(self, workload: Workload, schedules: Mapping[str, Any], device: str) -> Any:
        problem = workload.problem
        assert isinstance(problem, VectorProblem)
        places = {name: schedule.harmonics for name, schedule in schedules.items()}
        kernel = (workload.dtype, workload.layout, device_facts(device))
        return build_vectors(problem, places, *kernel, device, workload.graph_class(), workload.deterministic)

    def run(
        self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool = False
    ) -> Run:
        t = tensors
        operands = (t.x, None, t.y, None, t.w, None, None if direction == "forward" else t.g, None)
        edges = (t.sender, t.receiver, t.num_nodes, order)
        return lambda: operator.run_on(operator.graph(t.x, t.y, *edges), DIRECTIONS[direction], operands, poison)


RUNS = VectorsRuns()
