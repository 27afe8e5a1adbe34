"""What all kinds of kernels are run with: guarded tensors, the order of a graph's edges, the passes of autograd."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autotune.workload.workload import Tensors
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
    from autotune.measure.timing import Sampler  # which imports this package's users

    given = unordered(sender, receiver)
    sampler = Sampler(lambda: order(*given), str(sender.device))
    sampler.warm_up()
    return statistics.median(sampler.take(ORDER_SAMPLES)) / 1e3


def order_of(tensors: Tensors) -> EdgeOrder | None:
    """The order by receiver and by sender, made once as in a model: no timed call may sort edges."""
    if tensors.receiver is None:
        return None
    return edge_order(tensors.receiver, tensors.num_nodes, is_sorted=True, sender=tensors.sender)


# The timed passes of a differentiable function, as inference and training run them.

Call = Callable[..., torch.Tensor]


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
        self._out: torch.Tensor | None = None
        self._alone: dict[int, torch.Tensor] = {}
        self._first: tuple[torch.Tensor, ...] | None = None
        self._joint: tuple[torch.Tensor, torch.Tensor] | None = None

    def release(self) -> None:
        """Release the kept autograd graphs."""
        self._out = self._first = self._joint = None
        self._alone.clear()

    def forward(self) -> torch.Tensor:
        """The value."""
        with torch.no_grad():
            return self._call(*self._plain)

    def backward(self) -> tuple[torch.Tensor, ...]:
        """Gradients with respect to all inputs."""
        if self._out is None:
            self._out = self._call(*self._inputs)
        return torch.autograd.grad(self._out, self._inputs, self._tensors.g, retain_graph=True)

    def source_backward(self) -> torch.Tensor:
        """The gradient with respect to x alone."""
        return self._gradient_alone(0)

    # The same, where forces come from it.
    feature_backward = source_backward

    def edge_backward(self) -> torch.Tensor:
        """The gradient with respect to y alone, from which models compute forces."""
        return self._gradient_alone(1)

    def double_backward(self) -> tuple[torch.Tensor, ...]:
        """Gradients of the first gradients, contracted with the tangents, with respect to all inputs and g."""
        if self._first is None:
            out = self._call(*self._inputs)
            inputs = [self._inputs[self._slots.index(slot)] for slot in self._differentiated]
            self._first = torch.autograd.grad(out, inputs, self._g, create_graph=True)
        tangents = self._tangents(self._differentiated)
        return torch.autograd.grad(self._first, [*self._inputs, self._g], tangents, retain_graph=True)

    def joint_backward(self) -> tuple[torch.Tensor, ...]:
        """Gradients with respect to all inputs of a loss on the value and on one gradient: force_step's end."""
        if self._joint is None:
            self._joint = self._value_and_force_gradient()
        return torch.autograd.grad(self._joint, self._inputs, self._loss_tangents(), retain_graph=True)

    def forward_backward(self) -> tuple[torch.Tensor, ...]:
        """One forward pass and the gradients with respect to all inputs."""
        return torch.autograd.grad(self._call(*self._inputs), self._inputs, self._tensors.g)

    def force_step(self) -> tuple[torch.Tensor, ...]:
        """A training step on forces: value, gradient with respect to one input, gradients of a loss on both."""
        return torch.autograd.grad(self._value_and_force_gradient(), self._inputs, self._loss_tangents())

    def _gradient_alone(self, index: int) -> torch.Tensor:
        """The gradient of one input. No other requires one: a product might compute unused gradients."""
        if index not in self._alone:
            inputs = list(self._plain)
            inputs[index] = self._inputs[index]
            self._alone[index] = self._call(*inputs)
        return torch.autograd.grad(self._alone[index], self._inputs[index], self._tensors.g, retain_graph=True)[0]

    def _value_and_force_gradient(self) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._call(*self._inputs)
        return out, torch.autograd.grad(out, self._inputs[self._forces], self._tensors.g, create_graph=True)[0]

    def _loss_tangents(self) -> list[torch.Tensor]:
        return self._tangents("g" + self._slots[self._forces])

    def _tangents(self, slots: str) -> list[torch.Tensor]:
        return [getattr(self._tensors, "t" + slot) for slot in slots]
