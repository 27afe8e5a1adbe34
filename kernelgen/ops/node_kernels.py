"""Kernels at nodes: products of features with matrices, by element or not, and gates; all of a row in one launch.

With T(x, w, y) = sum of c x w y over paths, the kernels compute dT/dy and dT/dx (``rows``) and dT/dw (``weights``).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.compat import run_eagerly, runs_eagerly
from kernelgen.compile.compiler import compile_many
from kernelgen.device import device_facts
from kernelgen.errors import CompileError, InputError, ToolMissingError, UnsupportedError
from kernelgen.kernels.source import Source
from kernelgen.ops.base import DTYPES
from kernelgen.runtime.call import empty
from kernelgen.runtime.kernel import KernelByDtype

ENTRY = "equitune_block_matrices"
# Of the kernels: nodes of a chunk, columns of a tile, threads of a block. Most elements of a small structure fill one
# chunk, and padding at most doubles a large structure's rows.
CHUNK, _COLUMNS, _THREADS = 32, 64, 128


def _kernel(part: str, multiply: str, count: int) -> KernelByDtype:
    headers = (f"node_matrices.cuh:{section}" for section in ("block_tiles", multiply, part))
    return KernelByDtype(ENTRY, *headers, count=count, threads=_THREADS)


# Of gradients by weights, and of the others; the same with numbers rounded to TF32, in tensor cores, for float32.
WEIGHTS, ROWS = _kernel("block_weights", "block_multiply", 14), _kernel("block_rows", "block_multiply", 11)
TF32_WEIGHTS, TF32_ROWS = (
    _kernel(part, "block_multiply_tf32", count) for part, count in (("block_weights", 14), ("block_rows", 11))
)
# Up to so many nodes one launch is worth more than the speed of a library's products. On an H200 these kernels take as
# long at 5184 nodes, with 21 launches for 61 in a step of MACE medium, 33 for 191 in one of SevenNet-l3i5.
MOST_NODES = 8192
# A gradient by weights sums at least so many chunks one after the other, in at most so many parts: of one matrix, and
# of matrices by element, whose parts take much memory.
_PARTS, _PARTS_BY_ELEMENT = (2, 32), (8, 16)


class MatrixPath(NamedTuple):
    """A block of x ``[dim, rows]`` times a matrix, added to a block of y ``[dim, columns]``.

    x, y, w: offsets; row r of the matrix of element e begins at ``w + r * stride + e * of_element``.
    """

    x: int
    y: int
    w: int
    stride: int
    of_element: int
    rows: int
    columns: int
    dim: int
    coefficient: float


class Groups(NamedTuple):
    """Nodes by element, int64: ``slots`` of 32 nodes of one element (-1: none) a chunk, the ``chunks``' elements, and
    where each element's chunks begin [elements + 1]. nodes: how many there are.
    """

    nodes: int
    slots: Tensor
    chunks: Tensor
    begins: Tensor


class BlockProduct:
    """The kernels of some paths. dims: widths of x and y. numel: of the weights, all of which paths use.

    in_tf32: whether numbers in float32 are rounded to TF32 before they are multiplied.
    """

    in_tf32 = False

    def __init__(self, paths: Sequence[MatrixPath], dims: tuple[int, int], numel: int) -> None:
        self.paths, self.dims, self.numel = tuple(paths), dims, numel
        # By what is wanted: numbers of the table's entries and tiles, and the table by device.
        self._tables: dict[str, tuple[int, int, list[int]]] = {}
        self._on_device: dict[tuple[str, torch.device], tuple[int, int, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on_device": {}}

    def takes(self, features: Tensor) -> bool:
        """Whether the kernels are for these features ``[nodes, dim]``."""
        return takes(features, self._rounds(features))

    def _rounds(self, features: Tensor) -> bool:
        return self.in_tf32 and features.dtype is torch.float32

    def rows(self, wanted: str, features: Tensor, weights: Tensor, groups: Groups | None = None) -> Tensor:
        """dT/d``wanted`` (x or y), from the other features ``[nodes, dim]`` and the weights ``[numel]``."""
        nodes, width = features.shape[0], self.dims[wanted == "y"]
        self._check(features, weights, groups, weights.shape == (self.numel,))
        out = empty((nodes, width), features)
        chunks = -(-nodes // CHUNK) if groups is None else len(groups.chunks)
        count, tiles, table = self._table(wanted, features.device)
        if nodes and tiles:
            pointers = (features.data_ptr(), weights.data_ptr(), out.data_ptr(), table.data_ptr())
            grouped = (0, 0) if groups is None else (groups.slots.data_ptr(), groups.chunks.data_ptr())
            sizes = (nodes, features.stride(0), width, count, tiles)
            kernel = TF32_ROWS if self._rounds(features) else ROWS
            kernel.of(features.dtype).launch(features.get_device(), chunks * tiles, *pointers, *grouped, *sizes)
        return out

    def weights(self, x: Tensor, y: Tensor, groups: Groups | None = None, elements: int = 1) -> Tensor:
        """dT/dw ``[numel]``; the sums have a fixed order."""
        nodes = x.shape[0]
        self._check(x, y, groups, y.shape[0] == nodes)
        least, most = _PARTS if elements == 1 else _PARTS_BY_ELEMENT
        parts = max(1, min(most, -(-nodes // (CHUNK * least))))
        out = empty((parts, self.numel), x)
        count, tiles, table = self._table("w", x.device)
        if tiles:
            pointers = (x.data_ptr(), y.data_ptr(), out.data_ptr(), table.data_ptr())
            grouped = (0, 0) if groups is None else (groups.slots.data_ptr(), groups.begins.data_ptr())
            sizes = (nodes, x.stride(0), y.stride(0), count, tiles, elements, parts, self.numel)
            kernel = TF32_WEIGHTS if self._rounds(x) else WEIGHTS
            kernel.of(x.dtype).launch(x.get_device(), tiles * elements * parts, *pointers, *grouped, *sizes)
        return out[0] if parts == 1 else out.sum(0)

    def _check(self, features: Tensor, other: Tensor, groups: Groups | None, fits: bool) -> None:
        """InputError for tensors of which a kernel would read beyond the end."""
        same = features.dtype is other.dtype and features.device == other.device
        if not (same and fits and (groups is None or groups.nodes == features.shape[0])):
            of = "" if groups is None else f" of {groups.nodes} nodes by element"
            raise InputError(
                f"features are {features.dtype} {tuple(features.shape)} on {features.device}{of}, multiplied with "
                f"{other.dtype} {tuple(other.shape)} on {other.device}; expected one dtype and device, {self.numel} "
                "weights, and as many nodes"
            )

    def _table(self, wanted: str, device: torch.device) -> tuple[int, int, Tensor]:
        found = self._on_device.get((wanted, device))
        if found is None:
            if wanted not in self._tables:
                make = functools.partial(_of_weights, self.paths)
                self._tables[wanted] = make() if wanted == "w" else _of_rows(self.paths, self.dims, wanted)
            count, tiles, numbers = self._tables[wanted]
            with torch.inference_mode(False):
                table = torch.tensor(numbers, dtype=torch.int64).to(device)
            found = self._on_device[wanted, device] = count, tiles, table
        return found


def _of_rows(paths: Sequence[MatrixPath], dims: tuple[int, int], wanted: str) -> tuple[int, int, list[int]]:
    """Blocks, tiles of a chunk, and the table that the kernel describes."""
    by_block: dict[tuple[int, int, int], list[list[int]]] = {}
    for path in paths:
        if wanted == "y":
            block = (path.y, path.columns, path.dim)
            term = [path.x, path.rows, path.w, path.stride, 1, path.of_element, as_bits(path.coefficient)]
        else:
            block = (path.x, path.rows, path.dim)
            term = [path.y, path.columns, path.w, 1, path.stride, path.of_element, as_bits(path.coefficient)]
        by_block.setdefault(block, []).append(term)
    blocks: list[int] = []
    terms: list[list[int]] = []
    tiles = 0
    for (offset, columns, dim), own in sorted(_with_gaps(by_block, dims[wanted == "y"]).items()):
        blocks += [offset, columns, dim, len(terms), len(terms) + len(own), tiles]
        terms += own
        tiles += dim * -(-columns // _COLUMNS)
    return len(blocks) // 6, tiles, blocks + [number for term in terms for number in term]


def _with_gaps(by_block: dict[tuple[int, int, int], list[list[int]]], width: int) -> dict[Any, Any]:
    """With a block without terms for each range of a row that no path writes."""
    found, end = dict(by_block), 0
    for offset, columns, dim in [*sorted(by_block), (width, 0, 0)]:
        if offset > end:
            found[end, offset - end, 1] = []
        end = max(end, offset + columns * dim)
    return found


def _of_weights(paths: Sequence[MatrixPath]) -> tuple[int, int, list[int]]:
    """Paths, tiles, and the table that the kernel describes."""
    numbers, tiles = [], 0
    for path in paths:
        shape = (path.rows, path.columns, path.dim)
        numbers += [path.x, path.y, path.w, path.stride, path.of_element, *shape, as_bits(path.coefficient), tiles]
        tiles += -(-path.rows // CHUNK) * -(-path.columns // _COLUMNS)
    return len(paths), tiles, numbers


def as_bits(value: float) -> int:
    """A double as an int64 of the same bits."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def takes(features: Tensor, in_tf32: bool) -> bool:
    """Whether the kernels are for these features ``[nodes, dim]``: on a GPU, in a dtype of kernels; few, or in TF32."""
    fits = features.is_cuda and features.dtype in DTYPES and (in_tf32 or features.shape[0] <= MOST_NODES)
    return fits and are_there(_tf32_sources if in_tf32 else _sources, features.dtype, features.get_device())


