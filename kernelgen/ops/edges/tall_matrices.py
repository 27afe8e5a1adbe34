"""Kernels for products of a tall matrix, a row an edge, by three products of halves in tensor cores.

With ``a = a_hi + a_lo`` in half precision, scaled by a power of two before,

    a b  =  a_hi b_hi + a_lo b_hi + a_hi b_lo + (a_lo b_lo, some 2**-22 of the result, left out)

summed in float32; sums in the tensor cores are short, because these truncate. Scales belong to rows of a (at most 32
elements at a time if the product is narrow) and to columns of b. So an element of the result is as accurate as
float32's, relative to the largest elements of its row of a and its column of b: what is more than 2**-20 times smaller
than these loses digits, and what is below 2**-45 as well. In sums over rows each row of a has a scale, and then 16
rows of each column of b.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kernelgen.device import device_facts
from kernelgen.emit.source import Source, included
from kernelgen.ops.nodes.matrices import are_there
from kernelgen.runtime.allocation import empty
from kernelgen.runtime.arguments import aligned
from kernelgen.runtime.kernel import FixedKernel

# A product has at most so many elements along the depth, or columns.
MOST_NARROW = 128
# Fragments in shared memory at a time, in pieces of 512 bytes: one step of 16 along the depth of one tile of 8 columns.
_PIECES = 32
_MOST_WARPS = 4
# Of tall sums: rows of a run, columns of a block on the left and on the right, and a block's fewest runs.
_RUN, _LEFT, _RIGHT, _LEAST_RUNS = 64, 64, 128, 4
# With fewer right columns torch's sums are faster (H200: 64 by 64 in 53 us for 84; 64 by 512 in 232 for 202).
LEAST_RIGHT = 256


def fits(rows: int, depth: int, columns: int) -> bool:
    """Whether there is a kernel for ``[rows, depth] [depth, columns]``."""
    return rows > 0 < depth and columns > 0 == depth % 4 == columns % 4 and min(depth, columns) <= MOST_NARROW


def product(a: Tensor, b: Tensor) -> Tensor:
    """a ``[rows, depth]`` times b ``[depth, columns]``, of sizes that :func:`fits` takes, without autograd.

    Float32 on one GPU. a is copied unless its rows are contiguous and aligned to 16 bytes; b has any strides.
    """
    (rows, depth), columns, device = a.shape, b.shape[1], a.get_device()
    if a.stride(1) != 1 or a.stride(0) % 4 or a.data_ptr() % 16:
        a = a.clone(memory_format=torch.contiguous_format)
    is_wide, tiles, steps = _sizes(depth, columns)
    packed, backs = empty((tiles * steps * 32 * 4,), a), empty((tiles * 8,), a)
    out = empty((rows, columns), a)
    matrix = (b.data_ptr(), b.stride(0), b.stride(1), packed.data_ptr(), backs.data_ptr())
    packing(is_wide).launch(device, tiles, *matrix, depth, columns, tiles, steps)
    kernel, of_block = (wide(steps), _rows(steps > 4)) if is_wide else (narrow(tiles), _rows(tiles > 8))
    pointers = (a.data_ptr(), packed.data_ptr(), backs.data_ptr(), out.data_ptr())
    kernel.launch(device, -(-rows // of_block), *pointers, rows, depth, columns, a.stride(0))
    return out


def sums(a: Tensor, b: Tensor) -> Tensor:
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
    summing().launch(device, blocks * splits, *pointers, rows, left, right, splits)
    return out[0] if splits == 1 else out.sum(0)


def multiplies(a: Tensor, b: Tensor) -> bool:
    """Whether :func:`product` is for these matrices; sizes decide first, because most products are small."""
    (rows, depth), columns = a.shape, b.shape[1]
    return fits(rows, depth, columns) and takes(a, _of_product(depth, columns))


def sums_up(a: Tensor, b: Tensor) -> bool:
    """Whether :func:`sums` is for these matrices."""
    (rows, left), right = a.shape, b.shape[1]
    return right >= LEAST_RIGHT and fits(rows, left, right) and takes(a, _of_sums)


def takes(tensor: Tensor, sources: Callable[[torch.dtype], tuple[Source, ...]]) -> bool:
    """Whether these kernels are for a tensor's dtype and device, and can be compiled or were."""
    is_float = tensor.is_cuda and tensor.dtype is torch.float32
    return is_float and are_there(sources, tensor.dtype, tensor.get_device())


def sources(narrow_sides: Iterable[int]) -> tuple[Source, ...]:
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
    """Rows of a block."""
    return _MOST_WARPS * 16 * _more(is_deep)


def _more(is_deep: bool) -> int:
    """Times 16 rows that a warp has: two share what is read of the other matrix, if registers allow."""
    return 1 if is_deep else 2


def kernel_source(name: str, *headers: str, **constants: int) -> Source:
    """The text of a kernel of rows in tensor cores, ``include/NAME.cuh``, whose entry is ``equitune_NAME``."""
    numbers = "".join(f"constexpr int {constant} = {value};\n" for constant, value in constants.items())
    parts = ("device.cuh", "tensor_cores.cuh", *headers, f"{name}.cuh")
    return Source(_PREAMBLE + numbers + "".join(map(included, parts)), "cuda", f"equitune_{name}")


_PREAMBLE = """using Real = float;
#define REAL_IS_FLOAT 1
constexpr int LANES = 32;
constexpr bool MUL_IR = false, LOW = true;
"""
ROWS_HEADERS = ("weight_ring.hpp", "tall_rows.cuh")


@functools.cache
def packing(is_wide: bool) -> FixedKernel:
    """The kernel that turns b into halves, of a product to many columns or to few."""
    threads = 128 if is_wide else 1024  # few columns are few blocks, each with a large depth
    return FixedKernel(
        kernel_source("tall_matrix", "matrix_tiles.cuh", THREADS=threads, STEPS_FIRST=int(not is_wide)), 9, threads
    )


@functools.cache
def wide(steps: int) -> FixedKernel:
    """The kernel of products of a depth of ``steps`` times 16."""
    tiles = 2 * max(1, _PIECES // steps // 2)
    constants = {"MORE": _more(steps > 4), "WARPS": _MOST_WARPS, "STEPS": steps, "TILES": tiles}
    return FixedKernel(kernel_source("tall_to_wide", *ROWS_HEADERS, **constants), 8, 32 * _MOST_WARPS)


@functools.cache
def narrow(tiles: int) -> FixedKernel:
    """The kernel of products of ``tiles`` times 8 columns."""
    constants = {"MORE": _more(tiles > 8), "WARPS": _MOST_WARPS, "TILES": tiles}
    return FixedKernel(kernel_source("tall_to_narrow", *ROWS_HEADERS, **constants), 8, 32 * _MOST_WARPS)


@functools.cache
def summing() -> FixedKernel:
    """The kernel of sums over rows."""
    return FixedKernel(kernel_source("tall_sums", *ROWS_HEADERS, MORE=1, WARPS=_MOST_WARPS), 7, 32 * _MOST_WARPS)


def _of_sums(dtype: torch.dtype) -> tuple[Source, ...]:
    return (summing().source,)
