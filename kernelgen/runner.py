"""One direction of an operator, ready to run: checked tensors enter, its gradients leave.

A runner is made once for a direction, an index type and a device. It allocates outputs, launches the one kernel, and,
where the schedule does not fuse, gathers and scatters with torch around a plain kernel.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernelgen.direction import OPERANDS
from kernelgen.errors import InputError
from kernelgen.graph import NO_ORDER, EdgeOrder, order_by
from kernelgen.host_memory import empty
from kernelgen.launch import Kernel, load_kernel
from kernelgen.plan import BUFFERS, Spec
from kernelgen.problem import TensorProductProblem

ALIGNMENT = 16
# Elements up to which outputs that start from zero share one allocation: one launch instead of several.
SMALL_OUTPUTS = 1 << 18
_OUTPUT = {slot: BUFFERS.index(f"out_{slot}") for slot in "xywg"}
_SENDER, _ROWS = BUFFERS.index("sender"), BUFFERS.index("row_ptr")
# One tensor for each of OPERANDS; None where a direction does not have it.
Operands = tuple[Tensor | None, ...]


class Graph(NamedTuple):
    """A call's edges (None for the plain product), row counts, and shapes by slot: checked once for all directions."""

    sender: Tensor | None
    receiver: Tensor | None
    order: EdgeOrder
    num_edges: int
    num_in: int
    num_out: int
    shapes: dict[str, tuple[int, ...]]