def _sources(dtype: torch.dtype) -> tuple[Source, ...]:
    return ROWS.source(dtype), WEIGHTS.source(dtype)


def _tf32_sources(dtype: torch.dtype) -> tuple[Source, ...]:
    return TF32_ROWS.source(dtype), TF32_WEIGHTS.source(dtype)


@functools.cache
def are_there(sources: Callable[[torch.dtype], tuple[Source, ...]], dtype: torch.dtype, device: int) -> bool:
    """Whether kernels can be compiled or were: torch's own operations do the same without a compiler.

    They are compiled beside each other: the first call of a model waits for them.
    """
    facts = device_facts(f"cuda:{device}")
    if facts.is_hip:
        return False
    try:
        found = compile_many([(one, facts) for one in sources(dtype)])
    except ToolMissingError:
        return False
    for error in found:
        if isinstance(error, CompileError):
            raise error
    return True


# Gates in layout ``ir_mul`` with both derivatives, each in one launch.
#
# Scalars s become c a(s), and the components v of an irrep become c a(s) v with a gate s for each of its channels. Here
# a is an activation and c its constant.


GATES = KernelByDtype("equitune_gate", "gates.cuh", count=12, threads=256)
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
            GATES.of(f.dtype).launch(f.get_device(), -(-nodes * self.channels // GATES.threads), *pointers, *sizes)

    def table(self) -> list[int]:
        """The runs as the kernel describes them."""
        numbers, before = [], 0
        for run in self.runs:
            numbers += [before, run.channels, run.source, run.target, run.gate, run.dim, run.stride]
            numbers += [run.activation, as_bits(run.constant), as_bits(run.parameter)]
            before += run.channels
        return numbers


def may_launch(features: Tensor, sources: Callable[[torch.dtype], tuple[Source, ...]] = GATES.sources) -> bool:
    """Whether the kernel, or others with these sources, is for these features."""
    fits = features.is_cuda and features.dtype in DTYPES
    return fits and are_there(sources, features.dtype, features.get_device())


def scalar_kernel(activation: int, parameter: float = 0.0) -> GateKernel:
    """Of a function of each number ``[rows, 1]``."""
    return GateKernel([GateRun(1, 0, 0, 0, 0, 0, activation, 1.0, parameter)], 1, 1)


def gated(features: Tensor, kernel: GateKernel | None, composed: Callable[[Tensor], Tensor]) -> Tensor:
    """The kernel's value where it can be used, differentiable; ``composed`` is the same in operations of torch."""
    if kernel is None or not runs_eagerly(features) or not may_launch(features):
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
