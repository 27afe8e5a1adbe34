"""Products of a tall matrix, a row an edge, with a small one, and sums over its rows.

They are differentiable any number of times. In float32 on a GPU with many edges they run in tensor cores with float32's
errors, else as torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.compat import is_autocast, run_eagerly, runs_eagerly, without_autocast
from kernelgen.device import device_facts
from kernelgen.kernels.source import Source, included
from kernelgen.ops.library import will_run
from kernelgen.ops.node_kernels import are_there, as_bits
from kernelgen.problem.product import PRODUCTS
from kernelgen.runtime.call import aligned, empty
from kernelgen.runtime.kernel import FixedKernel

# Autocast changes none of them: what comes in half precision was converted to float32 before.

# With fewer rows torch's product is faster: on an H200, 64 x 1280, they meet at 8,000 (to many columns), 15,000 (to
# few) and 10,000 rows (sums).
LEAST_ROWS = 8192


def edge_product(a: Tensor, b: Tensor, accuracy: str = "ieee") -> Tensor:
    """a ``[edges, depth]`` times b ``[depth, columns]``, differentiable any number of times.

    In float32 on a GPU with many edges, by tensor cores; else ``a @ b``. accuracy: of ``kernelgen.problem.product.
    PRODUCTS``: ``ieee`` has float32's errors, ``tf32`` those of one product of halves.
    """
    if not (_may_take(a, b) and multiplies(a, b)):
        return full_product(a, b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Differentiable.apply(_EDGES[accuracy], a, b)
    return product(a, b, accuracy)


def sum_product(a: Tensor, b: Tensor, accuracy: str = "ieee") -> Tensor:
    """``a^T b`` of a ``[edges, left]`` and b ``[edges, right]``: as :func:`edge_product`."""
    if not (_may_take(a, b) and sums_up(a, b)):
        if _may_take(a, b) and sums_up(b, a):
            return sum_product(b, a, accuracy).t()
        return full_product(a.t(), b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Differentiable.apply(_SUMS[accuracy], a, b)
    return sums(a, b, accuracy)


def full_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` by torch, for a ``[..., depth]`` and b ``[depth, columns]``, in the precision of a and b.

    Under ``torch.autocast`` too, and so are its derivatives of any order, unless torch traces or transforms them.
    """
    if not is_autocast(a):
        return torch.mm(a, b) if a.dim() == 2 else torch.matmul(a, b)
    if runs_eagerly(a, b) and torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Differentiable.apply(_FULL, a.flatten(0, -2), b).unflatten(0, a.shape[:-1])
    with without_autocast(a):
        return torch.matmul(a, b)


def _may_take(a: Tensor, b: Tensor) -> bool:
    """Whether there are many edges, of one dtype and device, and torch does not trace."""
    rows = a.shape[0]
    is_one = type(rows) is int and rows >= LEAST_ROWS and a.dtype is b.dtype and a.device == b.device
    return is_one and runs_eagerly(a, b)


class _Form(NamedTuple):
    """A product of a and b, and with the result's gradient g its gradients: by a of (b, g), by b of (a, g)."""

    value: Callable[[Tensor, Tensor], Tensor]
    by_a: Callable[[Tensor, Tensor], Tensor]
    by_b: Callable[[Tensor, Tensor], Tensor]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: _Form, a: Tensor, b: Tensor) -> Tensor:
        ctx.form = form
        _, by_a, by_b = ctx.needs_input_grad
        # What gradients need alone: a network whose weights are frozen keeps no features of its edges.
        ctx.save_for_backward(a if by_b else None, b if by_a else None)
        return form.value(a, b)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take torch's own")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (a, b), (_, by_a, by_b) = gradients, ctx.saved_tensors, ctx.needs_input_grad
        by_b = by_b and will_run(ctx.next_functions[1][0])  # forces alone need no gradient of a network's weights
        return None, ctx.form.by_a(b, g) if by_a else None, ctx.form.by_b(a, g) if by_b else None


def _mm(a: Tensor, b: Tensor) -> Tensor:
    with without_autocast(a):
        return torch.mm(a, b)


def _edges(accuracy: str) -> _Form:
    return _Form(
        lambda a, b: product(a, b, accuracy),
        lambda b, g: edge_product(g, b.t(), accuracy),
        lambda a, g: sum_product(a, g, accuracy),
    )


def _sums(accuracy: str) -> _Form:
    return _Form(
        lambda a, b: sums(a, b, accuracy),
        lambda b, g: edge_product(b, g.t(), accuracy),
        lambda a, g: edge_product(a, g, accuracy),
    )


_FULL = _Form(_mm, lambda b, g: full_product(g, b.t()), lambda a, g: full_product(a.t(), g))
_EDGES, _SUMS = ({accuracy: form(accuracy) for accuracy in PRODUCTS} for form in (_edges, _sums))

