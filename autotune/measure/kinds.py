"""The kinds of kernels with all that is asked of them where schedules are tried: one class a kind, one table.

A :class:`MeasuredKind` has tensors, float64 reference, operator, calls and search space, beside what
:mod:`autotune.workload.kinds` says of the kind, which is all that a model loads. A new kind adds its line to ``KINDS``.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from autotune.database.lookup import build_vectors
from autotune.measure import references
from autotune.measure.operations import Call
from autotune.measure.references import ContractionReference, contraction_of, make_features
from autotune.measure.space import Space, contraction_space, harmonics_space, radial_space, search_space
from autotune.workload.kinds.base import KernelKind
from autotune.workload.kinds.harmonics import HARMONICS_OPERANDS, HarmonicsKind, VectorsKind
from autotune.workload.kinds.radial_convolution import RadialKind
from autotune.workload.kinds.symmetric_contraction import ContractionKind
from autotune.workload.kinds.tensor_product import ProductKind
from autotune.workload.workload import Tensors, Workload, make_tensors
from kernelgen.arithmetic.contraction import contraction_double_backward
from kernelgen.arithmetic.directions import OPERANDS
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.kernels.radial.plan import RadialSpec
from kernelgen.ops.harmonics import build_harmonics
from kernelgen.ops.product import Operator, build
from kernelgen.ops.radial_convolution import FusedRadial, radial_product
from kernelgen.ops.symmetric_contraction import build_contraction
from kernelgen.problem.other_kinds import VectorProblem
from kernelgen.runtime.graph import EdgeOrder

Run = Callable[[], dict[str, Tensor]]


class MeasuredKind(KernelKind):
    """A kind whose kernels are run. An *operator* is the object that runs the kernels of a problem.

    reference: makes the float64 values of e3nn, of a workload, a device and tensors, that outputs are compared with.
    """

    reference: ClassVar[type[references.Reference]]

    @staticmethod
    @abstractmethod
    def tensors(workload: Workload, device: Any) -> Tensors:
        """Make operands, cotangent and tangents."""

    @abstractmethod
    def build(self, workload: Workload, schedules: Mapping[str, Any], device: str) -> Any:
        """The operator with these schedules by direction; other directions use the default."""

    def specs(self, operator: Any, directions: Iterable[str]) -> list[Any]:
        """Specs of the kernels that an operator uses for some directions."""
        return [spec for name in directions for spec in operator.specs(name)]

    def call(self, workload: Workload, operator: Any, tensors: Tensors, order: EdgeOrder | None) -> Call:
        """The operator as a differentiable function of its inputs."""
        if not workload.is_conv:
            return operator
        edges = (tensors.sender, tensors.receiver)
        return lambda x, y, w: operator(x, y, w, *edges, num_out=tensors.num_nodes, order=order)

    @abstractmethod
    def run(self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool) -> Run:
        """A function that runs one direction with all outputs, without autograd; outputs by slot (``g`` is the value).

        poison: fill outputs with NaN before the kernel runs.
        """

    def space(self, workload: Workload, direction: str, facts: DeviceFacts) -> Space:
        """The whole search space of one direction of a workload; here all choices of all knobs."""
        spec = workload.spec(direction, facts)
        return Space(spec, MappingProxyType({**spec.schedule.choices}))


class MeasuredProduct(ProductKind, MeasuredKind):
    tensors = staticmethod(make_tensors)
    reference = references.Reference

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

    def run(self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool) -> Run:
        t, asked = tensors, self.directions[direction]
        edges = (t.sender, t.receiver, t.num_nodes, order) if operator.is_conv else ()
        operands = tuple(getattr(t, name) if name in ("x", "y", *asked.operands) else None for name in OPERANDS)
        return lambda: operator.run(asked, operands, *edges, poison=poison)

    def space(self, workload: Workload, direction: str, facts: DeviceFacts) -> Space:
        kernel = (workload.product, workload.operation, direction, workload.dtype)
        skewed = workload.graph_class().waits_for_longest(facts)
        return search_space(*kernel, facts, workload.layout, workload.deterministic, workload.num_edges, skewed)


class MeasuredHarmonics(HarmonicsKind, MeasuredKind):
    tensors = staticmethod(references.make_vectors)
    reference = references.HarmonicsReference

    def build(self, workload: Workload, schedules: Mapping[str, Any], device: str) -> Any:
        dtype = getattr(torch, workload.dtype)
        return build_harmonics(workload.harmonics, dict(schedules), dtype=dtype, device=device)

    def run(self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool) -> Run:
        given = {name: getattr(tensors, name) for name in HARMONICS_OPERANDS[direction]}
        return lambda: operator.run(self.directions[direction], given, poison=poison)

    def space(self, workload: Workload, direction: str, facts: DeviceFacts) -> Space:
        return harmonics_space(workload.spec(direction, facts))


class MeasuredVectors(VectorsKind, MeasuredKind):
    """Convolutions of harmonics of edge vectors. The space: whether harmonics are formed inside a product or apart."""

    tensors = staticmethod(references.make_vector_tensors)
    reference = references.VectorsReference

    def build(self, workload: Workload, schedules: Mapping[str, Any], device: str) -> Any:
        problem = workload.problem
        assert isinstance(problem, VectorProblem)
        places = {name: schedule.harmonics for name, schedule in schedules.items()}
        kernel = (workload.dtype, workload.layout, device_facts(device))
        return build_vectors(problem, places, *kernel, device, workload.graph_class(), workload.deterministic)

    def run(self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool) -> Run:
        t = tensors
        operands = (t.x, None, t.y, None, t.w, None, None if direction == "forward" else t.g, None)
        edges = (t.sender, t.receiver, t.num_nodes, order)
        return lambda: operator.run_on(operator.graph(t.x, t.y, *edges), self.directions[direction], operands, poison)


class MeasuredContraction(ContractionKind, MeasuredKind):
    tensors = staticmethod(make_features)
    reference = ContractionReference

    def build(self, workload: Workload, schedules: Mapping[str, Any], device: str) -> Any:
        options: dict[str, Any] = {"dtype": getattr(torch, workload.dtype), "layout": workload.layout}
        return build_contraction(contraction_of(workload), dict(schedules), device=device, **options)

    def specs(self, operator: Any, directions: Iterable[str]) -> list[Any]:
        names = tuple(directions)
        of_training = [operator.spec(contraction_double_backward("x", "xw"))] if "double_backward" in names else []
        return [*super().specs(operator, names), *of_training]

    def call(self, workload: Workload, operator: Any, tensors: Tensors, order: EdgeOrder | None) -> Call:
        elements = tensors.sender
        return lambda x, w: operator(x, w, elements)

    def run(self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool) -> Run:
        asked, elements = self.directions[direction], tensors.sender
        # w is needed for its size by all directions.
        given = {name: getattr(tensors, name) for name in (*asked.operands, "w")}
        return lambda: operator.run(asked, given, elements, poison=poison)

    def space(self, workload: Workload, direction: str, facts: DeviceFacts) -> Space:
        return contraction_space(workload.spec(direction, facts), workload.num_edges)


class RadialOperator:
    """The kernels of a workload, and the operator of the product with weights in memory, for graphs."""

    def __init__(self, fused: FusedRadial, product: Operator) -> None:
        self.fused, self.product = fused, product

    def specs(self, direction: str) -> list[RadialSpec]:
        return [self.fused.spec(RadialKind.directions[direction])]

    def resources(self, direction: str) -> Mapping[str, Any]:
        """What a direction's kernel needs, as its compiler reports it."""
        return self.fused.kernel(RadialKind.directions[direction]).resources


