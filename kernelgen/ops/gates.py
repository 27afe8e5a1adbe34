"""Gates in layout ``ir_mul`` with both derivatives, each in one launch.

Scalars s become c a(s), and the components v of an irrep become c a(s) v with a gate s for each of its channels. Here a
is an activation and c its constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.compat import run_eagerly, runs_eagerly
from kernelgen.errors import UnsupportedError
from kernelgen.kernels.source import Source
from kernelgen.ops.base import DTYPES
from kernelgen.ops.node_matrices import are_there, as_bits
from kernelgen.runtime.call import empty
from kernelgen.runtime.kernel import KernelByDtype

_THREADS = 256
KERNEL = KernelByDtype("equitune_gate", "gates.cuh", count=12, threads=_THREADS)
# Numbers of activations in the kernel.
IDENTITY, SILU, TANH, SIGMOID, POLYNOMIAL, CUT_POLYNOMIAL = range(6)


class GateRun(NamedTuple):
    """Neighbouring channels with one activation. source, target: offsets in rows of inputs and outputs.

    gate: offset of their gates, for scalars that of themselves. dim: components, 0 for scalars, ``stride`` apart.
    parameter: the power of a polynomial cutoff.
    """

    channels: int
    source: int
    target: int
    gate: int
    dim: int
    stride: int
    activation: int
    constant: float
    parameter: float = 0.0


class GateKernel:
    """The kernel of some runs, which together read and write whole rows; UnsupportedError if they do not."""

    def __init__(self, runs: Sequence[GateRun], dim_in: int, dim_out: int) -> None:
        self.runs, self.dim_in, self.dim_out = tuple(runs), dim_in, dim_out
        read = sum(run.channels * (run.dim + 1) for run in runs)
        written = sum(run.channels * max(1, run.dim) for run in runs)
        if (read, written) != (dim_in, dim_out):
            raise UnsupportedError(f"a gate that reads {read} of {dim_in} inputs and writes {written} of {dim_out}")
        self.channels = sum(run.channels for run in runs)
        self._on_device: dict[torch.device, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on_device": {}}

    def value(self, f: Tensor) -> Tensor:
        """f ``[nodes, dim_in]`` -> ``[nodes, dim_out]``."""
        out = empty((f.shape[0], self.dim_out), f)
        self._launch(0, f, f, f, f, out)
        return out

    def gradient(self, f: Tensor, g: Tensor) -> Tensor:
        """The gradient by f, for cotangents g ``[nodes, dim_out]``."""
        out = empty((f.shape[0], self.dim_in), f)
        self._launch(1, f, g, f, out, out)
        return out

    def second(self, f: Tensor, g: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients by f and by g of <t, :meth:`gradient`>, for t ``[nodes, dim_in]``."""
        of_f, of_g = empty((f.shape[0], self.dim_in), f), empty((f.shape[0], self.dim_out), f)
        self._launch(2, f, g, t, of_f, of_g)
        return of_f, of_g

    def _launch(self, order: int, *tensors: Tensor) -> None:
        f, nodes = tensors[0], tensors[0].shape[0]
        table = self._on_device.get(f.device)
        if table is None:
            with torch.inference_mode(False):
                table = self._on_device[f.device] = torch.tensor(self.table()).to(f.device)
        if nodes and self.channels:
            pointers = [tensor.data_ptr() for tensor in (*tensors, table)]
            sizes = (nodes, len(self.runs), self.channels, self.dim_in, self.dim_out, order)
            KERNEL.of(f.dtype).launch(f.get_device(), -(-nodes * self.channels // _THREADS), *pointers, *sizes)

    def table(self) -> list[int]:
        """The runs as the kernel describes them."""
        numbers, before = [], 0
        for run in self.runs:
            numbers += [before, run.channels, run.source, run.target, run.gate, run.dim, run.stride]
            numbers += [run.activation, as_bits(run.constant), as_bits(run.parameter)]
            before += run.channels
        return numbers


def takes(features: Tensor, sources: Callable[[torch.dtype], tuple[Source, ...]] = KERNEL.sources) -> bool:
    """Whether the kernel, or others with these sources, is for these features."""
    fits = features.is_cuda and features.dtype in DTYPES
    return fits and are_there(sources, features.dtype, features.get_device())


def scalar_kernel(activation: int, parameter: float = 0.0) -> GateKernel:
    """Of a function of each number ``[rows, 1]``."""
    return GateKernel([GateRun(1, 0, 0, 0, 0, 0, activation, 1.0, parameter)], 1, 1)


def gated(features: Tensor, kernel: GateKernel | None, composed: Callable[[Tensor], Tensor]) -> Tensor:
    """The kernel's value where it can be used, differentiable; ``composed`` is the same in operations of torch."""
    if kernel is None or not runs_eagerly(features) or not takes(features):
        return composed(features)
    features = features.contiguous()
    if torch.is_grad_enabled() and features.requires_grad:
        return _Value.apply(features, kernel, composed)
    return kernel.value(features)


class _Value(torch.autograd.Function):
    """Its first gradients can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, kernel: GateKernel, composed: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.kernel, ctx.composed = kernel, composed
        ctx.save_for_backward(f)
        return kernel.value(f)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take torch's own")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (f,), differentiated, (g,) = ctx.saved_tensors, torch.is_grad_enabled(), gradients
        if not runs_eagerly(f, g):
            with torch.enable_grad():
                (found,) = torch.autograd.grad(ctx.composed(f), f, g, create_graph=differentiated)
            return found, None, None
        g = g.contiguous()
        found = _Gradient.apply(f, g, ctx.kernel, ctx.composed) if differentiated else ctx.kernel.gradient(f, g)
        return found, None, None


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Tensor, g: Tensor, kernel: GateKernel, composed: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.kernel, ctx.composed = kernel, composed
        ctx.save_for_backward(f, g)
        return kernel.gradient(f, g)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take torch's own")
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        (f, g), differentiated, (t,) = ctx.saved_tensors, torch.is_grad_enabled(), tangents
        if runs_eagerly(f, g, t) and not differentiated:
            return (*ctx.kernel.second(f, g, t.contiguous()), None, None)
        with torch.enable_grad():
            f, g = f.view_as(f), g.view_as(g)  # g may depend on f, which is not this node's affair
            needed = [one for one, is_needed in zip((f, g), ctx.needs_input_grad, strict=False) if is_needed]
            (first,) = torch.autograd.grad(ctx.composed(f), f, g, create_graph=True)
            found = iter(torch.autograd.grad(first, needed, t, create_graph=differentiated))
        return (*(next(found) if is_needed else None for is_needed in ctx.needs_input_grad[:2]), None, None)
