"""The operator of symmetric contractions, a differentiable torch function.

``build_contraction`` makes a :class:`ContractionOperator`. Its ``forward`` uses
``kernelgen.ops.symmetric_contraction``. Kernels compile at first use, one for each direction, tangents and set of
wanted gradients.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelgen.arithmetic.contraction import (
    CONTRACTION_DIRECTIONS,
    FORWARD,
    ContractionDirection,
    contraction_backward,
    contraction_double_backward,
)
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.compat import is_eager, is_transforming
from kernelgen.device import device_facts
from kernelgen.errors import InputError, UnsupportedError
from kernelgen.kernels.contraction.emit import C_TYPES
from kernelgen.kernels.contraction.plan import default_contraction_schedule, task_nodes
from kernelgen.kernels.contraction.schedule import (
    ContractionSchedule,
    ContractionSpec,
    contraction_schedule_from_dict,
    in_fixed_order,
)
from kernelgen.kernels.source import Source, included
from kernelgen.kernels.spec import BUFFERS
from kernelgen.ops.base import DTYPES, RegisteredOperator, rebuilds, register, resolve
from kernelgen.ops.library import HESSIAN_PRODUCTS, define, only, sums_of, used_slots
from kernelgen.ops.transforms import call
from kernelgen.problem.contraction import ContractionProblem
from kernelgen.runtime.call import aligned, empty, zeros
from kernelgen.runtime.graph import EdgeOrder, order_by
from kernelgen.runtime.kernel import FixedKernel, Kernel, load_kernel
from kernelgen.runtime.known_graphs import KNOWN_GRAPHS
from kernelgen.watchers import WATCHERS, tell, tell_of_preparing

# The torch ops ``equitune::sc_*``, which make symmetric contractions visible to fake tensors, compile and export.
#
# An op gets its operator as text (``ContractionOperator.text``), from which any process can rebuild it. Gradients that
# ``outputs`` does not name are empty tensors. See ``kernelgen.ops.symmetric_contraction``.

Maybe = Tensor | None


def _sc_forward(x: Tensor, w: Tensor, elements: Tensor, spec: str) -> Tensor:
    return resolve(spec).for_size(x.shape[0]).run(FORWARD, {"x": x, "w": w}, elements)["g"]


def _sc_backward(x: Tensor, w: Tensor, g: Tensor, elements: Tensor, outputs: str, spec: str) -> tuple[Tensor, ...]:
    found = resolve(spec).for_size(x.shape[0]).run(contraction_backward(outputs), {"x": x, "w": w, "g": g}, elements)
    return tuple(found.get(slot, x.new_empty(0)) for slot in "xw")


def _sc_double_backward(
    x: Tensor, w: Tensor, g: Tensor, tx: Maybe, tw: Maybe, elements: Tensor, outputs: str, spec: str
) -> tuple[Tensor, ...]:
    direction = contraction_double_backward("x" * (tx is not None) + "w" * (tw is not None), outputs)
    found = resolve(spec).for_size(x.shape[0]).run(direction, {"x": x, "w": w, "g": g, "tx": tx, "tw": tw}, elements)
    return tuple(found.get(slot, x.new_empty(0)) for slot in "xwg")


def _fake_forward(x: Tensor, w: Tensor, elements: Tensor, spec: str) -> Tensor:
    return x.new_empty((x.shape[0], resolve(spec).widths["g"]))


def _fake_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """Of both gradient ops: outputs have the shapes of x, w and, for the second one, g."""
    slots, outputs = ("xw" if len(arguments) == 6 else "xwg"), arguments[-2]
    return tuple(
        like.new_empty(like.shape if slot in outputs else (0,)) for slot, like in zip(slots, arguments, strict=False)
    )


def _setup_forward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    *saved, ctx.spec = inputs
    ctx.save_for_backward(*saved)


def _needed(ctx: Any, slots: str) -> str:
    return "".join(slot for slot, needed in zip(slots, ctx.needs_input_grad, strict=False) if needed)


def _backward_of_forward(ctx: Any, g: Maybe) -> tuple:
    outputs = _needed(ctx, "xw")
    if g is None or not outputs:
        return None, None, None, None
    x, w, elements = ctx.saved_tensors
    return (*only(call("sc_backward", x, w, g, elements, outputs, ctx.spec), "xw", outputs), None, None)


def _setup_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    *saved, ctx.outputs, ctx.spec = inputs
    ctx.save_for_backward(*saved)


def _backward_of_backward(ctx: Any, *tangents: Maybe) -> tuple:
    tx, tw = (t if slot in ctx.outputs else None for slot, t in zip("xw", tangents, strict=True))
    outputs = _needed(ctx, "xwg")
    if not outputs or (tx is None and tw is None):
        return (None,) * 6
    x, w, g, elements = ctx.saved_tensors
    found = call("sc_double_backward", x, w, g, tx, tw, elements, outputs, ctx.spec)
    return (*only(found, "xwg", outputs), None, None, None)


def _jvp_of_forward(ctx: Any, tx: Maybe, tw: Maybe, *_: None) -> Tensor:
    """The change along the tangents is the gradient of <tx, dF/dx> + <tw, dF/dw> with respect to g, for any g."""
    x, w, elements = ctx.saved_tensors
    g = x.new_zeros((x.shape[0], resolve(ctx.spec).widths["g"]))
    return call("sc_double_backward", x, w, g, tx, tw, elements, "g", ctx.spec)[2]


def _jvp_of_backward(ctx: Any, tx: Maybe, tw: Maybe, tg: Maybe, *_: None) -> tuple[Tensor, ...]:
    """The double backward of the tangents, which equals the change of the gradients by symmetry; and dF(x, w, tg)."""
    x, w, *_ = ctx.saved_tensors
    found = _along_tangents(ctx, (tx, tw, tg), ctx.outputs)
    zeros = [t.new_zeros(t.shape if slot in ctx.outputs else (0,)) for slot, t in (("x", x), ("w", w))]
    return tuple(zero if change is None else change for zero, change in zip(zeros, found, strict=True))


def _along_tangents(ctx: Any, tangents: tuple[Maybe, Maybe, Maybe], outputs: str) -> tuple[Maybe, ...]:
    """The changes of the gradients by x and w along tangents of x, w and g (None: zero), by differentiable ops."""
    x, w, g, elements = ctx.saved_tensors
    tx, tw, tg = tangents
    terms: list[tuple[Maybe, ...]] = []
    if outputs and not (tx is None and tw is None):
        found = call("sc_double_backward", x, w, g, tx, tw, elements, outputs, ctx.spec)
        terms.append(only(found[:2], "xw", outputs))
    if outputs and tg is not None:
        terms.append(only(call("sc_backward", x, w, tg, elements, outputs, ctx.spec), "xw", outputs))
    return sums_of(terms, 2)


def _setup_double_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    x, w, g, tx, tw, elements, ctx.outputs, ctx.spec = inputs
    ctx.along = "x" * (tx is not None) + "w" * (tw is not None)
    ctx.save_for_backward(x, w, g, elements)


def _backward_of_double_backward(ctx: Any, *cotangents: Maybe) -> tuple:
    """By the tangents, in which it is linear, it is the change of the first gradients along the cotangents."""
    if used_slots(ctx, "xwg"):
        return _no_third_derivative()
    tx, tw, tg = (t if slot in ctx.outputs else None for slot, t in zip("xwg", cotangents, strict=True))
    found = _along_tangents(ctx, (tx, tw, tg), used_slots(ctx, ctx.along, first=3))
    return (None, None, None, *found, None, None, None)


def _no_third_derivative(*_: Any) -> tuple:
    raise UnsupportedError(
        f"third derivatives of a symmetric contraction are not generated, {HESSIAN_PRODUCTS}; detach the second "
        "derivatives, or differentiate the package's own module instead"
    )


def _one_by_one(arguments: tuple, in_dims: tuple) -> None:
    """The rule for vmap: weights, and so their gradients, are shared by all nodes."""


_X_W_ELEMENTS = "Tensor x, Tensor w, Tensor elements, str spec"
define(
    *("sc_forward", f"({_X_W_ELEMENTS}) -> Tensor"),
    *(_sc_forward, _fake_forward, _backward_of_forward, _setup_forward),
    jvp=_jvp_of_forward,
    rows=_one_by_one,
)
define(
    *("sc_backward", "(Tensor x, Tensor w, Tensor g, Tensor elements, str outputs, str spec) -> (Tensor, Tensor)"),
    *(_sc_backward, _fake_gradients, _backward_of_backward, _setup_backward),
    jvp=_jvp_of_backward,
    rows=_one_by_one,
)
define(
    "sc_double_backward",
    "(Tensor x, Tensor w, Tensor g, Tensor? tx, Tensor? tw, Tensor elements, str outputs, str spec)"
    " -> (Tensor, Tensor, Tensor)",
    *(_sc_double_backward, _fake_gradients, _backward_of_double_backward, _setup_double_backward),
    jvp=_no_third_derivative,
    rows=_one_by_one,
)


# Calls of a contraction through autograd, or through the torch ops if torch traces or transforms.
#
# Everywhere ``operator`` is a :class:`kernelgen.ops.symmetric_contraction.ContractionOperator`.


def contraction(x: Tensor, w: Tensor, elements: Tensor, operator: Any) -> Tensor:
    """The operator's value, differentiable twice in x and w."""
    if not is_eager(x, w, elements):
        return call("sc_forward", x, w, elements, operator.text)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        return _Forward.apply(x, w, elements, operator)
    return operator.run(FORWARD, {"x": x, "w": w}, elements)["g"]


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, elements: Tensor, operator: Any) -> Tensor:
        ctx.save_for_backward(x, w, elements)
        ctx.operator = operator
        return operator.run(FORWARD, {"x": x, "w": w}, elements)["g"]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        outputs = used_slots(ctx, "xw")
        if not outputs:
            return None, None, None, None
        x, w, elements = ctx.saved_tensors
        if is_transforming(g):
            found = only(call("sc_backward", x, w, g, elements, outputs, ctx.operator.text), "xw", outputs)
        elif torch.is_grad_enabled():
            found = _Backward.apply(x, w, g, elements, outputs, ctx.operator)
        else:
            found = _gradients(x, w, g, elements, outputs, ctx.operator)
        return (*found, None, None)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, g: Tensor, elements: Tensor, outputs: str, operator: Any) -> tuple:
        # A gradient that is not differentiated must arrive as None, so that the kernel omits its tangent.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, g, elements)
        ctx.operator = operator
        return _gradients(x, w, g, elements, outputs, operator)

    @staticmethod
    def backward(ctx: Any, tx: Maybe, tw: Maybe) -> tuple:
        outputs = used_slots(ctx, "xwg")
        if not outputs or (tx is None and tw is None):
            return (None,) * 6
        x, w, g, elements = ctx.saved_tensors
        found = call("sc_double_backward", x, w, g, tx, tw, elements, outputs, ctx.operator.text)
        return (*only(found, "xwg", outputs), None, None, None)