# Kernels for products of a tall matrix, a row an edge, by three products of halves in tensor cores.
#
# With ``a = a_hi + a_lo`` in half precision, scaled by a power of two before,
#
#     a b  =  a_hi b_hi + a_lo b_hi + a_hi b_lo + (a_lo b_lo, some 2**-22 of the result, left out)
#
# summed in float32; sums in the tensor cores are short, because these truncate. Scales belong to rows of a (at most 32
# elements at a time if the product is narrow) and to columns of b. So an element of the result is as accurate as
# float32's, relative to the largest elements of its row of a and its column of b: what is more than 2**-20 times
# smaller than these loses digits, and what is below 2**-45 as well. In sums over rows each row of a has a scale, and
# then 16 rows of each column of b.

# A product by these kernels has at most so many elements along the depth, or columns; others are torch's of halves.
MOST_NARROW = 128
# Elements along the depth that tensor cores add up before a rounded sum takes them over. They cut off toward zero what
# they add up: of a sum along 512 an H200 loses 5.5e-7 if the terms have both signs, and that is given back. If all have
# one sign, it loses five times as much.
_CHAIN = 512
# Of the trial's product, relative to its largest element; torch's in float32 is at 1.4e-6 (an H200, depth 1024).
_MOST_ERROR = 4e-6
# By device what a sum loses for each element along a chain, relative; None where products are not float32's.
_LOST: dict[torch.device, float | None] = {}
# Fragments in shared memory at a time, in pieces of 512 bytes: one step of 16 along the depth of one tile of 8 columns.
_PIECES = 32
_MOST_WARPS = 4
# Of tall sums: rows of a run, columns of a block on the left and on the right, and a block's fewest runs.
_RUN, _LEFT, _RIGHT, _LEAST_RUNS = 64, 64, 128, 4
# With fewer right columns torch's sums are faster (H200: 64 by 64 in 53 us for 84; 64 by 512 in 232 for 202).
LEAST_RIGHT = 256


def product_fits(rows: int, depth: int, columns: int) -> bool:
    """Whether there is one kernel for ``[rows, depth] [depth, columns]``."""
    return rows > 0 < depth and columns > 0 == depth % 4 == columns % 4 and min(depth, columns) <= MOST_NARROW


