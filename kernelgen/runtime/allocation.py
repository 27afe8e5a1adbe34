"""Allocates tensors for results.

Host time limits calls on small graphs, and torch's public allocating functions took a seventh of such a backward pass.
So this uses the functions with which torch's compiled graphs allocate, if this version of torch has them.

On the host, outputs of tens of megabytes are mapped anew in every call. Touching them page by page (4 KiB each) can
take longer than the kernel. Advising huge pages before the first touch turns 512 page faults into one.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelgen.runtime.cuda_driver import clear

HUGE_PAGE = 2 << 20
# From asm-generic/mman-common.h.
_MADV_HUGEPAGE = 14


def _of_compiled_graphs(name: str) -> Callable[..., Tensor] | None:
    return getattr(getattr(torch._C._dynamo, "guards", None), name, None)


_empty_cpu = _of_compiled_graphs("_empty_strided_cpu")
_empty_cuda = _of_compiled_graphs("_empty_strided_cuda")
_reinterpret = _of_compiled_graphs("_reinterpret_tensor")


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """``like.new_empty(shape)``, contiguous; large host tensors ask for huge pages."""
    if like.is_cpu:
        out = like.new_empty(shape) if _empty_cpu is None else _empty_cpu(shape, _strides(shape), like.dtype)
        if math.prod(shape) * out.element_size() >= 2 * HUGE_PAGE:
            _advise_huge_pages(out)
        return out
    if _empty_cuda is not None and _is_on_current_gpu(like):
        return _empty_cuda(shape, _strides(shape), like.dtype)
    return like.new_empty(shape)


def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """``like.new_zeros(shape)``, allocated as :func:`empty` does."""
    out = empty(shape, like)
    return out if _is_on_current_gpu(out) and clear(out) else out.zero_()


def _is_on_current_gpu(tensor: Tensor) -> bool:
    """Whether the fast functions work for this tensor's device."""
    return tensor.is_cuda and torch._C._cuda_getDevice() == tensor.get_device()


def part(flat: Tensor, shape: tuple[int, ...], begin: int) -> Tensor:
    """The elements of ``flat`` from ``begin`` on as a separate tensor, with its own counter of in-place writes."""
    if _reinterpret is None:
        return flat.as_strided(shape, _strides(shape), begin).data
    return _reinterpret(flat, shape, _strides(shape), begin)


@functools.lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    if len(shape) == 2:
        return max(1, shape[1]), 1
    return tuple(math.prod(max(1, size) for size in shape[i + 1 :]) for i in range(len(shape)))


@functools.cache
def _madvise() -> Any:
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None  # not Linux: keep the page size
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _advise_huge_pages(out: Tensor) -> None:
    begin = -(-out.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (out.data_ptr() + out.nbytes) // HUGE_PAGE * HUGE_PAGE
    advise = _madvise()
    if advise is not None and end > begin:
        advise(begin, end - begin, _MADV_HUGEPAGE)  # only advice: a failure does no harm
