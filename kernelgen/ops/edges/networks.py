"""Hidden features of a radial network from the features of an edge's length: all hidden layers in one kernel.

A layer is a product with a small matrix, then SiLU. Layer by layer each reads and writes a row of features for each
edge, and keeps them for the gradient. The kernel keeps them in registers, with the arithmetic of ``tall_matrices``, and
its gradient computes them again: only the network's input is held. The kernels are float32's. Gradients of the matrices
and second derivatives need the features that the kernels do not keep: these go layer by layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.emit.source import Source
from kernelgen.ops.autograd import used_slots
from kernelgen.ops.edges import products, tall_matrices
from kernelgen.ops.edges.products import edge_product
from kernelgen.ops.edges.silu import few_pass_silu
from kernelgen.ops.nodes.matrices import as_bits
from kernelgen.runtime.allocation import empty
from kernelgen.runtime.arguments import aligned
from kernelgen.runtime.kernel import FixedKernel
from kernelgen.torch_versions import run_eagerly
from kernelgen.tracing import runs_eagerly

# What a warp's registers hold: inputs are one step of 16 along the depth, hidden features four, of one layer eight.
MOST_INPUTS, MOST_HIDDEN, MOST_OF_ONE_LAYER, MOST_LAYERS = 16, 64, 128, 3
_WARPS, _ROWS = 4, 16
# Threads of a block that packs a tile of a matrix.
_THREADS = 128
_HEADERS = (*tall_matrices.ROWS_HEADERS, "edge_layers.cuh", "edge_network.cuh")


def hidden_features(x: Tensor, matrices: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """x ``[edges, inputs]`` after ``silu(factor * x @ matrix)`` for each matrix in order, ``[edges, hidden]``.

    In one kernel, for what :func:`is_one_kernel` takes. Differentiable any number of times: gradients of the matrices
    and derivatives of the gradient go layer by layer, from x.
    """
    if torch.is_grad_enabled() and any(one.requires_grad for one in (x, *matrices)):
        return _Network.apply(x, *matrices, tuple(factors))
    return _features(x, Packed.of(matrices, factors, is_turned=False))


def layer_by_layer(x: Tensor, matrices: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """The same with every layer's features in memory."""
    for matrix, factor in zip(matrices, factors, strict=True):
        x = few_pass_silu(edge_product(x, matrix * factor))
    return x


