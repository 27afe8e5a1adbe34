"""Calls functions of the CUDA driver directly, because host time limits calls on small graphs.

Such a launch takes a third of the host time of a launch through the bindings; a fill bypasses torch's dispatcher.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelgen.compile.cache import Binary
from kernelgen.compile.nvrtc import has_nvrtc, misfit, nvrtc_version
from kernelgen.errors import LaunchError, ToolMissingError

INVALID_CONTEXT = 201
# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAX_DYNAMIC_SHARED = 8


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


class LoadedKernel:
    """A kernel of a module, which stays loaded as long as this object lives.

    handle: the driver's, for all devices.
    """

    def __init__(self, library: int, handle: int) -> None:
        self.handle = handle
        # Not at the end of the process, when the driver may be gone.
        weakref.finalize(self, _library().cuLibraryUnload, ctypes.c_void_p(library)).atexit = False


def load_entry(binary: Binary, entry: str) -> LoadedKernel:
    """A kernel of compiled code: a cubin, or PTX, which the driver compiles.

    Raises ToolMissingError for a driver that is too old, LaunchError if it refuses the code otherwise.
    """
    driver, library, kernel = _library(), ctypes.c_void_p(), ctypes.c_void_p()
    if not hasattr(driver, "cuLibraryLoadData"):
        raise ToolMissingError("this NVIDIA driver is older than 525 (CUDA 12.0); install a newer driver")
    code = binary.path.read_bytes()  # ctypes adds the zero byte that ends PTX
    status = driver.cuLibraryLoadData(ctypes.byref(library), code, None, None, 0, None, None, 0)
    if status == 0:
        status = driver.cuLibraryGetKernel(ctypes.byref(kernel), library, entry.encode())
    if status == 0:
        return LoadedKernel(library.value or 0, kernel.value or 0)
    reason = misfit(driver_cuda(), nvrtc_version()) if has_nvrtc() else ""
    if reason:
        raise ToolMissingError(reason)
    raise LaunchError(f"{binary.path} cannot be loaded: {error_name(status)}")


def allow_shared(kernel: LoadedKernel, size: int, device: int) -> int:
    """Let a kernel's blocks take ``size`` bytes of dynamic shared memory on a device; returns a status."""
    set_attribute = _library().cuKernelSetAttribute
    set_attribute.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    return set_attribute(_MAX_DYNAMIC_SHARED, size, kernel.handle, device)


def blocks_held(kernel: LoadedKernel, threads: int, shared: int, device: int) -> int:
    """Blocks of a kernel that a multiprocessor of the current device holds at a time; 0 if the driver does not say."""
    torch.cuda.set_device(device)  # makes torch's context current
    count = ctypes.c_int()
    status = _library().cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(count), ctypes.c_void_p(kernel.handle), ctypes.c_int(threads), ctypes.c_size_t(shared)
    )
    return count.value if status == 0 else 0


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
    torch.cuda.set_device(device)  # makes torch's context current
    driver, address = _library(), ctypes.c_uint64()
    status = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
    if status == 0:
        status = driver.cuMemsetD8_v2(address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
    if status == 0:
        status = driver.cuStreamSynchronize(None)
    if status != 0:
        raise LaunchError(f"{size} bytes of memory on cuda:{device}: {error_name(status)}")
    return address.value


def error_name(status: int) -> str:
    """The driver's name for an error, such as CUDA_ERROR_INVALID_VALUE."""
    name = ctypes.c_char_p()
    if _library().cuGetErrorName(status, ctypes.byref(name)) != 0 or name.value is None:
        return f"CUDA driver error {status}"
    return name.value.decode()
