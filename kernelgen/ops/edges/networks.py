"""Hidden features of a radial network from the features of an edge's length: all hidden layers in one kernel.

A layer is a product with a small matrix, then SiLU. Layer by layer each reads and writes a row of features for each
edge, and keeps them for the gradient. The kernel keeps them in registers, with the arithmetic of ``tall_matrices``, and
its gradient computes them again: only the network's input is held. The kernels are float32's, for frozen matrices:
a gradient of matrices needs the features that the kernel does not keep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.emit.source import Source
from kernelgen.ops.edges import products, tall_matrices
from kernelgen.ops.edges.products import edge_product
from kernelgen.ops.edges.silu import few_pass_silu
from kernelgen.runtime.allocation import empty
from kernelgen.runtime.kernel import FixedKernel
from kernelgen.torch_versions import run_eagerly
from kernelgen.tracing import runs_eagerly

# What a warp's registers hold: inputs are one step of 16 along the depth, hidden features four.
MOST_INPUTS, MOST_HIDDEN, MOST_LAYERS = 16, 64, 3
_WARPS, _ROWS = 4, 16


def hidden_features(x: Tensor, matrices: Sequence[Tensor], in_one_kernel: bool = True) -> Tensor:
    """x ``[edges, inputs]`` after ``silu(x @ matrix)`` with each matrix in order, ``[edges, hidden]``.

    Differentiable any number of times. in_one_kernel: where :func:`is_one_kernel` says that there is one; otherwise,
    and for derivatives of the gradient, layer by layer.
    """
    if not (in_one_kernel and is_one_kernel(x, matrices)):
        return layer_by_layer(x, matrices)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Network.apply(x, *matrices)
    return _features(x, Packed.of(matrices))


def layer_by_layer(x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """The same with every layer's features in memory."""
    for matrix in matrices:
        x = few_pass_silu(edge_product(x, matrix))
    return x


def is_one_kernel(x: Tensor, matrices: Sequence[Tensor]) -> bool:
    """Whether kernels take these: many edges, a shape that :func:`fits`, and matrices that get no gradients."""
    rows = x.shape[0]
    if type(rows) is not int or rows < products.LEAST_ROWS or not fits(x.shape[1], [m.shape[1] for m in matrices]):
        return False
    if not runs_eagerly(x, *matrices) or torch.is_autocast_enabled():
        return False
    alike = all(m.dtype is x.dtype and m.device == x.device for m in matrices)
    frozen = not (torch.is_grad_enabled() and any(m.requires_grad for m in matrices))
    return alike and frozen and tall_matrices.takes(x, _sources(matrices[0].shape[1] // 16, len(matrices)))


def fits(inputs: int, widths: Sequence[int]) -> bool:
    """Whether there are kernels for layers of these widths: equal ones, at most ``MOST_LAYERS``."""
    if not 0 < len(widths) <= MOST_LAYERS or inputs % 4 or not 0 < inputs <= MOST_INPUTS:
        return False
    return set(widths) == {widths[0]} and widths[0] % 16 == 0 and 0 < widths[0] <= MOST_HIDDEN


class Packed(NamedTuple):
    """Matrices as the kernels read them: fragments one after the other; scales of columns, 16 ``steps`` a layer."""

    fragments: Tensor
    backs: Tensor
    steps: int
    layers: int

    @classmethod
    def of(cls, matrices: Sequence[Tensor]) -> Packed:
        """Of matrices or their transposes: 16 ``steps`` by as many, and a first one with few inputs."""
        steps, layers = max(matrices[0].shape) // 16, len(matrices)
        fragments = empty((4 * 32 * _fragments_before(layers, steps),), matrices[0])
        backs = empty((16 * steps * layers,), matrices[0])
        for layer, matrix in enumerate(matrices):
            (depth, columns), before = matrix.shape, _fragments_before(layer, steps)
            sizes = (depth, columns, 2 * -(-columns // 16), -(-depth // 16))
            pointers = (fragments.data_ptr() + 512 * before, backs.data_ptr() + 4 * 16 * steps * layer)
            given = (matrix.data_ptr(), matrix.stride(0), matrix.stride(1))
            tall_matrices.packing(True).launch(matrix.get_device(), sizes[2], *given, *pointers, *sizes)
        return cls(fragments, backs, steps, layers)


def _fragments_before(layer: int, steps: int) -> int:
    """Pieces of 512 bytes of the layers before: the first has ``2 steps``, the others ``steps`` times as many."""
    return 2 * steps * (1 + (layer - 1) * steps) if layer else 0


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *matrices: Tensor) -> Tensor:
        packed = Packed.of(matrices)
        ctx.save_for_backward(x, packed.fragments, packed.backs, *matrices)
        return _features(x, packed)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take torch's own")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, fragments, backs, *matrices) = gradients, ctx.saved_tensors
        rest = (None,) * len(matrices)
        if torch.is_grad_enabled() or not runs_eagerly(g):
            with torch.enable_grad():
                features = layer_by_layer(x, matrices)
            return (*torch.autograd.grad(features, x, g, create_graph=torch.is_grad_enabled()), *rest)
        packed = Packed(fragments, backs, matrices[0].shape[1] // 16, len(matrices))
        return _gradient(x, g, packed, Packed.of([matrix.t() for matrix in matrices])), *rest


def _features(x: Tensor, packed: Packed) -> Tensor:
    x, rows = _aligned(x), x.shape[0]
    out = empty((rows, 16 * packed.steps), x)
    pointers = [one.data_ptr() for one in (x, packed.fragments, packed.backs, out)]
    value_kernel(packed.steps, packed.layers).launch(x.get_device(), _blocks(rows), *pointers, rows, x.shape[1])
    return out


def _gradient(x: Tensor, g: Tensor, packed: Packed, turned: Packed) -> Tensor:
    x, g, rows = _aligned(x), _aligned(g), x.shape[0]
    out = empty(tuple(x.shape), x)
    pointers = [one.data_ptr() for one in (x, g, packed.fragments, packed.backs, turned.fragments, turned.backs, out)]
    gradient_kernel(packed.steps, packed.layers).launch(x.get_device(), _blocks(rows), *pointers, rows, x.shape[1])
    return out


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous and aligned to 16 bytes."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _blocks(rows: int) -> int:
    return -(-rows // (_WARPS * _ROWS))


@functools.cache
def value_kernel(steps: int, layers: int) -> FixedKernel:
    """The kernel of ``layers`` to ``steps`` times 16 hidden features."""
    return FixedKernel(_source("edge_network_value", steps, layers), 6, 32 * _WARPS)


@functools.cache
def gradient_kernel(steps: int, layers: int) -> FixedKernel:
    """The kernel of the input's gradient."""
    return FixedKernel(_source("edge_network_gradient", steps, layers), 9, 32 * _WARPS)


def _source(name: str, steps: int, layers: int) -> Source:
    headers = (*tall_matrices.ROWS_HEADERS, "edge_network.cuh")
    return tall_matrices.kernel_source(name, *headers, STEPS=steps, LAYERS=layers, WARPS=_WARPS, MORE=1)


@functools.cache
def _sources(steps: int, layers: int) -> Callable[[torch.dtype], tuple[Source, ...]]:
    kernels = (value_kernel(steps, layers), gradient_kernel(steps, layers), tall_matrices.packing(True))
    return lambda dtype: tuple(kernel.source for kernel in kernels)