def is_one_kernel(x: Tensor, matrices: Sequence[Tensor], training: bool = False) -> bool:
    """Whether kernels take these: many edges, a shape that :func:`fits`, and matrices that are not trained.

    training: whether matrices that require gradients will get them, so that features are better kept.
    """
    rows, widths = x.shape[0], [matrix.shape[1] for matrix in matrices]
    if type(rows) is not int or rows < products.LEAST_ROWS or not fits(x.shape[1], widths):
        return False
    if not runs_eagerly(x, *matrices):
        return False
    alike = all(matrix.dtype is x.dtype and matrix.device == x.device for matrix in matrices)
    trained = training and torch.is_grad_enabled() and any(matrix.requires_grad for matrix in matrices)
    return alike and not trained and tall_matrices.takes(x, _sources(widths[0] // 16, len(widths)))


def fits(inputs: int, widths: Sequence[int]) -> bool:
    """Whether there are kernels for layers of these widths: equal ones, at most ``MOST_LAYERS``."""
    if not 0 < len(widths) <= MOST_LAYERS or not 0 < inputs <= MOST_INPUTS:
        return False
    most = MOST_HIDDEN if len(widths) > 1 else MOST_OF_ONE_LAYER
    return set(widths) == {widths[0]} and widths[0] % 16 == 0 and 0 < widths[0] <= most


class Packed(NamedTuple):
    """Matrices times their factors as the kernels read them; ``steps`` times 16 hidden features, ``layers``.

    tensors: fragments of the tensor cores, one layer after the other, and the scales of their columns; if transposed
    matrices were asked for, the same of these.
    """

    tensors: tuple[Tensor, ...]
    steps: int
    layers: int

    @classmethod
    def of(cls, matrices: Sequence[Tensor], factors: Sequence[float], is_turned: bool) -> Packed:
        """In one launch; the first matrix has few inputs, the others as many as hidden features."""
        (inputs, hidden), layers, first = matrices[0].shape, len(matrices), matrices[0]
        steps, more = hidden // 16, (layers - 1) * hidden // 8  # tiles of the later matrices
        sizes = ((4 * 32 * (2 * steps + more * steps),), (hidden * layers,)) * (1 + is_turned)
        tensors = tuple(empty(size, first) for size in sizes)
        blocks = 2 * steps + more + is_turned * (2 + more)
        missing = [0] * (MOST_LAYERS - layers)
        copies = [aligned(matrix) for matrix in matrices]  # held until the launch
        given = (*(matrix.data_ptr() for matrix in copies), *missing, *map(as_bits, factors), *missing)
        made = (*(tensor.data_ptr() for tensor in tensors), *[0] * (4 - len(tensors)))
        packing_kernel(steps, layers).launch(first.get_device(), blocks, *given, *made, inputs)
        return cls(tensors, steps, layers)


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        """given: the matrices, then their factors."""
        *matrices, factors = given
        packed = Packed.of(matrices, factors, is_turned=True)
        ctx.factors = factors
        ctx.save_for_backward(x, *packed.tensors, *matrices)
        return _features(x, packed)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take torch's own")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, *saved) = gradients, ctx.saved_tensors
        tensors, matrices = saved[:4], saved[4:]
        given = dict(zip("x012", (x, *matrices), strict=False))  # x, and each matrix by its number
        used = used_slots(ctx, "".join(given))
        if used == "x" and not torch.is_grad_enabled() and runs_eagerly(g):
            packed = Packed(tuple(tensors), matrices[0].shape[1] // 16, len(matrices))
            found = {"x": _gradient(x, g, packed)}
        else:
            with torch.enable_grad():
                features = layer_by_layer(x, matrices, ctx.factors)
            wanted, is_differentiable = [given[slot] for slot in used], torch.is_grad_enabled()
            gradients = torch.autograd.grad(features, wanted, g, create_graph=is_differentiable)
            found = dict(zip(used, gradients, strict=True))
        return (*map(found.get, given), None)  # the factors have none


def _features(x: Tensor, packed: Packed) -> Tensor:
    x, rows = aligned(x), x.shape[0]
    out = empty((rows, 16 * packed.steps), x)
    pointers = [one.data_ptr() for one in (x, *packed.tensors[:2], out)]
    value_kernel(packed.steps, packed.layers).launch(x.get_device(), _blocks(rows), *pointers, rows, x.shape[1])
    return out


def _gradient(x: Tensor, g: Tensor, packed: Packed) -> Tensor:
    x, g, rows = aligned(x), aligned(g), x.shape[0]
    out = empty(tuple(x.shape), x)
    pointers = [one.data_ptr() for one in (x, g, *packed.tensors, out)]
    gradient_kernel(packed.steps, packed.layers).launch(x.get_device(), _blocks(rows), *pointers, rows, x.shape[1])
    return out


def _blocks(rows: int) -> int:
    return -(-rows // (_WARPS * _ROWS))


@functools.cache
def value_kernel(steps: int, layers: int) -> FixedKernel:
    """The kernel of ``layers`` to ``steps`` times 16 hidden features."""
    return FixedKernel(_source("edge_network_value", steps, layers, *_HEADERS), 6, 32 * _WARPS)


@functools.cache
def gradient_kernel(steps: int, layers: int) -> FixedKernel:
    """The kernel of the input's gradient."""
    return FixedKernel(_source("edge_network_gradient", steps, layers, *_HEADERS), 9, 32 * _WARPS)


@functools.cache
def packing_kernel(steps: int, layers: int) -> FixedKernel:
    """The kernel that turns all matrices into halves."""
    return FixedKernel(_source("edge_matrices", steps, layers, "matrix_tiles.cuh", "edge_layers.cuh"), 11, _THREADS)


def _source(name: str, steps: int, layers: int, *headers: str) -> Source:
    constants = {"STEPS": steps, "LAYERS": layers, "WARPS": _WARPS, "MORE": 1, "THREADS": _THREADS}
    return tall_matrices.kernel_source(name, *headers, **constants)


def sources(networks: Iterable[tuple[int, int]]) -> tuple[Source, ...]:
    """Of all kernels for networks of so many hidden features and so many layers."""
    found = (_sources(hidden // 16, layers)(torch.float32) for hidden, layers in networks)
    return tuple(dict.fromkeys(source for of_one in found for source in of_one))


@functools.cache
def _sources(steps: int, layers: int) -> Callable[[torch.dtype], tuple[Source, ...]]:
    kernels = (value_kernel(steps, layers), gradient_kernel(steps, layers), packing_kernel(steps, layers))
    return lambda dtype: tuple(kernel.source for kernel in kernels)