class Checks:
    """What tensors an operator takes; InputError for any other."""

    def __init__(self, problem: TensorProductProblem, operation: str, dtype: torch.dtype, device_type: str) -> None:
        self.problem = problem
        self.is_conv = operation == "conv"
        self.dtype = dtype
        self.device_type = device_type

    def given(self, operands: Operands) -> tuple[tuple[int, str, str], ...]:
        """Position, name and slot of the operands that are there."""
        return tuple((i, name, name[-1]) for i, name in enumerate(OPERANDS) if operands[i] is not None)

    def graph(
        self,
        x: Tensor,
        y: Tensor,
        sender: Tensor | None,
        receiver: Tensor | None,
        num_out: int | None,
        order: EdgeOrder | None,
    ) -> Graph:
        """Index tensors that agree with each other, the edges and the device, contiguous."""
        if x.dim() != 2 or y.dim() != 2:
            raise InputError(f"x is {tuple(x.shape)} and y {tuple(y.shape)}; expected [rows, features] for both")
        num_edges, num_in, order = y.shape[0], x.shape[0], order or NO_ORDER
        if not self.is_conv:
            if sender is not None or receiver is not None:
                raise InputError("sender and receiver were given to a plain product; build it with operation='conv'")
            num_in = num_out = num_edges
        else:
            num_out = num_in if num_out is None else num_out
            if num_out < 0:
                raise InputError(f"num_out is {num_out}; expected the number of destinations, at least 0")
            sender, receiver = self._indices(sender, receiver, num_edges, x.device)
            if order is not NO_ORDER:
                lengths = (num_out + 1, num_edges, num_in + 1, num_edges)
                order = self._order(order, lengths, x.device)
        problem = self.problem
        shapes: dict[str, tuple[int, ...]] = {
            "x": (num_in, problem.dim_in1),
            "y": (num_edges, problem.dim_in2),
            "w": (problem.weight_numel,) if problem.shared_weights else (num_edges, problem.weight_numel),
            "g": (num_out, problem.dim_out),
        }
        return Graph(sender, receiver, order, num_edges, num_in, num_out, shapes)

    def operands(
        self, operands: Operands, read: tuple[tuple[int, str, str], ...], shapes: dict[str, tuple[int, ...]]
    ) -> Operands:
        """The operands, those that are ``read`` contiguous and aligned (copied only where they are not)."""
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
            elsewhere = tensor.get_device() != device or tensor.is_cpu is not cpu
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
            fits = index.dtype in (torch.int32, torch.int64) and index.shape == (num_edges,)
            if not fits or index.device != device:
                raise InputError(
                    f"{name} is {index.dtype} {tuple(index.shape)} on {index.device}; "
                    f"expected int32 or int64 ({num_edges},) on {device}, one index for each row of y"
                )
        assert sender is not None and receiver is not None
        if sender.dtype is not receiver.dtype:
            raise InputError(f"sender is {sender.dtype} and receiver {receiver.dtype}; expected one dtype")
        if not (sender.is_contiguous() and receiver.is_contiguous()):
            return sender.contiguous(), receiver.contiguous()
        return sender, receiver

    def _order(self, order: EdgeOrder, lengths: tuple[int, ...], device: torch.device) -> EdgeOrder:
        """A precomputed order that fits the graph, contiguous."""
        for name, tensor, length in zip(EdgeOrder._fields, order, lengths, strict=True):
            if tensor is None:
                continue
            if tensor.dtype is not torch.int32 or tensor.shape != (length,) or tensor.device != device:
                raise InputError(
                    f"order.{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected int32 "
                    f"({length},) on {device}: make it with edge_order(receiver, num_out={lengths[0] - 1})"
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


class Runner:
    """Runs one direction. Outputs that no term reaches are zeros, and so is everything where there are no edges.

    What a call needs is worked out here, once: small graphs are decided by the host's time for a call.
    """

    def __init__(self, spec: Spec, checks: Checks) -> None:
        self.checks = checks
        self.direction = spec.direction
        self.live = spec.direction.live_outputs if spec.problem.paths else ""
        self.gathers = checks.is_conv and spec.operation == "plain"
        self.dead = tuple(slot for slot in spec.direction.outputs if slot not in self.live)
        self.kernel: Kernel | None = None
        self.owner = ""
        self.zeroed = ""  # live outputs that must be zero before the launch
        # Position, name and slot of the operands that the kernel reads.
        self.read: tuple[tuple[int, str, str], ...] = ()
        self.partial_y = 0
        if self.live:
            live = dataclasses.replace(spec.direction, outputs=self.live)
            self.kernel = load_kernel(dataclasses.replace(spec, direction=live))
            plan = self.kernel.plan
            self.owner, self.partial_y = plan.owner, plan.partial_y
            self.zeroed = "".join(slot for slot in self.live if f"out_{slot}" in plan.zeroed)
            self.read = tuple((OPERANDS.index(name), name, name[-1]) for name in live.operands)

    def __call__(self, operands: Operands, graph: Graph, poison: bool = False) -> dict[str, Tensor]:
        """Gradients keyed by slot; InputError for tensors that do not fit the operator."""
        x = operands[0]
        assert x is not None
        shapes = graph.shapes
        if not self.live or graph.num_edges == 0:
            self.checks.operands(operands, self.checks.given(operands), shapes)
            return {slot: _zeros(shapes[slot], x) for slot in self.direction.outputs}
        operands = self.checks.operands(operands, self.read, shapes)
        run = self._run_unfused if self.gathers else self._launch
        results = run(operands, graph, poison)
        for slot in self.dead:
            results[slot] = _zeros(shapes[slot], x)
        return results

    def _launch(self, operands: Operands, graph: Graph, poison: bool) -> dict[str, Tensor]:
        x, kernel = operands[0], self.kernel
        assert x is not None and kernel is not None
        results = self._allocate(graph.shapes, x, poison)
        pointers = [0] * len(BUFFERS)
        for position, _, _ in self.read:
            pointers[position] = operands[position].data_ptr()  # type: ignore[union-attr]
        for slot, out in results.items():
            pointers[_OUTPUT[slot]] = out.data_ptr()
        if graph.sender is not None and graph.receiver is not None:
            pointers[_SENDER], pointers[_SENDER + 1] = graph.sender.data_ptr(), graph.receiver.data_ptr()
        if self.owner:
            # Kept in a variable: an order made for this call must live until the launch is queued.
            rows = self._rows(graph)
            pointers[_ROWS] = rows[0].data_ptr()
            pointers[_ROWS + 1] = 0 if rows[1] is None else rows[1].data_ptr()
        kernel.run(pointers, graph.num_edges, graph.num_in, graph.num_out, x.get_device())
        if self.partial_y:
            results["y"] = results["y"].sum(1)
        return results

    def _rows(self, graph: Graph) -> tuple[Tensor, Tensor | None]:
        """The edges by owner: row pointer and permutation, made here if the graph came without."""
        order = graph.order
        if self.owner == "receiver":
            if order.row_ptr is not None:
                return order.row_ptr, order.perm
            assert graph.receiver is not None
            return order_by("receiver", graph.receiver, graph.num_out)
        if order.sender_ptr is not None:
            return order.sender_ptr, order.sender_perm
        assert graph.sender is not None
        return order_by("sender", graph.sender, graph.num_in)

    def _allocate(self, shapes: dict[str, tuple[int, ...]], x: Tensor, poison: bool) -> dict[str, Tensor]:
        results = _small_zeros(self.zeroed, shapes, x) if len(self.zeroed) > 1 else {}
        for slot in self.live:
            if slot in results:
                continue
            shape = shapes[slot]
            if slot in self.zeroed:
                results[slot] = x.new_zeros(shape)
                continue
            if self.partial_y and slot == "y":
                shape = (shape[0], self.partial_y, shape[1])
            results[slot] = out = empty(shape, x)
            if poison:
                out.fill_(float("nan"))
        return results

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
                results[slot] = _zeros(shapes[slot], results[slot]).index_add_(0, index, results[slot])
        return results


class SplitRunner:
    """Gradients of x by one kernel that owns senders, all others by one that owns receivers: sums in a fixed order."""

    def __init__(self, of_x: Runner, others: Runner) -> None:
        self.parts = (of_x, others)

    def __call__(self, operands: Operands, graph: Graph, poison: bool = False) -> dict[str, Tensor]:
        of_x, others = (part(operands, graph, poison) for part in self.parts)
        return of_x | others


def _small_zeros(slots: str, shapes: dict[str, tuple[int, ...]], like: Tensor) -> dict[str, Tensor]:
    """Zeros for several outputs from one allocation, where filling them costs less than telling the device to."""
    counts = [-(-math.prod(shapes[slot]) // ALIGNMENT) * ALIGNMENT for slot in slots]
    total = sum(counts)
    if total > SMALL_OUTPUTS:
        return {}
    flat, begin, results = like.new_zeros(total), 0, {}
    for slot, count in zip(slots, counts, strict=True):
        shape = shapes[slot]
        # ``data``: no view, so that writing into one in place does not count as a change of the others.
        results[slot] = flat.as_strided(shape, (shape[-1], 1) if len(shape) == 2 else (1,), begin).data
        begin += count
    return results


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)