def product(a: Tensor, b: Tensor, accuracy: str = "ieee") -> Tensor:
    """a ``[rows, depth]`` times b ``[depth, columns]``, of sizes that :func:`fits` takes, without autograd.

    Float32 on one GPU. a is copied unless its rows are contiguous and aligned to 16 bytes; b has any strides.
    """
    (rows, depth), columns, device = a.shape, b.shape[1], a.get_device()
    if min(depth, columns) > MOST_NARROW:
        return product_of_halves(a, b, accuracy)
    a = _with_aligned_rows(a)
    is_wide, tiles, steps = _sizes(depth, columns)
    packed, backs = empty((tiles * steps * 32 * 4,), a), empty((tiles * 8,), a)
    out = empty((rows, columns), a)
    matrix = (b.data_ptr(), b.stride(0), b.stride(1), packed.data_ptr(), backs.data_ptr())
    packing(is_wide).launch(device, tiles, *matrix, depth, columns, tiles, steps)
    kernel = wide(steps, accuracy) if is_wide else narrow(tiles, accuracy)
    of_block = _rows(steps > 4 if is_wide else tiles > 8)
    pointers = (a.data_ptr(), packed.data_ptr(), backs.data_ptr(), out.data_ptr())
    kernel.launch(device, -(-rows // of_block), *pointers, rows, depth, columns, a.stride(0))
    return out


def product_of_halves(a: Tensor, b: Tensor, accuracy: str) -> Tensor:
    """The same where neither side is narrow: torch multiplies the halves, along ``_CHAIN`` of the depth at a time."""
    (rows, depth), columns, device = a.shape, b.shape[1], a.get_device()
    is_exact = PRODUCTS[accuracy] == 3
    both = []
    for matrix, low_first in ((a, 0), (b.t(), 1)):
        matrix, count = _with_aligned_rows(matrix), matrix.shape[0]
        found = torch.empty(count, depth * (1 + is_exact), dtype=torch.float16, device=a.device), empty((count,), a)
        pointers = (matrix.data_ptr(), *(one.data_ptr() for one in found))
        halving(accuracy).launch(device, -(-count // _MOST_WARPS), *pointers, count, depth, matrix.stride(0), low_first)
        both.append(found)
    (left, of_rows), (right, of_columns) = both
    out = empty((rows, columns), a)
    high = right[:, depth:] if is_exact else right
    parts = [(left, right)] if is_exact else []  # high by low and low by high
    parts += zip(left[:, :depth].split(_CHAIN, dim=1), high.split(_CHAIN, dim=1), strict=True)
    for number, part in enumerate(parts):
        multiply_halves(out, *part, keep=number > 0)
    blocks = -(-rows * columns // (128 * _MOST_WARPS))
    pointers = (out.data_ptr(), of_rows.data_ptr(), of_columns.data_ptr())
    lost = min(depth, _CHAIN) * (_LOST.get(a.device) or 0.0) if is_exact else 0.0
    SCALING.launch(device, blocks, *pointers, rows, columns, as_bits(lost))
    return out


def multiply_halves(out: Tensor, a: Tensor, b: Tensor, *, keep: bool) -> None:
    """``a b^T`` of halves, summed in float32, to out, or if that is kept added to it."""
    torch.ops.aten.addmm.dtype_out(out, a, b.t(), torch.float32, beta=int(keep), out=out)


def takes_halves(a: Tensor, columns: int) -> bool:
    """Whether :func:`product_of_halves` is for a, where no kernel is. Before 2.8 torch has no such product."""
    depth = a.shape[1]
    if min(depth, columns) <= MOST_NARROW or depth % 8 or columns % 8 or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    # By this option of torch the sums would be of halves, too.
    is_refused = getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
    return not is_refused and takes(a, _of_halves) and _lost(a.device) is not None


def _lost(device: torch.device) -> float | None:
    """Of ``_LOST``, by a product that is tried once a device: a library of the device multiplies the halves."""
    if device not in _LOST and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        drawn = torch.Generator().manual_seed(0)
        with torch.inference_mode(False), torch.no_grad():
            sizes = (2048, 2 * _CHAIN), (2 * _CHAIN, 256)
            a, b = (torch.randn(size, generator=drawn, dtype=torch.float32).to(device) for size in sizes)
            exact, found = a.double() @ b.double(), product_of_halves(a, b, "ieee").double()
            is_exact = bool((found - exact).abs().max() < _MOST_ERROR * exact.abs().max())
            kept = float((found * exact).sum() / exact.square().sum())
        _LOST[device] = (1 - kept) / _CHAIN if is_exact else None
    return _LOST.get(device)


def _with_aligned_rows(a: Tensor) -> Tensor:
    """Copied unless each row is contiguous and begins at 16 bytes."""
    if a.stride(1) == 1 and a.stride(0) % 4 == 0 and a.data_ptr() % 16 == 0:
        return a
    return a.clone(memory_format=torch.contiguous_format)


def sums(a: Tensor, b: Tensor, accuracy: str = "ieee") -> Tensor:
    """``a^T b`` of a ``[rows, left]`` and b ``[rows, right]``, whose sizes :func:`fits` as ``(rows, left, right)``.

    Float32 on one GPU, without autograd. The sums have a fixed order.
    """
    a, b = aligned(a), aligned(b)
    (rows, left), right, device = a.shape, b.shape[1], a.get_device()
    blocks = -(-right // _RIGHT) * -(-left // _LEFT)
    runs = -(-rows // _RUN)
    splits = max(1, min(runs // _LEAST_RUNS, 3 * device_facts(a.device).units // blocks))
    out = empty((splits, left, right), a)
    pointers = (a.data_ptr(), b.data_ptr(), out.data_ptr())
    summing(accuracy).launch(device, blocks * splits, *pointers, rows, left, right, splits)
    return out[0] if splits == 1 else out.sum(0)


def multiplies(a: Tensor, b: Tensor) -> bool:
    """Whether :func:`product` is for these matrices; sizes decide first, because most products are small."""
    (rows, depth), columns = a.shape, b.shape[1]
    if product_fits(rows, depth, columns):
        return takes(a, _of_product(depth, columns))
    return takes_halves(a, columns)


def sums_up(a: Tensor, b: Tensor) -> bool:
    """Whether :func:`sums` is for these matrices."""
    (rows, left), right = a.shape, b.shape[1]
    return right >= LEAST_RIGHT and product_fits(rows, left, right) and takes(a, _of_sums)


def takes(tensor: Tensor, sources: Callable[[torch.dtype], tuple[Source, ...]]) -> bool:
    """Whether these kernels are for a tensor's dtype and device, and can be compiled or were."""
    is_float = tensor.is_cuda and tensor.dtype is torch.float32
    return is_float and are_there(sources, tensor.dtype, tensor.get_device())


def product_sources(narrow_sides: Iterable[int]) -> tuple[Source, ...]:
    """Of all kernels whose matrices have one of these sizes on their narrow side: products to it, from it, and sums."""
    columns = 4 * MOST_NARROW  # on the other side; any number gives the same kernels
    both = [pair for narrow_side in narrow_sides for pair in ((narrow_side, columns), (columns, narrow_side))]
    found = (source for pair in both for source in _of_product(*pair)(torch.float32))
    return tuple(dict.fromkeys((*found, *_of_sums(torch.float32))))


@functools.cache
def _of_product(depth: int, columns: int) -> Callable[[torch.dtype], tuple[Source, ...]]:
    is_wide, tiles, steps = _sizes(depth, columns)
    return lambda dtype: (packing(is_wide).source, (wide(steps) if is_wide else narrow(tiles)).source)


def _sizes(depth: int, columns: int) -> tuple[bool, int, int]:
    """Whether a product is to many columns; tiles of 8 columns, steps of 16 along the depth."""
    is_wide = depth <= MOST_NARROW
    return is_wide, 2 * -(-columns // 16), -(-depth // 16) if is_wide else 2 * -(-depth // 32)


def _rows(is_deep: bool) -> int:
    return _MOST_WARPS * 16 * _more(is_deep)


def _more(is_deep: bool) -> int:
    """Times 16 rows that a warp has: two share what is read of the other matrix, if registers allow."""
    return 1 if is_deep else 2


def kernel_source(entry: str, *headers: str, accuracy: str = "ieee", **constants: int) -> Source:
    """The text of a kernel of rows in tensor cores. headers: the last one has its ``entry``."""
    numbers = "".join(f"constexpr int {constant} = {value};\n" for constant, value in constants.items())
    parts = ("device.cuh", "tensor_cores.cuh", *headers)
    low = "true" if PRODUCTS[accuracy] == 3 else "false"
    return Source(_PREAMBLE.format(low=low) + numbers + "".join(map(included, parts)), "cuda", entry)


_PREAMBLE = """using Real = float;
#define REAL_IS_FLOAT 1
constexpr int LANES = 32;
constexpr bool MUL_IR = false, LOW = {low};
"""
ROWS_HEADERS = ("product.cuh:weight_ring", "tall_products.cuh:rows")


@functools.cache
def packing(is_wide: bool) -> FixedKernel:
    """The kernel that turns b into halves, of a product to many columns or to few."""
    threads = 128 if is_wide else 1024  # few columns are few blocks, each with a large depth
    headers = ("tall_products.cuh:tiles", "tall_products.cuh:tall_matrix")
    source = kernel_source("equitune_tall_matrix", *headers, THREADS=threads, STEPS_FIRST=int(not is_wide))
    return FixedKernel(source, 9, threads)


@functools.cache
def wide(steps: int, accuracy: str = "ieee") -> FixedKernel:
    """The kernel of products of a depth of ``steps`` times 16."""
    tiles = 2 * max(1, _PIECES // steps // 2)
    constants = {"MORE": _more(steps > 4), "WARPS": _MOST_WARPS, "STEPS": steps, "TILES": tiles}
    headers = (*ROWS_HEADERS, "tall_products.cuh:to_wide")
    source = kernel_source("equitune_tall_to_wide", *headers, accuracy=accuracy, **constants)
    return FixedKernel(source, 8, 32 * _MOST_WARPS)


@functools.cache
def narrow(tiles: int, accuracy: str = "ieee") -> FixedKernel:
    """The kernel of products of ``tiles`` times 8 columns."""
    constants = {"MORE": _more(tiles > 8), "WARPS": _MOST_WARPS, "TILES": tiles}
    headers = (*ROWS_HEADERS, "tall_products.cuh:to_narrow")
    source = kernel_source("equitune_tall_to_narrow", *headers, accuracy=accuracy, **constants)
    return FixedKernel(source, 8, 32 * _MOST_WARPS)


@functools.cache
def summing(accuracy: str = "ieee") -> FixedKernel:
    """The kernel of sums over rows."""
    headers, constants = (*ROWS_HEADERS, "tall_products.cuh:sums"), {"MORE": 1, "WARPS": _MOST_WARPS}
    source = kernel_source("equitune_tall_sums", *headers, accuracy=accuracy, **constants)
    return FixedKernel(source, 7, 32 * _MOST_WARPS)


def _of_sums(dtype: torch.dtype) -> tuple[Source, ...]:
    return (summing().source,)


@functools.cache
def halving(accuracy: str = "ieee") -> FixedKernel:
    """The kernel that turns rows into halves."""
    source = kernel_source("equitune_tall_halves", "tall_products.cuh:halves", accuracy=accuracy, WARPS=_MOST_WARPS)
    return FixedKernel(source, 7, 32 * _MOST_WARPS)


# Undoes the scales of both, and gives back what the sums lost.
SCALING = FixedKernel(
    kernel_source("equitune_tall_scales", "tall_products.cuh:scales", WARPS=_MOST_WARPS), 6, 32 * _MOST_WARPS
)


def _of_halves(dtype: torch.dtype) -> tuple[Source, ...]:
    return (halving().source, SCALING.source)
