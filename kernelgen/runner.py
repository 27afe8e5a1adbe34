"""One direction of an operator, ready to run: checked tensors enter, its gradients leave.

A runner is made once for a direction, an index type and a device. It allocates outputs, launches the one kernel, and,
where the schedule does not fuse, gathers and scatters with torch around a plain kernel.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from kernelgen.errors import InputError
from kernelgen.graph import EdgeOrder
from kernelgen.host_memory import empty
from kernelgen.launch import Kernel, load_kernel
from kernelgen.plan import Spec
from kernelgen.problem import TensorProductProblem

ALIGNMENT = 16
OPERANDS = ("x", "tx", "y", "ty", "w", "tw", "g")
# One tensor for each of OPERANDS; None where a direction does not have it.
Operands = tuple[Tensor | None, ...]


class Graph(NamedTuple):
    """The convolution's edges (None for the plain product) and all row counts of a call."""

    sender: Tensor | None
    receiver: Tensor | None
    order: EdgeOrder | None
    num_edges: int
    num_in: int
    num_out: int


class Checks:
    """What tensors an operator takes; InputError for any other."""

    def __init__(self, problem: TensorProductProblem, operation: str, dtype: torch.dtype, device_type: str) -> None:
        self.problem = problem
        self.is_conv = operation == "conv"
        self.dtype = dtype
        self.device_type = device_type

    def shapes(self, graph: Graph) -> dict[str, tuple[int, ...]]:
        """Shape of the operands and of the gradient of each slot."""
        problem, edges = self.problem, graph.num_edges
        return {
            "x": (graph.num_in, problem.dim_in1),
            "y": (edges, problem.dim_in2),
            "w": (problem.weight_numel,) if problem.shared_weights else (edges, problem.weight_numel),
            "g": (graph.num_out, problem.dim_out),
        }

    def operands(self, operands: Operands, shapes: dict[str, tuple[int, ...]]) -> Operands:
        """The operands, contiguous and aligned (copied only where they are not)."""
        x = operands[0]
        assert x is not None
        device, dtype = x.device, self.dtype
        if device.type != self.device_type:
            raise InputError(f"x is on {device}; this operator was built for {self.device_type}: build another for it")
        ready: list[Tensor | None] = []
        for name, tensor in zip(OPERANDS, operands, strict=True):
            if tensor is not None:
                if tensor.dtype != dtype or tensor.shape != shapes[name[-1]] or tensor.device != device:
                    raise self._mismatch(name, tensor, shapes[name[-1]], device)
                if not tensor.is_contiguous():
                    tensor = tensor.contiguous()
                if tensor.data_ptr() % ALIGNMENT:
                    tensor = tensor.clone()
            ready.append(tensor)
        return tuple(ready)

    def indices(self, graph: Graph, device: torch.device) -> Graph:
        """The graph with contiguous sender and receiver that agree with each other, the edges and the device."""
        if not self.is_conv:
            if graph.sender is not None or graph.receiver is not None:
                raise InputError("sender and receiver were given to a plain product; build it with operation='conv'")
            return graph
        for name, index in (("sender", graph.sender), ("receiver", graph.receiver)):
            if index is None:
                raise InputError(f"{name} is missing; a convolution needs sender and receiver [num_edges]")
            fits = index.dtype in (torch.int32, torch.int64) and index.shape == (graph.num_edges,)
            if not fits or index.device != device:
                raise InputError(
                    f"{name} is {index.dtype} {tuple(index.shape)} on {index.device}; "
                    f"expected int32 or int64 ({graph.num_edges},) on {device}, one index for each row of y"
                )
        assert graph.sender is not None and graph.receiver is not None
        if graph.sender.dtype != graph.receiver.dtype:
            raise InputError(f"sender is {graph.sender.dtype} and receiver {graph.receiver.dtype}; expected one dtype")
        if graph.sender.is_contiguous() and graph.receiver.is_contiguous():
            return graph
        return graph._replace(sender=graph.sender.contiguous(), receiver=graph.receiver.contiguous())

    def order(self, order: EdgeOrder, graph: Graph, device: torch.device) -> EdgeOrder:
        """A precomputed order that fits the graph, contiguous."""
        wanted = (("row_ptr", order.row_ptr, graph.num_out + 1), ("perm", order.perm, graph.num_edges))
        for name, tensor, length in wanted:
            if tensor is None:
                continue
            if tensor.dtype != torch.int32 or tensor.shape != (length,) or tensor.device != device:
                raise InputError(
                    f"order.{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected int32 "
                    f"({length},) on {device}: make it with edge_order(receiver, num_out={graph.num_out})"
                )
        return EdgeOrder(order.row_ptr.contiguous(), None if order.perm is None else order.perm.contiguous())

    def _mismatch(self, name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> InputError:
        rows = "num_edges is taken from y, num_in from x"
        return InputError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected {self.dtype} "
            f"{shape} on {device} ({rows}) for {self.problem.irreps_in1} x "
            f"{self.problem.irreps_in2} -> {self.problem.irreps_out}"
        )


