"""Hidden features of a radial network from the features of an edge's length: all hidden layers in one kernel.

A layer is a product with a small matrix, then SiLU. Layer by layer each reads and writes a row of features for each
edge, and keeps them for the gradient. The kernel keeps them in registers, with the arithmetic of its products of tall
matrices, and its gradient computes them again: only the network's input is held. The kernels are float32's. Gradients
of the matrices and second derivatives need the features that the kernels do not keep: these go layer by layer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.utils._python_dispatch import _disable_current_modes as outside_of_traces

from kernelgen.compat import run_eagerly, runs_eagerly
from kernelgen.errors import UnsupportedError
from kernelgen.kernels.source import LaunchRule, Share, Source
from kernelgen.ops import tall_products
from kernelgen.ops.autograd import leave, left_in
from kernelgen.ops.base import OPERATORS, rebuilds, resolve
from kernelgen.ops.library import EXPORTED_SIZE, Maybe, define_op, used_slots, will_run
from kernelgen.ops.node_kernels import as_bits, may_launch
from kernelgen.ops.tall_products import ROWS_HEADERS, edge_product, kernel_source
from kernelgen.runtime.call import aligned, empty
from kernelgen.runtime.kernel import FixedKernel, KernelByDtype

# SiLU of hidden features of edges, in few passes over them.


def few_pass_silu(x: Tensor) -> Tensor:
    """SiLU, whose second derivative takes torch a dozen passes over all edges."""
    return _Silu.apply(x)[0] if x.requires_grad and runs_eagerly(x) else silu(x)


class _Silu(torch.autograd.Function):
    """Its gradient is one pass also where that is differentiated; torch then takes six, and twelve for the second.

    A loss on values and on forces has two gradients by x. As in ``kernelgen.ops.autograd``, the node of the gradient
    leaves what the second takes to the node of the value, which computes their sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        link = empty((0,), x)
        ctx.save_for_backward(x, link)
        ctx.set_materialize_grads(False)
        ctx.pending = {}
        return silu(x), link

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take torch's own")
    def backward(ctx: Any, *gradients: Maybe) -> Maybe:
        x, link = ctx.saved_tensors
        g, left = gradients[0], left_in(ctx.pending)
        if g is not None and not runs_eagerly(x, g):
            return g * _slope(x)
        if g is not None and torch.is_grad_enabled():
            return _SiluGradient.apply(g, x, link, ctx.pending)
        if not left:
            return None if g is None else torch.ops.aten.silu_backward.default(g, x)
        found = _joint_gradient(x, g, *left[0])
        for more in left[1:]:
            found += _joint_gradient(x, None, *more)
        return found


class _SiluGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor, link: Maybe, pending: dict[int, list[Any]] | None) -> Tensor:
        ctx.save_for_backward(gradient, x)
        ctx.pending = pending
        return torch.ops.aten.silu_backward.default(gradient, x)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take torch's own")
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Maybe, ...]:
        (gradient, x), (t,) = ctx.saved_tensors, tangents
        by_gradient, by_x, *_ = ctx.needs_input_grad
        is_plain, link = runs_eagerly(x, t), None if ctx.pending is None else ctx.next_functions[2][0]
        if by_x and is_plain and not torch.is_grad_enabled() and link is not None and will_run(link):
            leave(ctx.pending, (gradient, t))
            by_x = False
        first = None
        if by_gradient:
            first = _SiluGradient.apply(t, x, None, None) if is_plain else t * _slope(x)
        return first, t * gradient * _curvature(x) if by_x else None, None, None


