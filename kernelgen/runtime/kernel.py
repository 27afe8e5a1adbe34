"""Loads the kernel of a spec as a :class:`Kernel`, which runs on torch tensors.

A kernel looks up what its calls need (entry point, geometry, arguments) once and keeps it, because host time limits
calls on small graphs.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import struct
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.compile.compiler import compile_source
from kernelgen.compile.gpu import has_nvrtc, misfit, nvrtc_version
from kernelgen.compile.job import Binary
from kernelgen.device import NOT_RUN, device_facts
from kernelgen.errors import LaunchError, ToolMissingError, UnsupportedError
from kernelgen.kernels.dispatch import AnyPlan, emit, geometry, launch_rule, make_plan
from kernelgen.kernels.source import Source, included
from kernelgen.kernels.spec import BUFFERS, AnySpec

# Calls functions of the CUDA driver directly, because host time limits calls on small graphs.
#
# Such a launch takes a third of the host time of a launch through the bindings; a fill bypasses torch's dispatcher.

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

    def pack(self, *values: int) -> ctypes.Array[Any]:
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


Launch = Callable[[int, tuple[int, int, int], int, ctypes.Array[Any]], int]


@functools.cache
def launch_function() -> Launch:
    """``cuLaunchKernelEx``: takes kernel, geometry (blocks, threads, shared bytes), stream and arguments.

    It returns a status.
    """
    function = _library().cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4
    function.restype = ctypes.c_int
    config, pack = _Config(), _Config.packer.pack_into

    def launch(handle: int, shape: tuple[int, int, int], stream: int, arguments: ctypes.Array[Any]) -> int:
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


def blocks_held(kernel: LoadedKernel, threads: int, shared: int, device: int) -> int:
    """Blocks of a kernel that a multiprocessor of the current device holds at a time; 0 if the driver does not say."""
    torch.cuda.set_device(device)  # makes torch's context current
    count = ctypes.c_int()
    status = _library().cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(count), ctypes.c_void_p(kernel.handle), ctypes.c_int(threads), ctypes.c_size_t(shared)
    )
    return count.value if status == 0 else 0


def launch_on(
    device: int, function: Launch, handle: int, shape: tuple[int, int, int], arguments: ctypes.Array[Any]
) -> int:
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


# Position of each buffer among a kernel's pointers.
PLACE = {name: place for place, name in enumerate(BUFFERS)}
# Bytes of dynamic shared memory beyond which a kernel must request permission.
_SHARED_WITHOUT_ASKING = 48 * 1024
_KEPT_GEOMETRIES = 256
# Most blocks of a multiprocessor of data centres' GPUs.
MOST_BLOCKS = 32
# Work (``row_work`` of all rows) that justifies another thread: about 10 us for weights (edges x paths x channels),
# about 4 us for elements of harmonics.
_WORK_PER_THREAD = 8192

# Whether this process was forked from one that had imported this module. OpenMP's threads do not survive a fork, and
# GNU's runtime would wait for them forever.
_forked = False

# Takes addresses in the order of BUFFERS (0: none), then num_edges, num_in, num_out and the device's number.
Run = Callable[[Sequence[int], int, int, int, int], None]


def _note_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_note_fork)


def note_fresh() -> None:
    """Say that the process that this one was forked from had never started OpenMP's threads."""
    global _forked
    _forked = False


class Kernel:
    """One kernel: its plan, source, binary and resource usage; loaded at the first launch, by any thread."""

    def __init__(self, plan: AnyPlan, source: Source, binary: Binary) -> None:
        self.plan = plan
        self.source = source
        self.binary = binary
        self.resources = {**binary.resources, **occupancy(plan, binary.resources)}
        self._lock = threading.Lock()
        self._run: Run | None = None

    def launch(self, buffers: Mapping[str, Tensor], num_edges: int, num_in: int, num_out: int) -> None:
        """Run on ``buffers``, keyed by the names of ``BUFFERS``; missing ones are null."""
        pointers = [0] * len(BUFFERS)
        for name, tensor in buffers.items():
            pointers[PLACE[name]] = tensor.data_ptr()
        self.run(pointers, num_edges, num_in, num_out, next(iter(buffers.values())).get_device())

    def run(self, pointers: Sequence[int], num_edges: int, num_in: int, num_out: int, device: int) -> None:
        """Run on addresses in the order of ``BUFFERS`` (0: none), 16-byte aligned, of contiguous tensors."""
        (self._run or self._load())(pointers, num_edges, num_in, num_out, device)

    def _load(self) -> Run:
        with self._lock:
            if self._run is None:
                if self.plan.spec.facts.is_hip:
                    raise UnsupportedError(f"{NOT_RUN}; build the operator for device cpu, or a CUDA GPU")
                if self.plan.spec.facts.backend == "cuda":
                    self._run = _CudaRun(self.plan, load_entry(self.binary, self.source.entry))
                else:
                    self._run = _load_host(self.plan, self.binary, self.source.entry)
            return self._run


