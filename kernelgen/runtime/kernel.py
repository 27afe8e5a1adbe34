"""Loads the kernel of a spec as a :class:`Kernel`, which runs on torch tensors.

A kernel looks up what its calls need (entry point, geometry, arguments) once and keeps it, because host time limits
calls on small graphs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kernelgen.compile.cache import Binary
from kernelgen.compile.compiler import compile_source
from kernelgen.device import NOT_RUN, device_facts
from kernelgen.emit.kernel_source import emit, geometry
from kernelgen.emit.source import Source
from kernelgen.errors import LaunchError, UnsupportedError
from kernelgen.plan.planner import AnyPlan, make_plan
from kernelgen.runtime.cuda_driver import (
    Arguments,
    LoadedKernel,
    allow_shared,
    blocks_held,
    error_name,
    launch_function,
    launch_on,
    load_entry,
)
from kernelgen.runtime.zero_flags import next_launch
from kernelgen.schedule.kernel_spec import BUFFERS, AnySpec

# Bytes of dynamic shared memory beyond which a kernel must request permission.
_SHARED_WITHOUT_ASKING = 48 * 1024
_KEPT_GEOMETRIES = 256
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
        self.resources = binary.resources
        self._lock = threading.Lock()
        self._run: Run | None = None

    def launch(self, buffers: Mapping[str, Tensor], num_edges: int, num_in: int, num_out: int) -> None:
        """Run on ``buffers``, keyed by the names of ``BUFFERS``; missing ones are null."""
        device = next(iter(buffers.values())).get_device()
        pointers = [buffers[name].data_ptr() if name in buffers else 0 for name in BUFFERS]
        self.run(pointers, num_edges, num_in, num_out, device)

    def run(self, pointers: Sequence[int], num_edges: int, num_in: int, num_out: int, device: int) -> None:
        """Run on addresses in the order of ``BUFFERS`` (0: none), 16-byte aligned, of contiguous tensors."""
        (self._run or self._load())(pointers, num_edges, num_in, num_out, device)

    def _load(self) -> Run:
        with self._lock:
            if self._run is None:
                if self.plan.spec.facts.is_hip:
                    raise UnsupportedError(f"{NOT_RUN}; build the operator for device cpu, or a CUDA GPU")
                load = _load_cuda if self.plan.spec.facts.backend == "cuda" else _load_host
                self._run = load(self.plan, self.binary, self.source.entry)
            return self._run


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


def _load_cuda(plan: AnyPlan, binary: Binary, entry: str) -> Run:
    return _CudaRun(plan, load_entry(binary, entry))


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
        status = allow_shared(self._kernel, shared, device)
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