def _joint_gradient(x: Tensor, c: Maybe, g: Tensor, t: Tensor) -> Tensor:
    """``a'(x) c + a''(x) g t`` of SiLU a; c may be zero."""
    if not may_launch(x, SILU_GRADIENT.sources):
        found = t * g * _curvature(x)
        return found if c is None else found.add_(torch.ops.aten.silu_backward.default(c, x))
    given = [None if one is None else one.contiguous() for one in (x, c, g, t)]
    out = empty(tuple(x.shape), x)
    if count := x.numel():
        pointers = [0 if one is None else one.data_ptr() for one in (*given, out)]
        SILU_GRADIENT.of(x.dtype).launch(x.get_device(), -(-count // (4 * SILU_GRADIENT.threads)), *pointers, count)
    return out


# Of the joint gradient.
SILU_GRADIENT = KernelByDtype("equitune_silu_gradient", "edge_networks.cuh:silu_gradient", count=6, threads=256)


def _slope(x: Tensor) -> Tensor:
    return x.sigmoid() * (1 + x - silu(x))


def _curvature(x: Tensor) -> Tensor:
    """The second derivative: with s the sigmoid, s (1 - s) (2 + x - 2 x s)."""
    s = x.sigmoid()
    return torch.ops.aten.sigmoid_backward(torch.addcmul(x, x, s, value=-2) + 2, s)


# What a warp's registers hold: inputs are one step of 16 along the depth, hidden features four, of one layer eight.
MOST_INPUTS, MOST_HIDDEN, MOST_OF_ONE_LAYER, MOST_LAYERS = 16, 64, 128, 3
_WARPS, _ROWS = 4, 16
# Threads of a block that packs a tile of a matrix.
_THREADS = 128
_HEADERS = (*ROWS_HEADERS, "edge_networks.cuh:layers", "edge_networks.cuh:network")


def hidden_features(x: Tensor, matrices: Sequence[Tensor], factors: Sequence[float], accuracy: str = "ieee") -> Tensor:
    """x ``[edges, inputs]`` after ``silu(factor * x @ matrix)`` for each matrix in order, ``[edges, hidden]``.

    In one kernel, for what :func:`is_one_kernel` takes. Differentiable any number of times: gradients of the matrices
    and derivatives of the gradient go layer by layer, from x.
    """
    if EXPORTED_SIZE.get() is not None and not runs_eagerly(x):
        return exported_features(x, matrices, factors, accuracy)
    if torch.is_grad_enabled() and any(one.requires_grad for one in (x, *matrices)):
        return _Network.apply(x, *matrices, tuple(factors), accuracy)
    return _features(x, Packed.of(matrices, factors, is_turned=False), accuracy)


def layer_by_layer(x: Tensor, matrices: Sequence[Tensor], factors: Sequence[float], accuracy: str = "ieee") -> Tensor:
    """The same with every layer's features in memory."""
    for matrix, factor in zip(matrices, factors, strict=True):
        x = few_pass_silu(edge_product(x, matrix * factor, accuracy))
    return x


def is_one_kernel(x: Tensor, matrices: Sequence[Tensor], training: bool = False) -> bool:
    """Whether kernels take these: a shape that :func:`network_fits`, and matrices that are not trained.

    Of any number of edges: with few of them one launch in place of a dozen is worth more than the kernel's speed.

    training: whether matrices that require gradients will get them, so that features are better kept.
    """
    # torch.compile cannot read a context variable; what it compiles is never exported so.
    if not torch.compiler.is_dynamo_compiling() and EXPORTED_SIZE.get() is not None and not runs_eagerly(x):
        return _may_export(x, matrices)
    rows, widths = x.shape[0], [matrix.shape[1] for matrix in matrices]
    if type(rows) is not int or rows == 0 or not network_fits(x.shape[1], widths):
        return False
    if not runs_eagerly(x, *matrices):
        return False
    trained = training and torch.is_grad_enabled() and any(matrix.requires_grad for matrix in matrices)
    return _are_alike(x, matrices) and not trained and tall_products.takes(x, _sources(widths[0] // 16, len(widths)))


def _may_export(x: Tensor, matrices: Sequence[Tensor]) -> bool:
    """Whether :func:`exported_features` takes these, of any number of edges: the matrices must be constants."""
    widths = [matrix.shape[1] for matrix in matrices]
    if not _are_alike(x, matrices) or not network_fits(x.shape[1], widths):
        return False
    with outside_of_traces():
        constant = runs_eagerly(*matrices) and not any(matrix.requires_grad for matrix in matrices)
        return constant and tall_products.takes(matrices[0], _sources(widths[0] // 16, len(widths)))


def _are_alike(x: Tensor, matrices: Sequence[Tensor]) -> bool:
    return all(matrix.dtype is x.dtype and matrix.device == x.device for matrix in matrices)


def network_fits(inputs: int, widths: Sequence[int]) -> bool:
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
        """given: the matrices, then their factors and the accuracy."""
        *matrices, factors, accuracy = given
        packed = Packed.of(matrices, factors, is_turned=True)
        ctx.factors, ctx.accuracy = factors, accuracy
        ctx.save_for_backward(x, *packed.tensors, *matrices)
        return _features(x, packed, accuracy)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take torch's own")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, *saved) = gradients, ctx.saved_tensors
        tensors, matrices = saved[:4], saved[4:]
        given = dict(zip("x012", (x, *matrices), strict=False))  # x, and each matrix by its number
        used = used_slots(ctx, "".join(given))
        if used == "x" and not torch.is_grad_enabled() and runs_eagerly(g):
            packed = Packed(tuple(tensors), matrices[0].shape[1] // 16, len(matrices))
            found = {"x": _gradient(x, g, packed, ctx.accuracy)}
        else:
            with torch.enable_grad():
                features = layer_by_layer(x, matrices, ctx.factors, ctx.accuracy)
            wanted, is_differentiable = [given[slot] for slot in used], torch.is_grad_enabled()
            gradients = torch.autograd.grad(features, wanted, g, create_graph=is_differentiable)
            found = dict(zip(used, gradients, strict=True))
        return (*map(found.get, given), None, None)  # the factors have none


def _features(x: Tensor, packed: Packed, accuracy: str) -> Tensor:
    kernel = value_kernel(packed.steps, packed.layers, accuracy)
    return _launched(kernel, empty((x.shape[0], 16 * packed.steps), x), aligned(x), *packed.tensors[:2])


def _gradient(x: Tensor, g: Tensor, packed: Packed, accuracy: str) -> Tensor:
    kernel = gradient_kernel(packed.steps, packed.layers, accuracy)
    return _launched(kernel, empty(tuple(x.shape), x), aligned(x), aligned(g), *packed.tensors)


def _launched(kernel: FixedKernel, out: Tensor, x: Tensor, *others: Tensor) -> Tensor:
    rows, inputs = x.shape
    pointers = [one.data_ptr() for one in (x, *others, out)]
    kernel.launch(x.get_device(), -(-rows // (_WARPS * _ROWS)), *pointers, rows, inputs)
    return out


@functools.cache
def value_kernel(steps: int, layers: int, accuracy: str = "ieee") -> FixedKernel:
    """The kernel of ``layers`` to ``steps`` times 16 hidden features."""
    headers = (*_HEADERS, "edge_networks.cuh:value")
    return FixedKernel(
        _source("equitune_edge_network_value", steps, layers, *headers, accuracy=accuracy), 6, 32 * _WARPS
    )


@functools.cache
def gradient_kernel(steps: int, layers: int, accuracy: str = "ieee") -> FixedKernel:
    """The kernel of the input's gradient."""
    headers = (*_HEADERS, "edge_networks.cuh:gradient")
    source = _source("equitune_edge_network_gradient", steps, layers, *headers, accuracy=accuracy)
    return FixedKernel(source, 9, 32 * _WARPS)


@functools.cache
def packing_kernel(steps: int, layers: int) -> FixedKernel:
    """The kernel that turns all matrices into halves."""
    headers = ("tall_products.cuh:tiles", "edge_networks.cuh:layers", "edge_networks.cuh:matrices")
    return FixedKernel(_source("equitune_edge_matrices", steps, layers, *headers), 11, _THREADS)


def _source(entry: str, steps: int, layers: int, *headers: str, accuracy: str = "ieee") -> Source:
    constants = {"STEPS": steps, "LAYERS": layers, "WARPS": _WARPS, "MORE": 1, "THREADS": _THREADS}
    return kernel_source(entry, *headers, accuracy=accuracy, **constants)


def network_sources(networks: Iterable[tuple[int, int]]) -> tuple[Source, ...]:
    """Of all kernels for networks of so many hidden features and so many layers."""
    found = (_sources(hidden // 16, layers)(torch.float32) for hidden, layers in networks)
    return tuple(dict.fromkeys(source for of_one in found for source in of_one))


@functools.cache
def _sources(steps: int, layers: int) -> Callable[[torch.dtype], tuple[Source, ...]]:
    kernels = (value_kernel(steps, layers), gradient_kernel(steps, layers), packing_kernel(steps, layers))
    return lambda dtype: tuple(kernel.source for kernel in kernels)


# The same kernels as ops of torch, for what is exported with energies and forces inside, where matrices are constants.


class Network:
    """The kernels of a network's shape. text: as JSON, from which any process can rebuild it, as of other operators."""

    members: tuple[Any, ...] = ()  # it is no family

    def __init__(self, hidden: int, layers: int, accuracy: str = "ieee") -> None:
        self.hidden, self.layers, self.accuracy, self.device = hidden, layers, accuracy, torch.device("cuda")
        facts = {"kind": "network", "hidden": hidden, "layers": layers, "accuracy": accuracy}
        self.text = json.dumps(facts, sort_keys=True)

    def kernel(self, op: str) -> FixedKernel:
        """The kernel of ``en_forward`` or ``en_backward``."""
        made = value_kernel if op == "en_forward" else gradient_kernel
        return made(self.hidden // 16, self.layers, self.accuracy)

    @property
    def launch(self) -> LaunchRule:
        """How either is launched, on so many edges."""
        return LaunchRule(32 * _WARPS, 0, (Share("edges", (_WARPS * _ROWS,)),))


def _rebuilt(text: str) -> Network:
    facts = json.loads(text)
    return Network(facts["hidden"], facts["layers"], facts.get("accuracy", "ieee"))


rebuilds("network", _rebuilt)


def exported_features(
    x: Tensor, matrices: Sequence[Tensor], factors: Sequence[float], accuracy: str = "ieee"
) -> Tensor:
    """:func:`hidden_features` as an op that torch traces. The matrices are constants, packed now."""
    network = Network(matrices[0].shape[1], len(matrices), accuracy)
    OPERATORS.setdefault(network.text, network)
    with outside_of_traces():
        packed = Packed.of(matrices, factors, is_turned=True).tensors
    return torch.ops.equitune.en_forward(x, *packed, network.text)


def _packed(network: Network, *tensors: Tensor) -> Packed:
    return Packed(tensors, network.hidden // 16, network.layers)


def _run_features(x: Tensor, *packed_and_text: Any) -> Tensor:
    *packed, text = packed_and_text
    return _features(x, _packed(resolve(text), *packed), resolve(text).accuracy)


def _run_gradient(x: Tensor, g: Tensor, *packed_and_text: Any) -> Tensor:
    *packed, text = packed_and_text
    return _gradient(x, g, _packed(resolve(text), *packed), resolve(text).accuracy)


def _keep_input(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.text = inputs
    ctx.save_for_backward(*tensors)


def _input_gradient(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    if any(ctx.needs_input_grad[1:]):
        raise UnsupportedError("an exported network has no gradients of its matrices: call requires_grad_(False)")
    x, *packed = ctx.saved_tensors
    return torch.ops.equitune.en_backward(x, g.contiguous(), *packed, ctx.text), *(None,) * 5


_PACKED = "Tensor fragments, Tensor scales, Tensor turned_fragments, Tensor turned_scales, str spec"
define_op(
    "en_forward",
    f"(Tensor x, {_PACKED}) -> Tensor",
    run=_run_features,
    fake=lambda x, *rest: x.new_empty(x.shape[0], resolve(rest[-1]).hidden),
)
define_op(
    "en_backward",
    f"(Tensor x, Tensor g, {_PACKED}) -> Tensor",
    run=_run_gradient,
    fake=lambda x, *_: torch.empty_like(x),
)
torch.library.register_autograd("equitune::en_forward", _input_gradient, setup_context=_keep_input)