def _gradients(x: Tensor, w: Tensor, g: Tensor, elements: Tensor, outputs: str, operator: Any) -> tuple:
    found = operator.run(contraction_backward(outputs), {"x": x, "w": w, "g": g}, elements)
    return found.get("x"), found.get("w")


# The elements of nodes: their range, the order of nodes by element, and sums over the nodes of each element.

_THREADS, _COLUMNS = 512, 128


def node_order(elements: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Nodes ordered by element, as spans and permutation, kept for the graphs that come again."""

    def make() -> EdgeOrder:
        return EdgeOrder(*order_by("elements", elements, rows))

    with _naming(elements, rows):
        known = KNOWN_GRAPHS.order(elements, elements, (rows, rows, "elements"), make)
    if known is None:
        check_range(elements, rows)
    order = make() if known is None else known[0]
    assert order.spans is not None and order.perm is not None
    return order.spans, order.perm


def check_range(elements: Tensor, rows: int) -> None:
    """InputError, on a GPU a device-side assertion, for elements that are no rows of the weights."""
    with _naming(elements, rows):
        KNOWN_GRAPHS.check(elements, elements, rows, rows)


@contextlib.contextmanager
def _naming(elements: Tensor, rows: int) -> Iterator[None]:
    """Say which of this operator's arguments is out of range."""
    try:
        yield
    except InputError as error:
        least, most = (int(bound) for bound in torch.aminmax(elements))
        raise InputError(f"elements are {least}..{most}; w has {rows} rows: expected 0..{rows - 1}") from error


def sums_by_element(rows: Tensor, spans: Tensor, of_task: int) -> Tensor:
    """Sums over the rows of each element [elements, columns], always in the same order.

    rows: those of ``kernelgen.kernels.contraction.plan``, of tasks of ``of_task`` nodes. spans: of ``node_order``.
    """
    count, width = spans.shape[0], rows.shape[1]
    if rows.is_cpu:
        begins = spans[:, 1].sort().values.long()
        firsts = begins // of_task + torch.arange(count)
        # Adds row after row, four times as fast as segment_reduce.
        elements = torch.searchsorted(firsts, torch.arange(rows.shape[0]), right=True) - 1
        return rows.new_zeros((count, width)).index_add_(0, elements, rows)
    out, parts = empty((count, width), rows), -(-width // _COLUMNS)
    if count:
        values = (rows.data_ptr(), spans.data_ptr(), out.data_ptr(), width, of_task, parts)
        _sums(rows.dtype).launch(rows.get_device(), count * parts, *values)
    return out


@functools.cache
def _sums(dtype: torch.dtype) -> FixedKernel:
    return FixedKernel(sums_source(dtype), 6, _THREADS)


def sums_source(dtype: torch.dtype) -> Source:
    """The source of the kernel that sums rows of a dtype."""
    text = f"#define REAL {C_TYPES[DTYPES[dtype]]}\n" + included("sums_by_element.cuh")
    return Source(text, "cuda", "equitune_contraction_sums")


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

    num_weights: weights of an element and a channel, in the order of ``polynomials``.
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
