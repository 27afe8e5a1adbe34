"""How the kernels of symmetric contractions are run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autotune.measure.autograd_passes import Call
from autotune.measure.reference.symmetric_contraction import ContractionReference, contraction_of, make_features
from autotune.measure.reference.tensor_product import Reference
from autotune.measure.runs.base import Run, Runs
from autotune.workload.kinds.symmetric_contraction import ContractionKind
from autotune.workload.tensors import Tensors
from autotune.workload.workload import Workload
from kernelgen.arithmetic.contraction import CONTRACTION_DIRECTIONS, contraction_double_backward
from kernelgen.kernels.knobs import Knobs
from kernelgen.ops.symmetric_contraction import build_contraction
from kernelgen.runtime.graph import EdgeOrder


class ContractionRuns(Runs):
    """Runs symmetric contractions."""

    operations = ContractionKind.operations

    def tensors(self, workload: Workload, device: Any) -> Tensors:
        return make_features(workload, device)

    def reference(self, workload: Workload, device: Any, tensors: Tensors) -> Reference:
        return ContractionReference(workload, device, tensors)

    def build(self, workload: Workload, schedules: Mapping[str, Knobs], device: str) -> Any:
        given: Any = dict(schedules)
        options: dict[str, Any] = {"dtype": getattr(torch, workload.dtype), "layout": workload.layout}
        return build_contraction(contraction_of(workload), given, device=device, **options)

    def specs(self, operator: Any, directions: Iterable[str]) -> list[Any]:
        names = tuple(directions)
        found = [operator.spec(CONTRACTION_DIRECTIONS[name]) for name in names]
        if "double_backward" in names:
            found.append(operator.spec(contraction_double_backward("x", "xw")))  # as a training step needs it
        return found

    def call(self, workload: Workload, operator: Any, tensors: Tensors, order: EdgeOrder | None) -> Call:
        elements = tensors.sender
        return lambda x, w: operator(x, w, elements)

    def run(
        self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool = False
    ) -> Run:
        asked, elements = CONTRACTION_DIRECTIONS[direction], tensors.sender
        # w is needed for its size by all directions.
        given = {name: getattr(tensors, name) for name in (*asked.operands, "w")}
        return lambda: operator.run(asked, given, elements, poison=poison)


RUNS = ContractionRuns()
