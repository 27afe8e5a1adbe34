"""How the kernels of spherical harmonics are run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autotune.measure.autograd_passes import Call
from autotune.measure.reference.spherical_harmonics import HarmonicsReference, make_vectors
from autotune.measure.reference.tensor_product import Reference
from autotune.measure.runs.base import Run, Runs
from autotune.workload.kinds.spherical_harmonics import HarmonicsKind
from autotune.workload.tensors import Tensors
from autotune.workload.workload import Workload
from kernelgen.arithmetic.directions import HARMONICS_DIRECTIONS
from kernelgen.kernels.knobs import Knobs
from kernelgen.ops.harmonics import build_harmonics
from kernelgen.runtime.graph import EdgeOrder


class HarmonicsRuns(Runs):
    """Runs spherical harmonics."""

    operations = HarmonicsKind.operations

    def tensors(self, workload: Workload, device: Any) -> Tensors:
        return make_vectors(workload, device)

    def reference(self, workload: Workload, device: Any, tensors: Tensors) -> Reference:
        return HarmonicsReference(workload, device, tensors)

    def build(self, workload: Workload, schedules: Mapping[str, Knobs], device: str) -> Any:
        given: Any = dict(schedules)
        return build_harmonics(workload.harmonics, given, dtype=getattr(torch, workload.dtype), device=device)

    def specs(self, operator: Any, directions: Iterable[str]) -> list[Any]:
        return [operator.spec(HARMONICS_DIRECTIONS[name]) for name in directions]

    def call(self, workload: Workload, operator: Any, tensors: Tensors, order: EdgeOrder | None) -> Call:
        return operator

    def run(
        self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool = False
    ) -> Run:
        v, g, t = tensors.x, tensors.g, tensors.tx
        if direction == "forward":
            return lambda: {"g": operator.run_forward(v, poison=poison)}
        if direction == "backward":
            return lambda: {"x": operator.run_backward(v, g, poison=poison)}
        return lambda: operator.run_double_backward(v, g, t, poison=poison)


RUNS = HarmonicsRuns()
