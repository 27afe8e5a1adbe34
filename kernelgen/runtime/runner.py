"""Runs one direction of an operator on checked tensors.

A runner is made once for a direction, an index type and a device. It allocates outputs and launches the kernel. If the
schedule does not fuse, torch gathers and scatters around a plain kernel.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernelgen.arithmetic.directions import OPERANDS, Direction
from kernelgen.kernels.dispatch import AnyPlan, make_plan
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import BUFFERS, Spec
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime.call import WATCHERS, Checks, Graph, Operands, empty, part, tell, tell_of_preparing, zeros
from kernelgen.runtime.graph import NO_ORDER, EdgeOrder, order_by
from kernelgen.runtime.kernel import Kernel, load_kernel

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


def live_spec(spec: Spec) -> Spec | None:
    """The spec with the outputs to which something contributes; None if there are none."""
    live = spec.direction.live_outputs if spec.problem.paths else ""
    return dataclasses.replace(spec, direction=dataclasses.replace(spec.direction, outputs=live)) if live else None


def recipe_of(spec: Spec, is_conv: bool, plan: AnyPlan | None = None) -> Recipe:
    """The recipe of a spec. plan: of the live outputs, if it is at hand."""
    live, gathers = live_spec(spec), is_conv and spec.operation == "plain"
    if live is None:
        return Recipe(spec, None, {}, (), gathers, "", 0, None)
    plan = plan or make_plan(live)
    schedule = spec.schedule
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
        live = live_spec(spec)
        self.kernel: Kernel | None = None if live is None else load_kernel(live)
        recipe = recipe_of(spec, checks.is_conv, None if self.kernel is None else self.kernel.plan)
        self.live = "".join(recipe.writes)
        self.gathers = recipe.gathers
        self.dead = tuple(slot for slot in spec.direction.outputs if slot not in self.live)
        # Of the kernel that takes edges by receiver, if runs of those are better than of a graph's own order.
        self.permuted = recipe.permuted
        # The end by which the kernel must have the edges in order.
        self.order, self.partial_y = recipe.order, recipe.partial_y
        # Live outputs that must be zero before the kernel adds to them.
        self.zeroed = "".join(slot for slot, rule in recipe.writes.items() if rule != "empty")
        # Position, name and slot of the operands that the kernel reads.
        self.read = tuple((OPERANDS.index(name), name, name[-1]) for name in recipe.reads)
        # Allocates the zeroed outputs; ``empty`` if the kernel zeroes them itself.
        inside = "inside" in recipe.writes.values()
        self.start: Callable[[tuple[int, ...], Tensor], Tensor] = empty if inside else zeros
        self._layouts: dict[tuple, Layout] = {}

    def __call__(self, operands: Operands, graph: Graph, poison: bool = False) -> dict[str, Tensor]:
        """Gradients keyed by slot; InputError for tensors that do not fit the operator."""
        x = operands[0]
        assert x is not None
        shapes = graph.shapes
        if not self.live or graph.num_edges == 0:
            self.checks.operands(operands, self.checks.given(operands), shapes)
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
        order = graph.order
        if self.order == "receiver":
            if order.spans is not None:
                return order.spans, order.perm
            assert graph.receiver is not None
            return order_by("receiver", graph.receiver, graph.num_out)
        if order.sender_spans is not None:
            return order.sender_spans, order.sender_perm
        assert graph.sender is not None
        return order_by("sender", graph.sender, graph.num_in)

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


class SplitRunner:
    """Runs two kernels for sums in a fixed order: one that owns senders for dF/dx, one that owns receivers."""

    def __init__(self, of_x: Runner, others: Runner) -> None:
        self.parts = (of_x, others)

    def __call__(self, operands: Operands, graph: Graph, poison: bool = False) -> dict[str, Tensor]:
        of_x, others = (runner(operands, graph, poison) for runner in self.parts)
        return of_x | others


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
        self, direction: Direction, operands: Operands, graph: Graph, runners: dict[RunnerKey, AnyRunner]
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

    def run_on(self, graph: Graph, direction: Direction, operands: Operands, poison: bool = False) -> dict[str, Tensor]:
        """:meth:`run` on a graph that :meth:`graph` has checked."""
        x, sender = operands[0], graph.sender
        assert x is not None
        key = (direction, None if sender is None else sender.dtype, x.get_device())
        runner = self._runners.get(key)
        if runner is None:
            tell_of_preparing()
            runner = self.prepared(direction, operands, graph, self._runners)
        if WATCHERS:
            tell(self, direction, graph.num_edges, graph.num_out, sender, graph.receiver)
        return runner(operands, graph, poison)