class MeasuredRadial(RadialKind, MeasuredKind):
    """Convolutions that form their edge weights in registers."""

    tensors = staticmethod(references.make_radial_tensors)
    reference = references.RadialReference

    def build(self, workload: Workload, schedules: Mapping[str, Any], device: str) -> RadialOperator:
        problem, place = references.radial_problem(workload), torch.device(device)
        fused = FusedRadial(problem.product, problem.hidden, problem.accuracy, workload.layout, place, dict(schedules))
        kernel: dict[str, Any] = {"operation": "conv", "dtype": getattr(torch, workload.dtype)}
        return RadialOperator(fused, build(problem.product, layout=workload.layout, device=place, **kernel))

    def call(self, workload: Workload, operator: Any, tensors: Tensors, order: EdgeOrder | None) -> Call:
        assert tensors.sender is not None and tensors.receiver is not None
        rest = tensors.tw, tensors.sender, tensors.receiver, tensors.num_nodes, operator.product, tensors.num_edges
        return lambda x, y, h: radial_product(x, y, h, *rest, fused=operator.fused)

    def run(self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool) -> Run:
        t = tensors
        given = {name: getattr(t, name) for name in ("x", "y", "w", "g", "tw")}
        graph = operator.product.graph(t.x, t.y, t.sender, t.receiver, t.num_nodes, None)
        return lambda: operator.fused.run(self.directions[direction], given, graph, poison)

    def space(self, workload: Workload, direction: str, facts: DeviceFacts) -> Space:
        spec = workload.spec(direction, facts)
        return radial_space(dataclasses.replace(spec, schedule=self.default(spec, None)))


# A new kind of kernel adds its line.
KINDS: tuple[MeasuredKind, ...] = (
    MeasuredProduct(),
    MeasuredHarmonics(),
    MeasuredVectors(),
    MeasuredContraction(),
    MeasuredRadial(),
)
_BY_OPERATION = {operation: kind for kind in KINDS for operation in kind.operations}


def measured_kind(operation: str) -> MeasuredKind:
    return _BY_OPERATION[operation]


def space_of(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    """The whole search space of one direction of a workload."""
    return measured_kind(workload.operation).space(workload, direction, facts)
