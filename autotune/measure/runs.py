"""How to run the kernels of each kind: tensors, float64 reference, operator and calls of one workload.

:func:`runs_of` gives the :class:`Runs` of an operation. :mod:`autotune.workload.kinds.base` chooses schedules.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from autotune.database.edge_vectors import build_vectors
from autotune.measure.autograd_passes import Call
from autotune.measure.reference.edge_vectors import VectorsReference, make_vector_tensors
from autotune.measure.reference.spherical_harmonics import HarmonicsReference, make_vectors
from autotune.measure.reference.tensor_product import Reference
from autotune.workload.kinds.edge_vectors import VectorsKind
from autotune.workload.kinds.spherical_harmonics import HarmonicsKind
from autotune.workload.kinds.tensor_product import ProductKind
from autotune.workload.tensors import Tensors, make_tensors
from autotune.workload.workload import Workload
from kernelgen.device import device_facts
from kernelgen.ops.harmonics_operator import build_harmonics
from kernelgen.ops.operator import build
from kernelgen.problem.edge_vectors import VectorProblem
from kernelgen.runtime.graph import EdgeOrder, edge_order
from kernelgen.schedule.knobs import Knobs
from kernelgen.terms.directions import DIRECTIONS, HARMONICS_DIRECTIONS

Run = Callable[[], dict[str, Tensor]]
# Number of NaN elements around every operand of a trial; keeps rows of any dtype and vector width aligned.
MARGIN = 4096


class Runs(ABC):
    """Runs the kernels of ``operations``. An *operator* is the object that runs the kernels of a problem."""

    operations: ClassVar[tuple[str, ...]]

    @abstractmethod
    def tensors(self, workload: Workload, device: Any) -> Tensors:
        """Make operands, cotangent and tangents."""

    @abstractmethod
    def reference(self, workload: Workload, device: Any, tensors: Tensors) -> Reference:
        """The float64 values of e3nn that outputs are compared with."""

    @abstractmethod
    def build(self, workload: Workload, schedules: Mapping[str, Knobs], device: str) -> Any:
        """The operator with these schedules by direction; other directions use the default."""

    @abstractmethod
    def specs(self, operator: Any, directions: Iterable[str]) -> list[Any]:
        """Specs of the kernels that an operator uses for some directions."""

    @abstractmethod
    def call(self, workload: Workload, operator: Any, tensors: Tensors, order: EdgeOrder | None) -> Call:
        """The operator as a differentiable function of its inputs."""

    @abstractmethod
    def run(
        self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool = False
    ) -> Run:
        """A function that runs one direction with all outputs, without autograd; outputs by slot (``g`` is the value).

        poison: fill outputs with NaN before the kernel runs.
        """


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


_BY_OPERATION: dict[str, Runs] = {
    operation: runs for runs in (ProductRuns(), HarmonicsRuns(), VectorsRuns()) for operation in runs.operations
}


def runs_of(operation: str) -> Runs:
    """The :class:`Runs` of an operation."""
    return _BY_OPERATION[operation]


def guarded(tensors: Tensors) -> Tensors:
    """The same values with NaN around every operand, so that out-of-bounds reads show in the outputs."""

    def guard(tensor: Tensor) -> Tensor:
        wide = tensor.new_full((tensor.numel() + 2 * MARGIN,), torch.nan)
        inner = wide[MARGIN : MARGIN + tensor.numel()].view(tensor.shape)
        return inner.copy_(tensor)

    guards: dict[str, Any] = {
        name: guard(getattr(tensors, name)) for name in ("x", "y", "w", "g", "tx", "ty", "tw", "tg")
    }
    return dataclasses.replace(tensors, **guards)


def order_of(tensors: Tensors) -> EdgeOrder | None:
    """The order by receiver and by sender, made once as in a model: no timed call may sort edges."""
    if tensors.receiver is None:
        return None
    return edge_order(tensors.receiver, tensors.num_nodes, is_sorted=True, sender=tensors.sender)
