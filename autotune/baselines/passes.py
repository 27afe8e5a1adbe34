"""The four passes of a differentiable product, as a training step would run them: what every contender is timed on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autotune.workload import Tensors

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class AutogradPasses:
    """Passes of ``call(x, y, w)`` on given tensors. Graphs are kept between calls: backward is timed alone."""

    def __init__(self, call: Call, tensors: Tensors) -> None:
        self._call = call
        self._plain = (tensors.x, tensors.y, tensors.w)
        self._inputs = [tensor.detach().clone().requires_grad_() for tensor in self._plain]
        self._g = tensors.g.detach().clone().requires_grad_()
        self._tangents = [tensors.tx, tensors.ty, tensors.tw]
        self._out: torch.Tensor | None = None
        self._first: tuple[torch.Tensor, ...] | None = None

    def release(self) -> None:
        """Drop the kept graphs."""
        self._out = self._first = None

    def forward(self) -> torch.Tensor:
        """The product's value."""
        with torch.no_grad():
            return self._call(*self._plain)

    def backward(self) -> tuple[torch.Tensor, ...]:
        """Gradients with respect to x, y and w."""
        if self._out is None:
            self._out = self._call(*self._inputs)
        return torch.autograd.grad(self._out, self._inputs, self._g.detach(), retain_graph=True)

    def double_backward(self) -> tuple[torch.Tensor, ...]:
        """Gradients of the first gradients, contracted with the tangents, with respect to x, y, w and g."""
        if self._first is None:
            out = self._call(*self._inputs)
            self._first = torch.autograd.grad(out, self._inputs, self._g, create_graph=True)
        return torch.autograd.grad(self._first, [*self._inputs, self._g], self._tangents, retain_graph=True)

    def forward_backward(self) -> tuple[torch.Tensor, ...]:
        """One forward pass and the gradients with respect to x, y and w."""
        return torch.autograd.grad(self._call(*self._inputs), self._inputs, self._g.detach())
