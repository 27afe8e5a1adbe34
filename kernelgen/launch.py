"""A compiled kernel as something to call: a spec enters, a :class:`Kernel` leaves that runs on torch tensors.

Everything that a call needs (entry point, geometry, stream wrapper) is looked up once and kept, since small graphs
are decided by the host's time per call.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelgen.cache import Binary
from kernelgen.compile import compile_source
from kernelgen.emit import emit
from kernelgen.emit_cuda import launch_geometry
from kernelgen.errors import LaunchError, ToolMissingError
from kernelgen.plan import BUFFERS, Plan, Spec, make_plan
from kernelgen.schedule import HostSchedule
from kernelgen.source import Source

# Dynamic shared memory above this has to be asked for, kernel by kernel.
_SHARED_WITHOUT_ASKING = 48 * 1024
# Weights (edges x paths x channels) that are worth waking another thread for: about 10 us of work.
_WEIGHTS_PER_THREAD = 8192

Pointers = Sequence[Tensor | None]


class Kernel:
    """One kernel: its plan, its source and what it takes; loaded at the first launch, on any thread."""

    def __init__(self, plan: Plan, source: Source, binary: Binary) -> None:
        self.plan = plan
        self.source = source
        self.binary = binary
        self.resources = binary.resources
        self._lock = threading.Lock()
        self._run: Callable[[Pointers, int, int, int], None] | None = None

    def launch(self, buffers: Mapping[str, Tensor], num_edges: int, num_in: int, num_out: int) -> None:
        """Run on ``buffers``, keyed by the names of ``plan.BUFFERS``; those left out are null."""
        self.run([buffers.get(name) for name in BUFFERS], num_edges, num_in, num_out)

    def run(self, tensors: Pointers, num_edges: int, num_in: int, num_out: int) -> None:
        """Run on tensors in the order of ``plan.BUFFERS``: contiguous, 16-byte aligned, on the device compiled for."""
        (self._run or self._load())(tensors, num_edges, num_in, num_out)

    def _load(self) -> Callable[[Pointers, int, int, int], None]:
        with self._lock:
            if self._run is None:
                load = _load_cuda if self.plan.spec.facts.backend == "cuda" else _load_host
                self._run = load(self.plan, self.binary, self.source.entry)
            return self._run


@functools.lru_cache(maxsize=4096)
def load_kernel(spec: Spec) -> Kernel:
    """The kernel of a spec: planned, emitted and compiled once a process."""
    plan = make_plan(spec)
    source = emit(plan)
    return Kernel(plan, source, compile_source(source, spec.facts))


def _load_host(plan: Plan, binary: Binary, entry: str) -> Callable[[Pointers, int, int, int], None]:
    try:
        function = getattr(ctypes.CDLL(str(binary.path)), entry)
    except (OSError, AttributeError) as error:
        raise LaunchError(f"{binary.path} cannot be loaded: {error}; remove it to have it compiled again") from error
    function.argtypes = [ctypes.c_void_p] * len(BUFFERS) + [ctypes.c_longlong] * 3 + [ctypes.c_int]
    function.restype = None
    schedule = plan.spec.schedule
    assert isinstance(schedule, HostSchedule)
    fixed_threads = schedule.threads
    edges_per_thread = max(1, _WEIGHTS_PER_THREAD // max(1, plan.spec.problem.weight_numel))

    def run(tensors: Pointers, num_edges: int, num_in: int, num_out: int) -> None:
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        threads = fixed_threads or min(torch.get_num_threads(), 1 + num_edges // edges_per_thread)
        function(*pointers, num_edges, num_in, num_out, threads)

    return run


def _load_cuda(plan: Plan, binary: Binary, entry: str) -> Callable[[Pointers, int, int, int], None]:
    try:
        from cuda.core import ObjectCode
    except ImportError as error:
        raise ToolMissingError(f"cuda.core cannot be imported ({error}); pip install 'equitune[gpu]'") from error
    try:
        kernel = ObjectCode.from_cubin(binary.path.read_bytes()).get_kernel(entry)
    except Exception as error:  # cuda.core raises its own private types
        raise LaunchError(f"{binary.path} cannot be loaded: {error}") from error
    return _CudaRun(plan, kernel)


class _CudaRun:
    """Launches one CUDA kernel on torch's current stream of the tensors' device."""

    def __init__(self, plan: Plan, kernel: Any) -> None:
        from cuda.core import launch

        self._plan = plan
        self._kernel = kernel
        self._launch = launch
        self._configs: dict[tuple[int, int], Any] = {}
        self._prepared: dict[int, int] = {}

    def __call__(self, tensors: Pointers, num_edges: int, num_in: int, num_out: int) -> None:
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        device = next(tensor for tensor in tensors if tensor is not None).get_device()
        config = self._configs.get((num_edges, num_out)) or self._configure(num_edges, num_out)
        if torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                self._start(device, config, pointers, num_edges, num_in, num_out)
        else:
            self._start(device, config, pointers, num_edges, num_in, num_out)

    def _start(self, device: int, config: Any, pointers: list[int], *sizes: int) -> None:
        if self._prepared.get(device, 0) < config.shmem_size:
            self._allow_shared(device, config.shmem_size)
        stream = _stream(torch._C._cuda_getCurrentRawStream(device))
        try:
            # Python integers reach the kernel as 64-bit values: pointers and sizes alike.
            self._launch(stream, config, self._kernel, *pointers, *sizes)
        except Exception as error:
            raise LaunchError(
                f"launch of {self._plan.spec.direction.text} failed on cuda:{device} with grid {config.grid}, "
                f"block {config.block}, {config.shmem_size} bytes of shared memory: {error}"
            ) from error

    def _configure(self, num_edges: int, num_out: int) -> Any:
        from cuda.core import LaunchConfig

        grid, block, shared = launch_geometry(self._plan, num_edges, num_out)
        if len(self._configs) > 256:  # graphs of ever-changing size would grow it for good
            self._configs.clear()
        config = LaunchConfig(grid=grid, block=block, shmem_size=shared)
        self._configs[(num_edges, num_out)] = config
        return config

    def _allow_shared(self, device: int, shared: int) -> None:
        if shared > _SHARED_WITHOUT_ASKING:
            from cuda.bindings import driver

            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(attribute, shared, self._kernel.handle, driver.CUdevice(device))
            if int(status) != 0:
                raise LaunchError(f"{shared} bytes of shared memory a block: refused on cuda:{device}, {status.name}")
        self._prepared[device] = shared


@functools.lru_cache(maxsize=1024)
def _stream(handle: int) -> Any:
    """cuda.core's wrapper of a torch stream; torch's default stream (null) is CUDA's legacy default stream."""
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    return Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM
