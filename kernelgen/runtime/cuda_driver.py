"""Calls functions of the CUDA driver directly, because host time limits calls on small graphs.

Such a launch takes a third of the host time of a launch through the bindings; a fill bypasses torch's dispatcher.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelgen.compile.cache import Binary
from kernelgen.compile.nvrtc import misfit, nvrtc_version
from kernelgen.errors import LaunchError, ToolMissingError

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


def driver_cuda() -> tuple[int, int]:
    """The newest CUDA version that the driver supports; ToolMissingError without a driver."""
    number = ctypes.c_int()
    status = _library().cuDriverGetVersion(ctypes.byref(number))
    if status != 0:
        raise ToolMissingError(f"the CUDA driver does not tell its version (error {status}); install it again")
    return number.value // 1000, number.value % 1000 // 10


class Arguments(threading.local):
    """One thread's packed arguments for kernels with ``count`` arguments.

    Every argument has 8 bytes, so the driver takes them as one block, through its ``extra`` launch parameters.
    """

    def __init__(self, count: int) -> None:
        self.packer = struct.Struct(f"<{count}Q")
        self.block = ctypes.create_string_buffer(self.packer.size)
        self.size = ctypes.c_size_t(self.packer.size)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, the block, CU_LAUNCH_PARAM_BUFFER_SIZE, its size, CU_LAUNCH_PARAM_END
        self.extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(self.block), 2, ctypes.addressof(self.size), 0)

    def pack(self, *values: int) -> ctypes.Array:
        """The ``extra`` parameters for these values."""
        self.packer.pack_into(self.block, 0, *values)
        return self.extra


class _Config(threading.local):
    """One thread's ``CUlaunchConfig``, packed again for every launch: faster than eleven arguments."""

    # Grid, block, shared bytes; stream, attributes and their number (none).
    packer = struct.Struct("<7I4xQQI4x")

    def __init__(self) -> None:
        self.block = ctypes.create_string_buffer(self.packer.size)
        self.address = ctypes.addressof(self.block)


Launch = Callable[[int, tuple[int, int, int], int, ctypes.Array], int]


@functools.cache
def launch_function() -> Launch:
    """``cuLaunchKernelEx``: takes kernel, geometry (blocks, threads, shared bytes), stream and arguments.

    It returns a status.
    """
    function = _library().cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4
    function.restype = ctypes.c_int
    config, pack = _Config(), _Config.packer.pack_into

    def launch(handle: int, shape: tuple[int, int, int], stream: int, arguments: ctypes.Array) -> int:
        blocks, threads, shared = shape
        pack(config.block, 0, blocks, 1, 1, threads, 1, 1, shared, stream, 0, 0)
        return function(config.address, handle, None, arguments)

    return launch


@functools.cache
def _fill_function() -> Any:
    function = _library().cuMemsetD8Async
    function.argtypes = [ctypes.c_void_p, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


def load_entry(binary: Binary, entry: str) -> Any:
    """A kernel of a compiled module; the module stays loaded as long as the returned object lives."""
    try:
        from cuda.core import ObjectCode
    except ImportError as error:
        raise ToolMissingError(
            f"cuda.core cannot be imported ({error}); pip install 'equitune[gpu]', or 'equitune[gpu-cu12]' for drivers "
            "before 580"
        ) from error
    try:
        return ObjectCode.from_cubin(binary.path.read_bytes()).get_kernel(entry)
    except Exception as error:  # cuda.core raises private types
        reason = misfit(driver_cuda(), nvrtc_version())
        if reason:
            raise ToolMissingError(reason) from error
        raise LaunchError(f"{binary.path} cannot be loaded: {error}") from error


def launch_on(device: int, function: Launch, handle: int, shape: tuple[int, int, int], arguments: ctypes.Array) -> int:
    """Launch on the device's current stream; returns a status."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    status = function(handle, shape, stream, arguments)
    if status == INVALID_CONTEXT:  # the first CUDA call of this thread: torch makes its context current
        torch.cuda.set_device(device)
        status = function(handle, shape, stream, arguments)
    return status


def clear(out: Tensor) -> bool:
    """Zero a contiguous tensor of the current device on its current stream; returns whether that succeeded."""
    if out.numel() == 0:
        return True
    stream = torch._C._cuda_getCurrentRawStream(out.get_device())
    return _fill_function()(out.data_ptr(), 0, out.nbytes, stream) == 0


def clean_memory(device: int, size: int) -> int:
    """The address of ``size`` zeroed bytes of the device, never freed; LaunchError if the driver cannot allocate."""
    from cuda.bindings import driver

    torch.cuda.set_device(device)  # makes torch's context current
    status, address = driver.cuMemAlloc(size)
    if int(status) == 0:
        (status,) = driver.cuMemsetD8(address, 0, size)
    if int(status) == 0:
        (status,) = driver.cuStreamSynchronize(driver.CUstream(0))
    if int(status) != 0:
        raise LaunchError(f"{size} bytes of memory on cuda:{device}: {status.name}")
    return int(address)


def error_name(status: int) -> str:
    """The driver's name for an error, such as CUDA_ERROR_INVALID_VALUE."""
    from cuda.bindings import driver

    try:
        return driver.CUresult(status).name
    except ValueError:
        return f"CUDA driver error {status}"
