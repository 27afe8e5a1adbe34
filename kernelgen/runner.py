"""One direction of an operator, ready to run: checked tensors enter, its gradients leave.

A runner is made once for a direction, an index type and a device. It allocates outputs, launches the one kernel, and,
where the schedule does not fuse, gathers and scatters with torch around a plain kernel.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from kernelgen.errors import InputError
from kernelgen.graph import EdgeOrder
from kernelgen.launch import Kernel, load_kernel
from kernelgen.plan import Spec
from kernelgen.problem import TensorProductProblem

ALIGNMENT = 16
OPERANDS = ("x", "tx", "y", "ty", "w", "tw", "g")
# One tensor for each of OPERANDS; None where a direction does not have it.
Operands = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Graph:
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

    def shape(self, slot: str, graph: Graph) -> tuple[int, ...]:
        """Shape of an operand or gradient of a slot."""
        problem = self.problem
        if slot == "x":
            return (graph.num_in, problem.dim_in1)
        if slot == "y":
            return (graph.num_edges, problem.dim_in2)
        if slot == "w":
            return (problem.weight_numel,) if problem.shared_weights else (graph.num_edges, problem.weight_numel)
        return (graph.num_out, problem.dim_out)

    def operands(self, operands: Operands, graph: Graph) -> Operands:
        """The operands, contiguous and aligned (copied only where they are not)."""
        x = operands[0]
        assert x is not None
        device = x.device
        if device.type != self.device_type:
            raise InputError(f"x is on {device}; this operator was built for {self.device_type}, build one with {device=!s}")
        ready: list[Tensor | None] = []
        for name, tensor in zip(OPERANDS, operands, strict=True):
            if tensor is not None:
                if tensor.dtype != self.dtype or tensor.device != device or tensor.shape != self.shape(name[-1], graph):
                    raise self._mismatch(name, tensor, graph, device)
                if not tensor.is_contiguous():
                    tensor = tensor.contiguous()
                if tensor.data_ptr() % ALIGNMENT:
                    tensor = tensor.clone()
            ready.append(tensor)
        return tuple(ready)

    def indices(self, graph: Graph, device: torch.device) -> None:
        """Sender and receiver agree with each other, with the edges and with the operands' device."""
        if not self.is_conv:
            if graph.sender is not None or graph.receiver is not None:
                raise InputError("sender and receiver were given to a plain product; build it with operation='conv'")
            return
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
            raise InputError(f"sender is {graph.sender.dtype} and receiver {graph.receiver.dtype}; expected the same dtype")

    def order(self, graph: Graph, device: torch.device) -> None:
        """A precomputed order fits the graph."""
        if graph.order is None:
            return
        wanted = (("row_ptr", graph.order.row_ptr, graph.num_out + 1), ("perm", graph.order.perm, graph.num_edges))
        for name, tensor, length in wanted:
            if tensor is None:
                continue
            if tensor.dtype != torch.int32 or tensor.shape != (length,) or tensor.device != device:
                raise InputError(
                    f"order.{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected int32 "
                    f"({length},) on {device}: make it with edge_order(receiver, num_out={graph.num_out})"
                )

    def _mismatch(self, name: str, tensor: Tensor, graph: Graph, device: torch.device) -> InputError:
        rows = "num_edges is taken from y, num_in from x"
        return InputError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected {self.dtype} "
            f"{self.shape(name[-1], graph)} on {device} ({rows}) for {self.problem.irreps_in1} x "
            f"{self.problem.irreps_in2} -> {self.problem.irreps_out}"
        )


class Runner:
    """Runs one direction. Outputs that no term reaches are zeros, and so is everything where there are no edges."""

    def __init__(self, spec: Spec, checks: Checks) -> None:
        self.checks = checks
        self.direction = spec.direction
        self.live = spec.direction.live_outputs if spec.problem.paths else ""
        self.gathers = checks.is_conv and spec.operation == "plain"
        self.kernel: Kernel | None = None
        self.owns_destination = False
        if self.live:
            self.kernel = load_kernel(
                dataclasses.replace(spec, direction=dataclasses.replace(spec.direction, outputs=self.live))
            )
            self.owns_destination = self.kernel.plan.owns_destination
            self.zeroed = tuple(f"out_{slot}" in self.kernel.plan.zeroed for slot in "xywg")

    def __call__(self, operands: Operands, graph: Graph, poison: bool) -> dict[str, Tensor]:
        """Gradients keyed by slot. ``operands`` and ``graph`` have passed the checks."""
        if self.kernel is None or graph.num_edges == 0:
            return {slot: self._zeros(slot, operands, graph) for slot in self.direction.outputs}
        if self.gathers:
            results = self._run_unfused(operands, graph, poison)
        else:
            results = self._launch(operands, graph, poison)
        for slot in self.direction.outputs:
            if slot not in self.live:
                results[slot] = self._zeros(slot, operands, graph)
        return results

    def _zeros(self, slot: str, operands: Operands, graph: Graph) -> Tensor:
        x = operands[0]
        assert x is not None
        return torch.zeros(self.checks.shape(slot, graph), dtype=x.dtype, device=x.device)

    def _launch(self, operands: Operands, graph: Graph, poison: bool) -> dict[str, Tensor]:
        x, kernel = operands[0], self.kernel
        assert x is not None and kernel is not None
        results: dict[str, Tensor] = {}
        outputs: list[Tensor | None] = []
        for slot, zeroed in zip("xywg", self.zeroed, strict=True):
            if slot not in self.live:
                outputs.append(None)
                continue
            out = (torch.zeros if zeroed else torch.empty)(
                self.checks.shape(slot, graph), dtype=x.dtype, device=x.device
            )
            if poison and not zeroed:
                out.fill_(float("nan"))
            outputs.append(out)
            results[slot] = out
        row_ptr, perm = graph.order if self.owns_destination and graph.order is not None else (None, None)
        tensors = (*operands, *outputs, graph.sender, graph.receiver, row_ptr, perm)
        kernel.run(tensors, graph.num_edges, graph.num_in, graph.num_out)
        return results

    def _run_unfused(self, operands: Operands, graph: Graph, poison: bool) -> dict[str, Tensor]:
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
        results = self._launch(tuple(by_edge), Graph(None, None, None, edges, edges, edges), poison)
        for slot, index in (("x", sender), ("g", receiver)):
            if slot in results:
                results[slot] = self._zeros(slot, operands, graph).index_add_(0, index, results[slot])
        return results
