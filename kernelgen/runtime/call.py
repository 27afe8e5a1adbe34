"""An operator's calls without autograd: checks of tensors, memory for results, watchers, and the run of a direction."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.arithmetic.directions import OPERANDS, Direction
from kernelgen.errors import InputError
from kernelgen.kernels.dispatch import AnyPlan, make_plan
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import BUFFERS, Spec
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime.graph import (
    KNOWN_GRAPHS,
    NO_ORDER,
    EdgeOrder,
    KnownGraph,
    check_is_tensor,
    check_sizes,
    order_by,
)
from kernelgen.runtime.kernel import Kernel, clear, load_kernel

# Checks the tensors of a call: makes a checked :class:`Graph`, and contiguous, aligned operands.

# Alignment of operands in bytes.
ALIGNMENT = 16
# Graphs of at most this many edges are kept, so that the next call with the same order skips the checks.
KEPT_EDGES = 1 << 14
# One tensor for each of OPERANDS; None if the direction does not have it.
Operands = tuple[Tensor | None, ...]


class Graph(NamedTuple):
    """A call's edges (None for a plain product), row counts and shapes by slot, checked once for all directions."""

    sender: Tensor | None
    receiver: Tensor | None
    order: EdgeOrder
    num_edges: int
    num_in: int
    num_out: int
    shapes: dict[str, tuple[int, ...]]

    # The tensors of indices and order. Autograd saves them to detect writes between forward and backward.
    saved: tuple[Tensor, ...] = ()
    # Tells whether the indices were written since they were checked; None for a graph that is not recognised again.
    known: KnownGraph | None = None

    def of_saved(self, saved: Sequence[Tensor]) -> Graph:
        """The graph with autograd's tensors in place of :attr:`saved`; saved-tensor hooks may have copied them."""
        if all(map(operator.is_, saved, self.saved)):
            return self
        kept = dict(zip(map(id, self.saved), saved, strict=True))
        sender, receiver, *order = (kept.get(id(tensor)) for tensor in (self.sender, self.receiver, *self.order))
        return self._replace(sender=sender, receiver=receiver, order=EdgeOrder(*order), saved=tuple(saved))


def _is_still(
    graph: Graph,
    x: Tensor,
    sender: Tensor | None,
    receiver: Tensor | None,
    order: EdgeOrder,
    known: KnownGraph | None,
) -> bool:
    """Whether these are the graph's own indices and order, and the indices still have their form.

    A graph that was recognised by its memory is the same whichever views of it are given. On the CPU other tensors may
    have its contents; autograd must notice writes to those that were given.
    """
    if sender is None or receiver is None or order is not graph.order:
        return False
    device, shape = x.get_device(), (graph.num_edges,)
    if known is not None and known is graph.known and not known.is_on_host:
        return sender.shape == shape and sender.get_device() == device
    if sender is not graph.sender or receiver is not graph.receiver:
        return False
    same = sender.shape == shape == receiver.shape and sender.dtype is receiver.dtype
    here = sender.get_device() == device == receiver.get_device()
    return same and here and sender.is_contiguous() and receiver.is_contiguous()