class Runner:
    """Runs one direction. Outputs that no term reaches are zeros, and so is everything where there are no edges."""

    def __init__(self, spec: Spec, checks: Checks) -> None:
        self.checks = checks
        self.direction = spec.direction
        self.live = spec.direction.live_outputs if spec.problem.paths else ""
        self.gathers = checks.is_conv and spec.operation == "plain"
        self.dead = tuple(slot for slot in spec.direction.outputs if slot not in self.live)
        self.kernel: Kernel | None = None
        self.owns_destination = False
        # (slot, whether it must be zero before the launch) of the outputs that the kernel writes
        self.allocated: tuple[tuple[str, bool], ...] = ()
        if self.live:
            live = dataclasses.replace(spec.direction, outputs=self.live)
            self.kernel = load_kernel(dataclasses.replace(spec, direction=live))
            plan = self.kernel.plan
            self.owns_destination = plan.owns_destination
            self.allocated = tuple((slot, f"out_{slot}" in plan.zeroed) for slot in self.live)

    def __call__(
        self, operands: Operands, graph: Graph, shapes: dict[str, tuple[int, ...]], poison: bool
    ) -> dict[str, Tensor]:
        """Gradients keyed by slot. ``operands`` and ``graph`` have passed the checks."""
        x = operands[0]
        assert x is not None
        if not self.live or graph.num_edges == 0:
            return {slot: _zeros(shapes[slot], x) for slot in self.direction.outputs}
        if self.gathers:
            results = self._run_unfused(operands, graph, shapes, poison)
        else:
            results = self._launch(operands, graph, shapes, poison)
        for slot in self.dead:
            results[slot] = _zeros(shapes[slot], x)
        return results

    def _launch(
        self, operands: Operands, graph: Graph, shapes: dict[str, tuple[int, ...]], poison: bool
    ) -> dict[str, Tensor]:
        x = operands[0]
        assert x is not None and self.kernel is not None
        results: dict[str, Tensor] = {}
        for slot, zeroed in self.allocated:
            out = empty(shapes[slot], x)
            if zeroed:
                out.zero_()
            elif poison:
                out.fill_(float("nan"))
            results[slot] = out
        given = results.get
        row_ptr, perm = graph.order if self.owns_destination and graph.order is not None else (None, None)
        tensors = (
            *(*operands, given("x"), given("y"), given("w"), given("g")),
            *(graph.sender, graph.receiver, row_ptr, perm),
        )
        self.kernel.run(tensors, graph.num_edges, graph.num_in, graph.num_out)
        return results

    def _run_unfused(
        self, operands: Operands, graph: Graph, shapes: dict[str, tuple[int, ...]], poison: bool
    ) -> dict[str, Tensor]:
        """Gather node rows, run the plain kernel on edge rows, sum edge rows back to nodes."""
        sender, receiver = graph.sender, graph.receiver
        assert sender is not None and receiver is not None
        by_edge = []
        for name, tensor in zip(OPERANDS, operands, strict=True):
            if tensor is not None and name in self.direction.operands:
                if name in ("x", "tx"):
                    tensor = tensor.index_select(0, sender)
                elif name == "g":
                    tensor = tensor.index_select(0, receiver)
            by_edge.append(tensor)
        edges = graph.num_edges
        on_edges = {**shapes, "x": (edges, shapes["x"][1]), "g": (edges, shapes["g"][1])}
        results = self._launch(tuple(by_edge), Graph(None, None, None, edges, edges, edges), on_edges, poison)
        for slot, index in (("x", sender), ("g", receiver)):
            if slot in results:
                results[slot] = _zeros(shapes[slot], results[slot]).index_add_(0, index, results[slot])
        return results


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=like.dtype, device=like.device)
