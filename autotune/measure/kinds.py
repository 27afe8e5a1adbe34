"""The kinds of kernels with all that is asked of them where schedules are tried: one class a kind, one table.

A :class:`MeasuredKind` has tensors, float64 reference, operator, calls and search space, beside what
:mod:`autotune.workload.known_kinds` says of the kind, which is all that a model loads. A new kind adds its line to
``KINDS``.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from autotune.database.lookup import build_vectors
from autotune.measure import references
from autotune.measure.references import ContractionReference, contraction_of, make_features
from autotune.measure.space import Space, contraction_space, harmonics_space, radial_space, search_space
from autotune.measure.timing import Sampler
from autotune.workload.kind import KernelKind
from autotune.workload.known_kinds import (
    HARMONICS_OPERANDS,
    ContractionKind,
    HarmonicsKind,
    ProductKind,
    RadialKind,
    VectorsKind,
)
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
from kernelgen.runtime.graph import EdgeOrder, KnownGraphs, edge_order

# What is done once for a new graph, given senders and receivers with edges in any order.
GraphOrder = Callable[[Tensor, Tensor], Any]
ORDER_SAMPLES = 10
# Number of NaN elements around every operand of a trial; keeps rows of any dtype and vector width aligned.
MARGIN = 4096


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


def unordered(sender: Tensor, receiver: Tensor) -> tuple[Tensor, Tensor]:
    """The same edges in a random order, the same each time, as a program may give them."""
    shuffled = torch.randperm(len(sender), generator=torch.Generator().manual_seed(0)).to(sender.device)
    return sender[shuffled], receiver[shuffled]


def new_graph(operator: Any, num_nodes: int) -> GraphOrder:
    """What an operator does for a graph that it meets for the first time: order the edges, and check the indices."""
    product, nodes = getattr(operator, "product", operator), num_nodes

    def order(sender: Tensor, receiver: Tensor) -> Any:
        make = functools.partial(product.order, sender, receiver, nodes, nodes)
        return KnownGraphs().order(sender, receiver, (nodes, nodes, None), make)

    return order


def order_ms(order: GraphOrder | None, sender: Tensor, receiver: Tensor) -> float:
    """Median milliseconds of ordering these edges, given in random order; 0 for what needs no order."""
    if order is None:
        return 0.0
    given = unordered(sender, receiver)
    sampler = Sampler(lambda: order(*given), str(sender.device))
    sampler.warm_up()
    return statistics.median(sampler.take(ORDER_SAMPLES)) / 1e3


def order_of(tensors: Tensors) -> EdgeOrder | None:
    """The order by receiver and by sender, made once as in a model: no timed call may sort edges."""
    if tensors.receiver is None:
        return None
    return edge_order(tensors.receiver, tensors.num_nodes, is_sorted=True, sender=tensors.sender)


Call = Callable[..., Tensor]


class AutogradPasses:
    """Passes of ``call(x, y, w)`` on given tensors, or of fewer inputs: ``slots`` names them in order.

    tangents: slots whose gradients ``double_backward`` differentiates, None for all. forces: the one from whose
    gradient forces are computed. Autograd graphs are kept between calls, so that a derivative is timed alone.
    """

    def __init__(
        self, call: Call, tensors: Tensors, slots: str = "xyw", tangents: str | None = None, forces: str = "y"
    ) -> None:
        self._call = call
        self._tensors = tensors
        self._slots, self._differentiated, self._forces = slots, tangents or slots, slots.find(forces)
        # Detached tensors share storage, because weights with a row per edge can fill a tenth of a device.
        self._plain = tuple(getattr(tensors, slot) for slot in slots)
        self._inputs = [tensor.detach().requires_grad_() for tensor in self._plain]
        self._g = tensors.g.detach().requires_grad_()
        self._out: Tensor | None = None
        self._alone: dict[int, Tensor] = {}
        self._first: tuple[Tensor, ...] | None = None
        self._joint: tuple[Tensor, Tensor] | None = None

    def release(self) -> None:
        """Release the kept autograd graphs."""
        self._out = self._first = self._joint = None
        self._alone.clear()

    def forward(self) -> Tensor:
        """The value."""
        with torch.no_grad():
            return self._call(*self._plain)

    def backward(self) -> tuple[Tensor, ...]:
        """Gradients with respect to all inputs."""
        if self._out is None:
            self._out = self._call(*self._inputs)
        return torch.autograd.grad(self._out, self._inputs, self._tensors.g, retain_graph=True)

    def source_backward(self) -> Tensor:
        """The gradient with respect to x alone."""
        return self._gradient_alone(0)

    # The same, where forces come from it.
    feature_backward = source_backward

    def edge_backward(self) -> Tensor:
        """The gradient with respect to y alone, from which models compute forces."""
        return self._gradient_alone(1)

    def double_backward(self) -> tuple[Tensor, ...]:
        """Gradients of the first gradients, contracted with the tangents, with respect to all inputs and g."""
        if self._first is None:
            out = self._call(*self._inputs)
            inputs = [self._inputs[self._slots.index(slot)] for slot in self._differentiated]
            self._first = torch.autograd.grad(out, inputs, self._g, create_graph=True)
        tangents = self._tangents(self._differentiated)
        return torch.autograd.grad(self._first, [*self._inputs, self._g], tangents, retain_graph=True)

    def joint_backward(self) -> tuple[Tensor, ...]:
        """Gradients with respect to all inputs of a loss on the value and on one gradient: force_step's end."""
        if self._joint is None:
            self._joint = self._value_and_force_gradient()
        return torch.autograd.grad(self._joint, self._inputs, self._loss_tangents(), retain_graph=True)

    def forward_backward(self) -> tuple[Tensor, ...]:
        """One forward pass and the gradients with respect to all inputs."""
        return torch.autograd.grad(self._call(*self._inputs), self._inputs, self._tensors.g)

    def force_step(self) -> tuple[Tensor, ...]:
        """A training step on forces: value, gradient with respect to one input, gradients of a loss on both."""
        return torch.autograd.grad(self._value_and_force_gradient(), self._inputs, self._loss_tangents())

    def _gradient_alone(self, index: int) -> Tensor:
        """The gradient of one input. No other requires one: a product might compute unused gradients."""
        if index not in self._alone:
            inputs = list(self._plain)
            inputs[index] = self._inputs[index]
            self._alone[index] = self._call(*inputs)
        return torch.autograd.grad(self._alone[index], self._inputs[index], self._tensors.g, retain_graph=True)[0]

    def _value_and_force_gradient(self) -> tuple[Tensor, Tensor]:
        out = self._call(*self._inputs)
        return out, torch.autograd.grad(out, self._inputs[self._forces], self._tensors.g, create_graph=True)[0]

    def _loss_tangents(self) -> list[Tensor]:
        return self._tangents("g" + self._slots[self._forces])

    def _tangents(self, slots: str) -> list[Tensor]:
        return [getattr(self._tensors, "t" + slot) for slot in slots]


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
        return Space.of(spec, spec.schedule.choices)


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