class Checks:
    """Checks an operator's tensors; raises InputError if they do not fit."""

    def __init__(self, problem: TensorProductProblem, operation: str, dtype: torch.dtype, device_type: str) -> None:
        self.problem = problem
        self.is_conv = operation == "conv"
        self.dtype = dtype
        self.device_type = device_type
        self._last: Graph | None = None

    def graph(
        self,
        x: Tensor,
        y: Tensor,
        sender: Tensor | None,
        receiver: Tensor | None,
        num_out: int | None,
        order: EdgeOrder | None,
        keep: bool = False,
        known: KnownGraph | None = None,
    ) -> Graph:
        """The checked graph of a call, with contiguous index tensors.

        keep: the tensors and order are the caller's own and may come again; a small graph is then checked only once.
        known: the entry of the graph, if it was just found to be unchanged, with indices in range.
        """
        if x.dim() != 2 or y.dim() != 2:
            raise InputError(f"x is {tuple(x.shape)} and y {tuple(y.shape)}; expected [rows, features] for both")
        num_edges, num_in, order = y.shape[0], x.shape[0], order or NO_ORDER
        last = self._last if keep else None
        if last and last[3:6] == (num_edges, num_in, num_out) and _is_still(last, x, sender, receiver, order, known):
            unwritten = known is not None or last.known.is_unwritten(sender, receiver)  # type: ignore[union-attr, arg-type]
            if unwritten:
                return last
        if not self.is_conv:
            check_sizes(num_edges)
            if sender is not None or receiver is not None:
                raise InputError("sender and receiver were given to a plain product; build it with operation='conv'")
            num_in = num_out = num_edges
        else:
            num_out = num_in if num_out is None else num_out
            if num_out < 0:
                raise InputError(f"num_out is {num_out}; expected the number of destinations, at least 0")
            check_sizes(num_edges, num_in, num_out)
            sender, receiver = self._indices(sender, receiver, num_edges, x.device)
            known = known or KNOWN_GRAPHS.check(sender, receiver, num_in, num_out)
            if known is not None:
                sender, receiver = known.contiguous(sender, receiver)
            else:
                sender, receiver = sender.contiguous(), receiver.contiguous()
            if order is not NO_ORDER:
                sizes: tuple[tuple[int, ...], ...] = ((num_out, 3), (num_edges,), (num_in, 3), (num_edges,))
                order = self._order(order, sizes, x.device)
        problem = self.problem
        shapes: dict[str, tuple[int, ...]] = {
            "x": (num_in, problem.dim_in1),
            "y": (num_edges, problem.dim_in2),
            "w": (problem.weight_numel,) if problem.shared_weights else (num_edges, problem.weight_numel),
            "g": (num_out, problem.dim_out),
        }
        saved = tuple(tensor for tensor in (sender, receiver, *order) if tensor is not None)
        graph = Graph(sender, receiver, order, num_edges, num_in, num_out, shapes, saved, known)
        if keep and num_edges <= KEPT_EDGES and known is not None:
            self._last = graph
        return graph

    def operands(
        self, operands: Operands, read: tuple[tuple[int, str, str], ...], shapes: dict[str, tuple[int, ...]]
    ) -> Operands:
        """The operands; those in ``read`` are copied if they are not contiguous and aligned."""
        x = operands[0]
        assert x is not None
        if x.device.type != self.device_type:
            raise InputError(
                f"x is on {x.device}; this operator was built for {self.device_type}: build another for it"
            )
        device, dtype, cpu = x.get_device(), self.dtype, x.is_cpu
        ready: list[Tensor | None] | None = None
        for position, name, slot in read:
            tensor = operands[position]
            if tensor is None:
                raise InputError(f"{name} is missing")
            # Device numbers are negative except for GPUs.
            elsewhere = tensor.get_device() != device or (device < 0 and tensor.is_cpu is not cpu)
            if tensor.dtype is not dtype or tensor.shape != shapes[slot] or elsewhere:
                raise self._mismatch(name, tensor, shapes[slot], x.device)
            if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
                ready = ready or list(operands)
                ready[position] = tensor.clone(memory_format=torch.contiguous_format)
        return operands if ready is None else tuple(ready)

    def _indices(
        self, sender: Tensor | None, receiver: Tensor | None, num_edges: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        for name, index in (("sender", sender), ("receiver", receiver)):
            if index is None:
                raise InputError(f"{name} is missing; a convolution needs sender and receiver [num_edges]")
            check_is_tensor(name, index)
            fits = index.dtype in (torch.int32, torch.int64) and index.shape == (num_edges,)
            if not fits or index.device != device:
                raise InputError(
                    f"{name} is {index.dtype} {tuple(index.shape)} on {index.device}; "
                    f"expected int32 or int64 ({num_edges},) on {device}, one index for each row of y"
                )
        assert sender is not None and receiver is not None
        if sender.dtype is not receiver.dtype:
            raise InputError(f"sender is {sender.dtype} and receiver {receiver.dtype}; expected one dtype")
        return sender, receiver

    def _order(self, order: EdgeOrder, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> EdgeOrder:
        """The precomputed order, contiguous; InputError if it does not fit the graph."""
        for name, tensor, shape in zip(EdgeOrder._fields, order, shapes, strict=True):
            if tensor is None:
                continue
            if tensor.dtype is not torch.int32 or tensor.shape != shape or tensor.device != device:
                raise InputError(
                    f"order.{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected int32 "
                    f"{shape} on {device}: make it with edge_order(receiver, num_out={shapes[0][0]})"
                )
            if not tensor.is_contiguous():
                order = order._replace(**{name: tensor.contiguous()})
        return order

    def _mismatch(self, name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> InputError:
        rows = "num_edges is taken from y, num_in from x"
        return InputError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected {self.dtype} "
            f"{shape} on {device} ({rows}) for {self.problem.irreps_in1} x "
            f"{self.problem.irreps_in2} -> {self.problem.irreps_out}"
        )


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied if it is not contiguous and aligned."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


# Allocates tensors for results.
#
# Host time limits calls on small graphs, and torch's public allocating functions took a seventh of such a backward
# pass. So this uses the functions with which torch's compiled graphs allocate, if this version of torch has them.
#
# On the host, outputs of tens of megabytes are mapped anew in every call. Touching them page by page (4 KiB each) can
# take longer than the kernel. Advising huge pages before the first touch turns 512 page faults into one.

HUGE_PAGE = 2 << 20
# From asm-generic/mman-common.h.
_MADV_HUGEPAGE = 14


def _of_compiled_graphs(name: str) -> Callable[..., Tensor] | None:
    return getattr(getattr(torch._C._dynamo, "guards", None), name, None)


_empty_cpu = _of_compiled_graphs("_empty_strided_cpu")
_empty_cuda = _of_compiled_graphs("_empty_strided_cuda")
_reinterpret = _of_compiled_graphs("_reinterpret_tensor")


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """``like.new_empty(shape)``, contiguous; large host tensors ask for huge pages."""
    if like.is_cpu:
        out = like.new_empty(shape) if _empty_cpu is None else _empty_cpu(shape, _strides(shape), like.dtype)
        if math.prod(shape) * out.element_size() >= 2 * HUGE_PAGE:
            begin = -(-out.data_ptr() // HUGE_PAGE) * HUGE_PAGE
            end = (out.data_ptr() + out.nbytes) // HUGE_PAGE * HUGE_PAGE
            advise = _madvise()
            if advise is not None and end > begin:
                advise(begin, end - begin, _MADV_HUGEPAGE)  # only advice: a failure does no harm
        return out
    if _empty_cuda is not None and _is_on_current_gpu(like):
        return _empty_cuda(shape, _strides(shape), like.dtype)
    return like.new_empty(shape)


def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """``like.new_zeros(shape)``, allocated as :func:`empty` does."""
    out = empty(shape, like)
    return out if _is_on_current_gpu(out) and clear(out) else out.zero_()


def _is_on_current_gpu(tensor: Tensor) -> bool:
    """Whether the fast functions work for this tensor's device."""
    return tensor.is_cuda and torch._C._cuda_getDevice() == tensor.get_device()


def part(flat: Tensor, shape: tuple[int, ...], begin: int) -> Tensor:
    """The elements of ``flat`` from ``begin`` on as a separate tensor, with its own counter of in-place writes."""
    if _reinterpret is None:
        return flat.as_strided(shape, _strides(shape), begin).data
    return _reinterpret(flat, shape, _strides(shape), begin)


@functools.lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    if len(shape) == 2:
        return max(1, shape[1]), 1
    return tuple(math.prod(max(1, size) for size in shape[i + 1 :]) for i in range(len(shape)))


@functools.cache
def _madvise() -> Any:
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None  # not Linux: keep the page size
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


# Functions that learn which kernels a process runs: a tuner asks what a model needs.
#
# In: every run of an operator's direction. Out: a call of each watcher, before the kernel is launched. Without watchers
# a run pays for one test of an empty list.

# Called with the operator, the direction, the number of edges and of result rows, and, for a convolution, sender and
# receiver. A watcher may change this list.
Watcher = Callable[[Any, Any, int, int, Tensor | None, Tensor | None], None]
WATCHERS: list[Watcher] = []
# Called when an operator prepares a direction's kernel, before its first run: rare.
PREPARING: list[Callable[[], None]] = []


def tell(
    operator: Any, direction: Any, num_edges: int, num_out: int, sender: Tensor | None, receiver: Tensor | None
) -> None:
    """Call every watcher."""
    for watcher in tuple(WATCHERS):
        watcher(operator, direction, num_edges, num_out, sender, receiver)


def tell_of_preparing() -> None:
    """Call every function of ``PREPARING``."""
    for function in tuple(PREPARING):
        function()


# Runs one direction of an operator on checked tensors.
#
# A runner is made once for a direction, an index type and a device. It allocates outputs and launches the kernel. If
# the schedule does not fuse, torch gathers and scatters around a plain kernel.


# Alignment, in elements, of outputs that share an allocation: 16 bytes or more.
ALIGNED = 4
# Zeroed outputs of at most this many elements share one allocation: one launch instead of several.
SMALL_OUTPUTS = 1 << 18
# Most layouts of outputs that a runner keeps, one a graph size.
KEPT_LAYOUTS = 1024
_OUTPUT = {slot: BUFFERS.index(f"out_{slot}") for slot in "xywg"}
_SENDER, _SPANS = BUFFERS.index("sender"), BUFFERS.index("spans")


class Layout(NamedTuple):
    """How the outputs of a call are allocated: (slot, shape) of zeroed and of overwritten ones.

    together: zeroed outputs that share one allocation of ``elements``, each with its first element.
    """

    elements: int
    together: tuple[tuple[str, tuple[int, ...], int], ...]
    zeros: tuple[tuple[str, tuple[int, ...]], ...]
    overwritten: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Recipe:
    """``spec`` has the live outputs alone; without any there is no ``plan``, and all outputs are zero.

    writes: by live slot, ``zero`` (the kernel adds to zeros), ``inside`` (the kernel zeroes it itself first) or
    ``empty`` (it overwrites). reads: names of the operands. gathers: rows of nodes are gathered for the kernel, and its
    rows summed. order: the end by which the kernel must have the edges in order, or empty. partial_y: of the plan.
    permuted: of the kernel that takes runs of edges by receiver, where those are better than runs in a graph's own
    order.
    """

    spec: Spec
    plan: AnyPlan | None
    writes: dict[str, str]
    reads: tuple[str, ...]
    gathers: bool
    order: str
    partial_y: int
    permuted: Spec | None


def recipe_of(spec: Spec, is_conv: bool) -> Recipe:
    """The recipe of a spec."""
    outputs, gathers = spec.direction.live_outputs, is_conv and spec.operation == "plain"
    if not outputs or not spec.problem.paths:
        return Recipe(spec, None, {}, (), gathers, "", 0, None)
    live = dataclasses.replace(spec, direction=dataclasses.replace(spec.direction, outputs=outputs))
    plan, schedule = make_plan(live), spec.schedule
    zeros = schedule.zeros if isinstance(schedule, CudaSchedule) else "apart"
    zeroed = "zero" if zeros == "apart" else "inside"
    writes = {slot: zeroed if f"out_{slot}" in plan.zeroed else "empty" for slot in live.direction.outputs}
    # A kernel that stores whole rows is right only with the receivers' spans, and takes the edges as they say.
    order = "receiver" if zeros == "cut" else plan.owner
    by_receiver = spec.takes_runs and schedule.has_long_runs and not order
    permuted = dataclasses.replace(live, permuted=True) if by_receiver else None
    return Recipe(live, plan, writes, live.operands, gathers, order, plan.partial_y, permuted)


class Runner:
    """Runs one direction. Outputs without terms are zero, and so are all outputs of a graph without edges.

    The constructor prepares all that calls need, because host time limits calls on small graphs.
    """

    def __init__(self, spec: Spec, checks: Checks) -> None:
        self.checks = checks
        self.direction = spec.direction
        recipe = recipe_of(spec, checks.is_conv)
        self.kernel: Kernel | None = None if recipe.plan is None else load_kernel(recipe.spec)
        self.live = "".join(recipe.writes)
        self.dead = tuple(slot for slot in spec.direction.outputs if slot not in self.live)
        self.gathers, self.permuted = recipe.gathers, recipe.permuted
        self.order, self.partial_y = recipe.order, recipe.partial_y
        # Live outputs that must be zero before the kernel adds to them.
        self.zeroed = "".join(slot for slot, rule in recipe.writes.items() if rule != "empty")
        # Position, name and slot of the operands that the kernel reads.
        self.read = tuple((OPERANDS.index(name), name, name[-1]) for name in recipe.reads)
        # Allocates the zeroed outputs; ``empty`` if the kernel zeroes them itself.
        inside = "inside" in recipe.writes.values()
        self.start: Callable[[tuple[int, ...], Tensor], Tensor] = empty if inside else zeros
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    def __call__(self, operands: Operands, graph: Graph, poison: bool = False) -> dict[str, Tensor]:
        """Gradients keyed by slot; InputError for tensors that do not fit the operator."""
        x = operands[0]
        assert x is not None
        shapes = graph.shapes
        if not self.live or graph.num_edges == 0:
            given = ((i, name, name[-1]) for i, name in enumerate(OPERANDS) if operands[i] is not None)
            self.checks.operands(operands, tuple(given), shapes)
            return {slot: zeros(shapes[slot], x) for slot in self.direction.outputs}
        operands = self.checks.operands(operands, self.read, shapes)
        run = self._run_unfused if self.gathers else self._launch
        results = run(operands, graph, poison)
        for slot in self.dead:
            results[slot] = zeros(shapes[slot], x)
        return results

    def _launch(self, operands: Operands, graph: Graph, poison: bool) -> dict[str, Tensor]:
        x, kernel = operands[0], self.kernel
        assert x is not None and kernel is not None
        # Variables, because an order made for this call must live until the launch is queued.
        spans, perm = self._spans(graph) if self.order else (None, None)
        if self.permuted is not None and graph.order.perm is not None:
            kernel, perm = load_kernel(self.permuted), graph.order.perm
        results = self._allocate(graph, x, poison)
        pointers = [0] * len(BUFFERS)
        for position, _, _ in self.read:
            pointers[position] = operands[position].data_ptr()  # type: ignore[union-attr]
        for slot, out in results.items():
            pointers[_OUTPUT[slot]] = out.data_ptr()
        if graph.sender is not None and graph.receiver is not None:
            pointers[_SENDER], pointers[_SENDER + 1] = graph.sender.data_ptr(), graph.receiver.data_ptr()
        if spans is not None:
            pointers[_SPANS] = spans.data_ptr()
        if perm is not None:
            pointers[_SPANS + 1] = perm.data_ptr()
        kernel.run(pointers, graph.num_edges, graph.num_in, graph.num_out, x.get_device())
        if self.partial_y:
            results["y"] = results["y"].sum(1)
        return results

    def _spans(self, graph: Graph) -> tuple[Tensor, Tensor | None]:
        """Spans and permutation of the edges in order, made here if the graph has none."""
        by_receiver = self.order == "receiver"
        spans, perm = graph.order[:2] if by_receiver else graph.order[2:]
        if spans is not None:
            return spans, perm
        nodes, count = (graph.receiver, graph.num_out) if by_receiver else (graph.sender, graph.num_in)
        assert nodes is not None
        return order_by(self.order, nodes, count)

    def _allocate(self, graph: Graph, x: Tensor, poison: bool) -> dict[str, Tensor]:
        sizes = graph[3:6]
        layout = self._layouts.get(sizes)
        if layout is None:
            if len(self._layouts) >= KEPT_LAYOUTS:  # bounds the memory if sizes keep changing
                self._layouts.clear()
            layout = self._layouts[sizes] = self._layout(graph.shapes)
        results = {}
        if layout.together:
            flat = self.start((layout.elements,), x)
            for slot, shape, begin in layout.together:
                results[slot] = part(flat, shape, begin)
        for slot, shape in layout.zeros:
            results[slot] = self.start(shape, x)
        for slot, shape in layout.overwritten:
            results[slot] = empty(shape, x)
        if poison:
            for slot, out in results.items():
                if slot not in self.zeroed or self.start is empty:
                    out.fill_(float("nan"))
        return results

    def _layout(self, shapes: dict[str, tuple[int, ...]]) -> Layout:
        started = [(slot, shapes[slot]) for slot in self.live if slot in self.zeroed]
        together, elements = [], 0
        # Outputs of a multiple of 16 bytes come first, so that they need no padding between them.
        for slot, shape in sorted(started, key=lambda zero: math.prod(zero[1]) % ALIGNED != 0):
            begin = -(-elements // ALIGNED) * ALIGNED
            together.append((slot, shape, begin))
            elements = begin + math.prod(shape)
        if len(started) < 2 or elements > SMALL_OUTPUTS or self.start is empty:
            together = []
        overwritten = [(slot, shapes[slot]) for slot in self.live if slot not in self.zeroed]
        if self.partial_y:
            edges, width = shapes["y"]
            overwritten = [(s, (edges, self.partial_y, width) if s == "y" else shape) for s, shape in overwritten]
        return Layout(elements, tuple(together), () if together else tuple(started), tuple(overwritten))

    def _run_unfused(self, operands: Operands, graph: Graph, poison: bool) -> dict[str, Tensor]:
        """Gather node rows, run the plain kernel on edge rows, sum edge rows back to nodes."""
        sender, receiver = graph.sender, graph.receiver
        assert sender is not None and receiver is not None
        by_edge = list(operands)
        for position, _, slot in self.read:
            tensor = operands[position]
            assert tensor is not None
            if slot in "xg":
                by_edge[position] = tensor.index_select(0, sender if slot == "x" else receiver)
        edges, shapes = graph.num_edges, graph.shapes
        on_edges = {**shapes, "x": (edges, shapes["x"][1]), "g": (edges, shapes["g"][1])}
        by_row = Graph(None, None, NO_ORDER, edges, edges, edges, on_edges)
        results = self._launch(tuple(by_edge), by_row, poison)
        for slot, index in (("x", sender), ("g", receiver)):
            if slot in results:
                results[slot] = zeros(shapes[slot], results[slot]).index_add_(0, index, results[slot])
        return results


# An operator's calls without autograd: each returns the outputs of one direction, keyed by slot.
#
# Checks, tuning and the autograd functions use them. ``kernelgen.ops.product`` has the rest of the operator.

# Runs one direction on operands and a graph (``poison``: see Runner); outputs by slot.
AnyRunner = Callable[..., dict[str, Tensor]]
# Direction, dtype of the indices (None for a plain product) and number of the device.
RunnerKey = tuple[Direction, torch.dtype | None, int]


class DirectCalls(ABC):
    """The calls of an operator; tensors are those of :class:`kernelgen.ops.product.Operator`, ``text`` its JSON."""

    text: str
    problem: TensorProductProblem
    is_conv: bool
    shared_weights: bool
    refused: dict[str, str]
    # Makes the checked graph of x, y, sender, receiver, num_out and order, which all calls on it share.
    graph: Callable[..., Graph]
    _runners: dict[RunnerKey, AnyRunner]

    @abstractmethod
    def prepared(
        self,
        direction: Direction,
        operands: Operands,
        graph: Graph,
        runners: dict[RunnerKey, AnyRunner],
        harmonics: HarmonicsProblem | None = None,
    ) -> AnyRunner:
        """The runner of a direction's first call, kept in ``runners``."""

    def run(
        self,
        direction: Direction,
        operands: Operands,
        sender: Tensor | None = None,
        receiver: Tensor | None = None,
        num_out: int | None = None,
        order: EdgeOrder | None = None,
        poison: bool = False,
    ) -> dict[str, Tensor]:
        """Run any direction, without autograd; its outputs by slot (of ``forward`` the value, as ``g``).

        operands: in the order of ``OPERANDS``, those that the direction does not read may be None, but for x and y; w
        is one row if it is shared. poison: first fill outputs that the kernel must overwrite with NaN.
        """
        x, y = operands[0], operands[2]
        assert x is not None and y is not None
        return self.run_on(self.graph(x, y, sender, receiver, num_out, order), direction, operands, poison)

    def run_on(
        self,
        graph: Graph,
        direction: Direction,
        operands: Operands,
        poison: bool = False,
        runners: dict[RunnerKey, AnyRunner] | None = None,
        harmonics: HarmonicsProblem | None = None,
    ) -> dict[str, Tensor]:
        """:meth:`run` on a graph that :meth:`graph` has checked.

        harmonics: which the kernels form of y, if it is vectors; their runners are kept in ``runners`` then.
        """
        x, sender = operands[0], graph.sender
        assert x is not None
        runners = self._runners if runners is None else runners
        key = (direction, None if sender is None else sender.dtype, x.get_device())
        runner = runners.get(key)
        if runner is None:
            tell_of_preparing()
            runner = self.prepared(direction, operands, graph, runners, harmonics)
        if WATCHERS:
            tell(self, direction, graph.num_edges, graph.num_out, sender, graph.receiver)
        return runner(operands, graph, poison)
