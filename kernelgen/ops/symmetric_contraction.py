"""The operator of symmetric contractions, a differentiable torch function.

``build_contraction`` makes a :class:`ContractionOperator`. Its signature gives its derivatives and the torch ops
``equitune::sc_*`` (``kernelgen.ops.library``); here is how its kernels run. Kernels compile at first use, one for each
direction, tangents and set of wanted gradients.
"""

from __future__ import annotations

import contextlib
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
from kernelgen.device import device_facts
from kernelgen.errors import InputError
from kernelgen.kernels.spec import BUFFERS
from kernelgen.kernels.symmetric_contraction import (
    CONTRACTION_SCHEDULES,
    ContractionSchedule,
    ContractionSpec,
    default_contraction_schedule,
    in_fixed_order,
    task_nodes,
)
from kernelgen.ops.base import DTYPES, INDEX_DTYPES, rebuilds, register
from kernelgen.ops.library import DifferentiableOperator, Maybe, Signature, define, differentiable
from kernelgen.problem.other_kinds import ContractionProblem
from kernelgen.runtime.call import WATCHERS, empty, tell, tell_of_preparing, zeros
from kernelgen.runtime.graph import KNOWN_GRAPHS, EdgeOrder, order_by
from kernelgen.runtime.kernel import PLACE, Kernel, KernelByDtype, load_kernel

CONTRACTION = Signature(
    name="sc",
    slots="xw",
    inputs=("x", "w"),
    tangents=("tx", "tw"),
    rest=("Tensor elements",),
    noun="a symmetric contraction",
    instead="the package's own module",
)
define(CONTRACTION)


# The elements of nodes: their range, the order of nodes by element, and sums over the nodes of each element.

_THREADS, _COLUMNS = 512, 128
SUMS = KernelByDtype("equitune_contraction_sums", "sums_by_element.cuh", count=6, threads=_THREADS)


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

    rows: those of ``kernelgen.kernels.symmetric_contraction``, of tasks of ``of_task`` nodes. spans: of ``node_order``.
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
        SUMS.of(rows.dtype).launch(rows.get_device(), count * parts, *values)
    return out


Schedules = ContractionSchedule | Mapping[str, ContractionSchedule] | None


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


class ContractionOperator(DifferentiableOperator):
    """A symmetric contraction with its schedules. Call it like a function; it is differentiable twice.

    num_weights: weights of an element and a channel, in the order of ``polynomials``.
    """

    kind = "contraction"
    signature = CONTRACTION
    directions = CONTRACTION_DIRECTIONS
    problem_type = ContractionProblem
    schedule_types = CONTRACTION_SCHEDULES
    options = ("layout",)
    layout: str

    def __init__(
        self, problem: ContractionProblem, schedule: Schedules, dtype: torch.dtype, device: torch.device, layout: str
    ) -> None:
        super().__init__(problem, schedule, dtype, device, layout=layout)
        self.num_weights = len(polynomials(problem))
        self.widths = {"x": problem.dim_in * problem.channels, "g": problem.dim_out * problem.channels}
        self.dim_out = self.widths["g"]
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
        return differentiable(self, x, w, elements)

    __call__ = forward

    def op_forward(self, x: Tensor, w: Tensor, elements: Tensor) -> Tensor:
        return self.run(FORWARD, {"x": x, "w": w}, elements)["g"]

    def op_backward(self, x: Tensor, w: Tensor, g: Tensor, elements: Tensor, outputs: str) -> dict[str, Tensor]:
        return self.run(contraction_backward(outputs), {"x": x, "w": w, "g": g}, elements)

    def op_double_backward(
        self, x: Tensor, w: Tensor, g: Tensor, tx: Maybe, tw: Maybe, elements: Tensor, outputs: str
    ) -> dict[str, Tensor]:
        direction = contraction_double_backward(self.signature.present((tx, tw)), outputs)
        return self.run(direction, {"x": x, "w": w, "g": g, "tx": tx, "tw": tw}, elements)

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
            pointers[PLACE[name]] = kept[-1].data_ptr()
        pointers[PLACE["sender"]] = kept[0].data_ptr()
        spans = None
        if self.schedules[direction.name].order == "element":
            spans, perm = node_order(elements, rows)
            pointers[PLACE["perm"]] = perm.data_ptr()
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
            pointers[PLACE[f"out_{slot}"]] = found[slot].data_ptr()
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

    def _kernel_spec(
        self, direction: ContractionDirection, schedule: ContractionSchedule, index: str = "int64"
    ) -> ContractionSpec:
        facts = device_facts(self.device)
        return ContractionSpec(self.problem, direction, schedule, DTYPES[self.dtype], self.layout, index, facts)

    def _default_schedule(self, direction: ContractionDirection) -> ContractionSchedule:
        return default_contraction_schedule(self.problem, direction, DTYPES[self.dtype], device_facts(self.device))

    def _kernel(self, direction: ContractionDirection, elements: Tensor) -> Kernel:
        fixed = torch.are_deterministic_algorithms_enabled()
        key = (direction, INDEX_DTYPES[elements.dtype], elements.get_device(), fixed)
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
        if elements.dtype not in INDEX_DTYPES or elements.dim() != 1 or elements.shape[0] != x.shape[0]:
            raise InputError(
                f"elements is {elements.dtype} {tuple(elements.shape)}; expected int32 or int64 ({x.shape[0]},), one "
                "for each row of x"
            )
        if elements.device != x.device:
            raise InputError(f"elements is on {elements.device}, x on {x.device}; move one of them")


rebuild_contraction = ContractionOperator.rebuild
rebuilds("contraction", rebuild_contraction)
