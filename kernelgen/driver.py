"""Functions of the CUDA driver, called without bindings in between: small graphs are decided by the host's time.

A launch this way takes the host a third of the bindings' launch; a fill spares torch's dispatcher.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch
from torch import Tensor

from kernelgen.errors import ToolMissingError

INVALID_CONTEXT = 201


@functools.cache
def _library() -> Any:
    names = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ToolMissingError(f"the CUDA driver ({names[0]}) cannot be loaded; install the NVIDIA driver")


@functools.cache
def launch_function() -> Any:
    """``cuLaunchKernel``: function, grid, block, shared bytes, stream, parameters and extra; leaves a status."""
    function = _library().cuLaunchKernel
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    function.restype = ctypes.c_int
    return function


@functools.cache
def _fill_function() -> Any:
    function = _library().cuMemsetD8Async
    function.argtypes = [ctypes.c_void_p, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


def clear(out: Tensor) -> bool:
    """Fill a contiguous tensor of the current device with zeros, on its current stream; whether that was done."""
    if out.numel() == 0:
        return True
    stream = torch._C._cuda_getCurrentRawStream(out.get_device())
    return _fill_function()(out.data_ptr(), 0, out.nbytes, stream) == 0


def error_name(status: int) -> str:
    """The driver's name of an error, such as CUDA_ERROR_INVALID_VALUE."""
    from cuda.bindings import driver

    try:
        return driver.CUresult(status).name
    except ValueError:
        return f"CUDA driver error {status}"
