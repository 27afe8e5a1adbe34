"""The operator of symmetric contractions, a differentiable torch function.

``build_contraction`` makes a :class:`ContractionOperator`. Its ``forward`` uses ``kernelgen.ops.contraction.autograd``.
Kernels compile at first use, one for each direction, tangents and set of wanted gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernelgen.device import device_facts
from kernelgen.errors import InputError
from kernelgen.ops.base import DTYPES, RegisteredOperator
from kernelgen.ops.contraction.autograd import contraction
from kernelgen.ops.contraction.elements import check_range, node_order, sums_by_element
from kernelgen.ops.contraction.torch_ops import Maybe
from kernelgen.ops.registry import rebuilds, register
from kernelgen.plan.symmetric_contraction import default_contraction_schedule, task_nodes
from kernelgen.problem.symmetric_contraction import ContractionProblem
from kernelgen.runtime.allocation import empty, zeros
from kernelgen.runtime.arguments import aligned
from kernelgen.runtime.kernel import Kernel, load_kernel
from kernelgen.schedule.kernel_spec import BUFFERS
from kernelgen.schedule.symmetric_contraction import (
    ContractionSchedule,
    ContractionSpec,
    contraction_schedule_from_dict,
    in_fixed_order,
)
from kernelgen.terms.contraction_statements import CONTRACTION_DIRECTIONS, ContractionDirection
from kernelgen.terms.equivariant_polynomials import polynomials
from kernelgen.watchers import WATCHERS, tell, tell_of_preparing

Schedules = ContractionSchedule | Mapping[str, ContractionSchedule] | None
_PLACE = {name: place for place, name in enumerate(BUFFERS)}
_INDICES = {torch.int32: "int32", torch.int64: "int64"}


def build_contraction(
    problem: ContractionProblem,
    schedule: Schedules = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str = "ir_mul",
) -> ContractionOperator:
    """The operator of a symmetric contraction.

        >>> operator = build_contraction(ContractionProblem("0e+1o+2e+3o", "0e+1o", 3, 128))
        >>> out = operator(x, w, elements)     # [nodes, (1 + 3) * 128], differentiable twice in x and w

    schedule: one for every direction, or by direction name (``CONTRACTION_DIRECTIONS``); directions without one get
    the default schedule. layout: of features and outputs, see ``ContractionSpec``. Raises ScheduleError for an illegal
    schedule or layout, InputError for a dtype other than float32 and float64.

    On a GPU gradients of w are summed in no fixed order, unless ``torch.use_deterministic_algorithms(True)`` is on:
    then all results repeat bit by bit, and rows of sums take more memory.
    """
    return register(ContractionOperator(problem, schedule, dtype, torch.device(device), layout))


def rebuild_contraction(text: str) -> ContractionOperator:
    """The operator with this ``ContractionOperator.text``."""
    data = json.loads(text)
    return build_contraction(
        ContractionProblem.from_key(data["problem"]),
        {name: contraction_schedule_from_dict(knobs) for name, knobs in data["schedules"].items()},
        dtype=getattr(torch, data["dtype"]),
        device=data["device"],
        layout=data["layout"],
    )


class ContractionOperator(RegisteredOperator):
    """A symmetric contraction with its schedules. Call it like a function; it is differentiable twice.

    num_weights: weights of an element and a channel, in the order of ``equivariant_polynomials.polynomials``.
    """

    directions = CONTRACTION_DIRECTIONS

    def __init__(
        self,
        problem: ContractionProblem,
        schedule: Schedules,
        dtype: torch.dtype,
        device: torch.device,
        layout: str,
    ) -> None:
        if dtype not in DTYPES:
            raise InputError(f"dtype is {dtype}; expected torch.float32 or torch.float64")
        self.problem, self.dtype, self.device, self.layout = problem, dtype, device, layout
        self.num_weights = len(polynomials(problem))
        self.widths = {"x": problem.dim_in * problem.channels, "g": problem.dim_out * problem.channels}
        self.schedules = self._complete(schedule)
        self.text = json.dumps(
            {
                "kind": "contraction",
                "problem": problem.key,
                "dtype": DTYPES[dtype],
                "device": device.type,
                "layout": layout,
                "schedules": {name: schedule.to_dict() for name, schedule in self.schedules.items()},
            },
            sort_keys=True,
        )
        self._kernels: dict[tuple[ContractionDirection, str, int, bool], Kernel] = {}

    def forward(self, x: Tensor, w: Tensor, elements: Tensor) -> Tensor:
        """The contraction [nodes, dim_out * channels], differentiable twice with respect to x and w.

        x [nodes, dim_in * channels]; w [elements, num_weights, channels]; elements [nodes], int32 or int64: the row of
        w of each node. Raises InputError for other shapes, dtypes and devices, and for indices out of range (on a GPU
        a device-side assertion).
        """
        if not isinstance(elements, Tensor):
            raise InputError(
                f"elements is of type {type(elements).__name__}; expected a tensor of int32 or int64 (nodes,): make "
                "one with torch.as_tensor(elements, device=...)"
            )
        return contraction(x, w, elements, self)

    __call__ = forward

    def for_size(self, rows: int) -> ContractionOperator:
        """The operator for a number of nodes: this one, unless it is a family."""
        return self

    def run(
        self, direction: ContractionDirection, given: Mapping[str, Maybe], elements: Tensor, *, poison: bool = False
    ) -> dict[str, Tensor]:
        """Outputs of a direction by slot (forward: ``g``), without autograd.

        given: tensors by the names of ``direction.operands``; x and w are always needed, for their sizes. poison: fill
        outputs with NaN before the kernel runs.
        """
        x, w = given["x"], given["w"]
        assert x is not None and w is not None
        self._check(x, w, elements)
        nodes, rows = x.shape[0], w.shape[0]
        pointers, kept = [0] * len(BUFFERS), [elements.contiguous()]
        for name in direction.operands:
            shape = w.shape if name.endswith("w") else (nodes, self.widths[name[-1]])
            kept.append(self._ready(name, given[name], shape, x))
            pointers[_PLACE[name]] = kept[-1].data_ptr()
        pointers[_PLACE["sender"]] = kept[0].data_ptr()
        spans = None
        if self.schedules[direction.name].order == "element":
            spans, perm = node_order(elements, rows)
            pointers[_PLACE["perm"]] = perm.data_ptr()
        else:
            check_range(elements, rows)
        kernel = self._kernel(direction, elements)
        plan: Any = kernel.plan
        of_task = task_nodes(plan, nodes, kernel.resources.get("registers", 0))
        found: dict[str, Tensor] = {}
        for slot in direction.outputs:
            if slot == "w":
                shape = (rows + (-(-nodes // of_task) if plan.has_rows else 0), math.prod(w.shape[1:]))
            else:
                shape = (nodes, self.widths[slot])
            is_zeroed = slot in plan.zeroed and not (plan.writes_zeros and nodes)
            found[slot] = (zeros if is_zeroed else empty)(shape, x)
            if poison and not is_zeroed:
                found[slot].fill_(torch.nan)
            pointers[_PLACE[f"out_{slot}"]] = found[slot].data_ptr()
        if nodes:
            kernel.run(pointers, nodes, of_task, rows, x.get_device())
            if WATCHERS:
                tell(self, direction, nodes, nodes, None, None)
        if "w" in found:
            if plan.has_rows:
                assert spans is not None
                found["w"] = sums_by_element(found["w"], spans, of_task)
            found["w"] = found["w"].view(w.shape)
        return found

    def spec(self, direction: ContractionDirection, index: str = "int64") -> ContractionSpec:
        """Spec of the kernel of a direction; under ``torch.use_deterministic_algorithms`` of a form in fixed order."""
        schedule = self.schedules[direction.name]
        if torch.are_deterministic_algorithms_enabled():
            schedule = in_fixed_order(schedule)
        return self._kernel_spec(direction, schedule, index)

    def specs(self, direction_name: str) -> list[ContractionSpec]:
        """Spec of the kernel of a direction with its usual tangents and all its outputs."""
        return [self.spec(self._direction(direction_name))]

    def __repr__(self) -> str:
        return f"ContractionOperator({self.problem.key!r}, {self.dtype}, {self.device}, {self.layout})"

    def _kernel_spec(
        self, direction: ContractionDirection, schedule: ContractionSchedule, index: str = "int64"
    ) -> ContractionSpec:
        facts = device_facts(self.device)
        return ContractionSpec(self.problem, direction, schedule, DTYPES[self.dtype], self.layout, index, facts)

    def _default_schedule(self, direction: ContractionDirection) -> ContractionSchedule:
        return default_contraction_schedule(self.problem, direction, DTYPES[self.dtype], device_facts(self.device))

    def _kernel(self, direction: ContractionDirection, elements: Tensor) -> Kernel:
        fixed = torch.are_deterministic_algorithms_enabled()
        key = (direction, _INDICES[elements.dtype], elements.get_device(), fixed)
        kernel = self._kernels.get(key)
        if kernel is None:
            tell_of_preparing()
            kernel = self._kernels[key] = load_kernel(self.spec(direction, key[1]))
        return kernel

    def _check(self, x: Tensor, w: Tensor, elements: Tensor) -> None:
        if x.dim() != 2:
            raise self._mismatch("x", x, f"(nodes, {self.widths['x']})")
        if w.dim() != 3 or tuple(w.shape[1:]) != (self.num_weights, self.problem.channels):
            raise self._mismatch("w", w, f"(elements, {self.num_weights}, {self.problem.channels})")
        if elements.dtype not in _INDICES or elements.dim() != 1 or elements.shape[0] != x.shape[0]:
            raise InputError(
                f"elements is {elements.dtype} {tuple(elements.shape)}; expected int32 or int64 ({x.shape[0]},), one "
                "for each row of x"
            )
        if elements.device != x.device:
            raise InputError(f"elements is on {elements.device}, x on {x.device}; move one of them")

    def _ready(self, name: str, tensor: Maybe, shape: Any, x: Tensor) -> Tensor:
        """The tensor, copied if it is not contiguous and aligned; InputError if it does not fit."""
        fits = tensor is not None and tensor.device == x.device and tensor.device.type == self.device.type
        if tensor is None or not fits or tensor.shape != shape or tensor.dtype is not self.dtype:
            raise self._mismatch(name, tensor, str(tuple(shape)))
        return aligned(tensor)

    def _mismatch(self, name: str, tensor: Maybe, shape: str) -> InputError:
        given = "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        return InputError(f"{name} is {given}; expected {self.dtype} {shape} on {self.device.type}")


rebuilds("contraction", rebuild_contraction)