def occupancy(plan: AnyPlan, resources: Mapping[str, Any]) -> dict[str, float]:
    """``occupancy``: the share of a CUDA multiprocessor's threads that the kernel's blocks can take at a time.

    By the limits on threads, registers (which warps get in units of 256), shared memory (1 kB more a block) and blocks.
    Empty where the compiler does not report registers.
    """
    facts, registers = plan.spec.facts, resources.get("registers", 0)
    if facts.backend != "cuda" or facts.is_hip or not registers:
        return {}
    rule = launch_rule(plan)
    warps = -(-rule.threads // 32)
    held = min(
        MOST_BLOCKS,
        facts.max_threads_per_unit // (32 * warps),
        facts.registers_per_unit // (-(-registers // 8) * 256 * warps),
        facts.shared_per_unit // (rule.shared + resources.get("shared_bytes", 0) + 1024),
    )
    return {"occupancy": round(32 * warps * held / facts.max_threads_per_unit, 3)}


@functools.lru_cache(maxsize=4096)
def load_kernel(spec: AnySpec) -> Kernel:
    """The kernel of a spec, planned, emitted and compiled once a process."""
    plan = make_plan(spec)
    source = emit(plan)
    return Kernel(plan, source, compile_source(source, spec.facts))


def _load_host(plan: AnyPlan, binary: Binary, entry: str) -> Run:
    try:
        function = getattr(ctypes.CDLL(str(binary.path)), entry)
    except (OSError, AttributeError) as error:
        cause = str(error).removeprefix(f"{binary.path}: ")
        raise LaunchError(f"{binary.path} cannot be loaded: {cause}; remove it to have it compiled again") from error
    function.argtypes = [ctypes.c_void_p] * len(BUFFERS) + [ctypes.c_longlong] * 3 + [ctypes.c_int]
    function.restype = None
    fixed_threads, edges_per_thread = host_threads(plan.spec)

    def run(pointers: Sequence[int], num_edges: int, num_in: int, num_out: int, device: int) -> None:
        threads = min(torch.get_num_threads(), fixed_threads or 1 + num_edges // edges_per_thread)
        if _forked and threads > 1:
            threads = _one_thread()
        function(*pointers, num_edges, num_in, num_out, threads)

    return run


def host_threads(spec: AnySpec) -> tuple[int, int]:
    """The number of threads of a host kernel, 0 if it varies; then each takes at least as many edges as the second."""
    return getattr(spec.schedule, "threads", 0), max(1, _WORK_PER_THREAD // max(1, spec.row_work))


@functools.cache
def _one_thread() -> int:
    """Return 1, and warn about the reason once a process."""
    warnings.warn(
        "kernels run on one thread in a forked process, because OpenMP's threads do not survive a fork; start the "
        "process by spawn for more threads, or call torch.set_num_threads(1) if one is enough",
        stacklevel=2,
    )
    return 1


_arguments = Arguments(len(BUFFERS) + 3)
# Also with the address of the zero flags and the launch number.
_arguments_and_zeros = Arguments(len(BUFFERS) + 5)


class _CudaRun:
    """Launches one CUDA kernel on torch's current stream of a device."""

    def __init__(self, plan: AnyPlan, kernel: LoadedKernel) -> None:
        self._plan = plan
        self._kernel = kernel  # keeps the module loaded
        self._handle = kernel.handle
        self._launch = launch_function()
        self._writes_zeros = getattr(plan.spec.schedule, "zeros", "apart") != "apart"
        self._allowed: set[int] = set()
        self._held: int | None = None  # blocks of a multiprocessor, found when first needed
        self._geometry: dict[tuple[int, int, int], tuple[int, int, int]] = {}

    def __call__(self, pointers: Sequence[int], num_edges: int, num_in: int, num_out: int, device: int) -> None:
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return self(pointers, num_edges, num_in, num_out, device)
        sizes = (num_edges, num_in, num_out)
        shape = self._geometry.get(sizes)
        if shape is None:
            if len(self._geometry) >= _KEPT_GEOMETRIES:  # bounds the memory if sizes keep changing
                self._geometry.clear()
            shape = self._geometry[sizes] = self._geometry_of(sizes, device)
        grid, block, shared = shape
        if shared > _SHARED_WITHOUT_ASKING and device not in self._allowed:
            self._allow_shared(device, shared)
        if self._writes_zeros:
            kept, *zeros = next_launch(device)  # kept must live until the launch is queued
            packed = _arguments_and_zeros.pack(*pointers, num_edges, num_in, num_out, *zeros)
        else:
            packed = _arguments.pack(*pointers, num_edges, num_in, num_out)
        status = launch_on(device, self._launch, self._handle, shape, packed)
        if status != 0:
            raise LaunchError(
                f"launch of {self._plan.spec.direction.text} failed on cuda:{device} with grid {grid}, "
                f"block {block}, {shared} bytes of shared memory: {error_name(status)}"
            )

    def _geometry_of(self, sizes: tuple[int, int, int], device: int) -> tuple[int, int, int]:
        shape = geometry(self._plan, *sizes)
        if not getattr(self._plan, "fills_waves", False):
            return shape
        if self._held is None:
            if shape[2] > _SHARED_WITHOUT_ASKING:
                self._allow_shared(device, shape[2])
            self._held = blocks_held(self._kernel, shape[1], shape[2], device)
        return geometry(self._plan, *sizes, self._held)

    def _allow_shared(self, device: int, shared: int) -> None:
        set_attribute = _library().cuKernelSetAttribute
        set_attribute.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
        status = set_attribute(_MAX_DYNAMIC_SHARED, shared, self._kernel.handle, device)
        if status != 0:
            raise LaunchError(
                f"{shared} bytes of shared memory a block: refused on cuda:{device}, {error_name(status)}"
            )
        self._allowed.add(device)


class FixedKernel:
    """A CUDA kernel of fixed source, with ``count`` arguments of 8 bytes; loaded at its first launch on a device."""

    def __init__(self, source: Source, count: int, threads: int) -> None:
        self.source, self.threads = source, threads
        self._arguments = Arguments(count)
        self._loaded: dict[int, LoadedKernel] = {}

    def launch(self, device: int, blocks: int, *values: int) -> None:
        """Queue the kernel on the device's current stream; LaunchError if the driver refuses."""
        loaded = self._loaded.get(device)
        if loaded is None:
            binary = compile_source(self.source, device_facts(f"cuda:{device}"))
            kernel = load_entry(binary, self.source.entry)
            loaded = self._loaded.setdefault(device, kernel)
        shape, packed = (blocks, self.threads, 0), self._arguments.pack(*values)
        status = launch_on(device, launch_function(), loaded.handle, shape, packed)
        if status != 0:
            raise LaunchError(f"{self.source.entry} with {values} failed on cuda:{device}: {error_name(status)}")


class KernelByDtype:
    """A :class:`FixedKernel` for each dtype, of sections of headers in which the dtype has a name, such as ``REAL``."""

    def __init__(self, entry: str, *headers: str, count: int, threads: int, name: str = "REAL") -> None:
        self.entry, self.headers, self.count, self.threads, self.name = entry, headers, count, threads, name
        self._kernels: dict[torch.dtype, FixedKernel] = {}

    def of(self, dtype: torch.dtype) -> FixedKernel:
        """The kernel for a dtype."""
        kernel = self._kernels.get(dtype)
        if kernel is None:
            kernel = self._kernels[dtype] = FixedKernel(self.source(dtype), self.count, self.threads)
        return kernel

    def source(self, dtype: torch.dtype) -> Source:
        text = f"#define {self.name} {_C_TYPES[dtype]}\n" + "".join(map(included, self.headers))
        return Source(text, "cuda", self.entry)

    def sources(self, dtype: torch.dtype) -> tuple[Source, ...]:
        return (self.source(dtype),)


_C_TYPES = {torch.float32: "float", torch.float64: "double", torch.int32: "int", torch.int64: "long long"}


# Flags by which kernels that zero their own outputs signal that the zeros are written (``product.cuh:zero_outputs``).
#
# Flags are memory lines of the device. Each stream has its own, since kernels of one stream run one after the other.
# Launches have distinct numbers, so flags need no reset between them. A captured graph may be replayed on any stream,
# with the launch numbers of its capture; so each of its launches has its own lines, which the graph clears.
#
# Two streams with the same handle at once (an external stream destroyed with work left, its handle reused) would share
# lines; torch's own streams live as long as the process.
#
# The lines of streams are allocated by the driver, because torch's current memory pool may belong to a captured graph.

# CU_STREAM_PER_THREAD: one handle for a stream of each thread.
_OF_EACH_THREAD = 2
# Bytes of one stream's lines (1 + COPIES of them, see the header), and the number of streams an allocation serves.
_SPACING, _AT_A_TIME = 128 * 33, 64
_launches = itertools.count(1)
_lock = threading.Lock()
# By device, stream and (where it matters) thread.
_lines: dict[tuple[int, int, int], int] = {}
_unused: dict[int, list[int]] = {}


class FlaggedLaunch(NamedTuple):
    """kept: must live until the launch is queued. address: of the lines. number: unique to this launch."""

    kept: Tensor | None
    address: int
    number: int


def next_launch(device: int) -> FlaggedLaunch:
    """The flags for a launch on the current stream of ``device``, which must be the current device."""
    if torch._C._cuda_isCurrentStreamCapturing():
        lines = _cleared_in_the_graph(device)
        return FlaggedLaunch(lines, lines.data_ptr(), next(_launches))
    stream = torch._C._cuda_getCurrentRawStream(device)
    key = (device, stream, threading.get_ident() if stream == _OF_EACH_THREAD else 0)
    address = _lines.get(key)
    return FlaggedLaunch(None, _lines_of(key) if address is None else address, next(_launches))


def _cleared_in_the_graph(device: int) -> Tensor:
    return torch.zeros(_SPACING // 8, dtype=torch.int64, device=f"cuda:{device}")


def _lines_of(key: tuple[int, int, int]) -> int:
    with _lock:
        if key not in _lines:
            unused = _unused.setdefault(key[0], [])
            if not unused:
                first = clean_memory(key[0], _SPACING * _AT_A_TIME)
                unused += range(first, first + _SPACING * _AT_A_TIME, _SPACING)
            _lines[key] = unused.pop()
        return _lines[key]


# Evicts a GPU's instruction caches: every multiprocessor executes more code than its caches hold.
#
# A kernel that is called repeatedly finds its code in the caches; in a model, among other kernels, it does not. On an
# H200 the kernels of one molecule took 0.1 to 6 us longer in turns with others; the largest code lost the most.

ENTRY = "equitune_long_code"
# Multiply-adds of 16 bytes each: 256 kB, twice the largest of a multiprocessor's instruction caches.
STEPS = 1 << 14
# Four warps reach the four parts of a multiprocessor; two blocks for each, in case one multiprocessor gets none.
THREADS, BLOCKS_EACH = 128, 2


@functools.cache
def source() -> Source:
    """A kernel without loops whose steps the compiler cannot remove."""
    steps = (f"    x = x * {1 + i * 1e-6:.7f}f + y;\n    y = y * {1 - i * 1e-6:.7f}f + x;\n" for i in range(STEPS // 2))
    head = (
        f'extern "C" __global__ void __launch_bounds__({THREADS}) {ENTRY}(float* out, unsigned long long wanted) {{\n'
    )
    body = "    float x = threadIdx.x, y = blockIdx.x;\n" + "".join(steps)
    return Source(head + body + "    if (wanted) *out = x + y;\n}\n", "cuda", ENTRY)


@functools.cache
def _long_code() -> FixedKernel:
    return FixedKernel(source(), 2, THREADS)


def evict_code(device: torch.device) -> None:
    """Queue the kernel on the current stream of the current device, which is ``device``."""
    index = torch.cuda.current_device() if device.index is None else device.index
    _long_code().launch(index, BLOCKS_EACH * device_facts(f"cuda:{index}").units, 0, 0)
