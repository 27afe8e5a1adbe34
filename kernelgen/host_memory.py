"""Fresh host memory for outputs: a shape enters, a tensor leaves whose pages are huge where Linux allows it.

Outputs of tens of megabytes are mapped anew in every call, and touching them page by page (4 KiB each) can take
longer than the kernel that fills them. Advising huge pages before the first touch makes 512 page faults one.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
# From asm-generic/mman-common.h.
_MADV_HUGEPAGE = 14


@functools.cache
def _madvise() -> Any:
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None  # not Linux: pages stay as they are
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """``torch.empty`` with dtype and device of ``like``; large host tensors ask for huge pages."""
    out = torch.empty(shape, dtype=like.dtype, device=like.device)
    if like.device.type == "cpu" and out.nbytes >= 2 * HUGE_PAGE:
        begin = -(-out.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        end = (out.data_ptr() + out.nbytes) // HUGE_PAGE * HUGE_PAGE
        advise = _madvise()
        if advise is not None and end > begin:
            advise(begin, end - begin, _MADV_HUGEPAGE)  # a refusal leaves the pages as they are
    return out
