"""e3nn as a peer: its ``TensorProduct`` run eagerly and compiled by ``torch.compile``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch

from autotune.compare.peers.peer import Adapter, Product, Task
from autotune.errors import PeerError
from autotune.measure import worker as processes
from autotune.measure.kinds import Call
from autotune.measure.references import e3nn_product
from autotune.paths import installed_version
from autotune.workload.workload import DTYPES, relayout
from kernelgen.compile.compiler import cache_dir, digest
from kernelgen.device import device_facts
from kernelgen.files import parse_json
from kernelgen.problem.product import TensorProductProblem

# torch.compile of one product takes seconds to minutes; it is given up after this time.
COMPILE_LIMIT_S = 120
OUT_OF_TIME = f"torch.compile took longer than {COMPILE_LIMIT_S} s"
# The first calls only fill torch's allocator and compile e3nn's own code; nothing tunes itself.
WARM_UP_CALLS = 3
GraphCall = Callable[..., torch.Tensor]


def convolution(problem: TensorProductProblem, dtype: torch.dtype, device: torch.device) -> GraphCall:
    """``(x, y, w, sender, receiver, nodes)``: gather, e3nn's product and sum by receiver, in e3nn's layout.

    Without a sender: the product alone.
    """
    product = e3nn_product(problem, dtype, device)

    def conv(
        x: torch.Tensor,
        y: torch.Tensor,
        w: torch.Tensor,
        sender: torch.Tensor | None = None,
        receiver: torch.Tensor | None = None,
        nodes: int = 0,
    ) -> torch.Tensor:
        if sender is None or receiver is None:
            return product(x, y, w)
        messages = product(x.index_select(0, sender), y, w)
        return messages.new_zeros(nodes, messages.shape[1]).index_add(0, receiver, messages)

    return conv


def on_graph(call: GraphCall, task: Task) -> Call:
    if not task.is_conv:
        return call
    (sender, receiver), nodes = task.edges, task.tensors.num_nodes
    return lambda x, y, w: call(x, y, w, sender, receiver, nodes)


def eager(task: Task) -> Product:
    return Product(on_graph(convolution(*_kind(task)), task))


def compiled(task: Task) -> Product:
    call = on_graph(compiled_convolution(*_kind(task), task.workload.operation), task)
    t = task.tensors
    x = relayout(t.x, task.workload.product.irreps_in1, task.workload.layout, "mul_ir")
    return compiled_product(call, x, t.y, t.w)


def compiled_product(call: Call, *tensors: torch.Tensor) -> Product:
    """A compiled call. Both passes run here once, under a time limit, so that no timed call compiles."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    with time_limit(COMPILE_LIMIT_S, OUT_OF_TIME):
        out = call(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        with torch.no_grad():
            call(*inputs)
    return Product(call, no_second=no_second_derivatives())


@functools.cache
def no_second_derivatives() -> str:
    """Why compiled code cannot be differentiated twice, in torch's words; empty if it can.

    Tested on three multiplications, because e3nn's products take up to a minute to fail, for every graph again.
    """
    x = torch.ones(1, requires_grad=True)
    cube = torch.compile(lambda t: t * t * t, backend="aot_eager")
    try:
        (first,) = torch.autograd.grad(cube(x), x, create_graph=True)
        torch.autograd.grad(first, x)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@functools.lru_cache(maxsize=1)
def compiled_convolution(
    problem: TensorProductProblem, dtype: torch.dtype, device: torch.device, operation: str
) -> GraphCall:
    """Compile with dynamic sizes, so that all graphs of a problem share one compilation."""
    return compile_open(convolution(problem, dtype, device))


def compile_open(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compile with dynamic sizes, for passes that keep autograd graphs."""
    import torch._dynamo
    from torch._functorch import config

    keep_compiled()
    # To torch.compile every problem is a variant of one function, and it silently gives up after a few variants.
    torch._dynamo.reset()
    # Donated buffers forbid a second backward pass on a kept graph, and that pass is timed. torch reads this option
    # when it compiles and in every backward call, so it stays off in this process.
    config.donated_buffer = False
    return torch.compile(call, dynamic=True)


def _kind(task: Task) -> tuple[TensorProductProblem, torch.dtype, torch.device]:
    return task.workload.product, DTYPES[task.workload.dtype], task.device


class _TimeIsUp(BaseException):
    """Not an Exception, so that the compiler's handlers do not catch it."""


@contextmanager
def time_limit(seconds: int, reason: str) -> Iterator[None]:
    """Raise PeerError with ``reason`` after ``seconds``, and end processes started meanwhile.

    Only the main thread can be interrupted; other threads have no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise _TimeIsUp

    others = set(processes.descendants(os.getpid()))
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    except _TimeIsUp:
        # Compilers that still run would disturb the next measurement.
        processes.end([pid for pid in processes.descendants(os.getpid()) if pid not in others])
        with contextlib.suppress(ImportError, AttributeError):
            from torch._inductor import async_compile

            # Makes torch forget the ended workers: the next compilation starts new ones.
            async_compile.shutdown_compile_workers()
        raise PeerError(reason) from None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def no_compiler(device: torch.device) -> str | None:
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return "torch.compile needs a C++ compiler on the CPU; install g++"
    if device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return "torch.compile needs triton on a GPU; install triton"
    return None


ADAPTERS = (
    Adapter("e3nn", ("cpu", "cuda"), lambda device: None, eager, WARM_UP_CALLS, module="e3nn"),
    Adapter(
        "e3nn-compiled", ("cpu", "cuda"), no_compiler, compiled, WARM_UP_CALLS, module="e3nn", build_s=COMPILE_LIMIT_S
    ),
)


# What ``torch.compile`` made stays on the disk beside our kernels, with notes of the products that need no more work.
#
# A process that compiles one of e3nn's products again takes its code from there: it traces (seconds) and compiles
# nothing. A note says that a product's code is there, or that torch.compile ran into its time limit, so that a command
# that is started again neither waits for it nor tries again. Notes lie in torch's own cache and vanish with it.

# What torch.compile's code depends on.
COMPILERS = ("torch", "triton", "e3nn", "cuequivariance-torch")
FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled() -> Path:
    """Have torch keep its code beside our kernels, unless the user says where; returns that folder.

    Triton's kernels lie in the same folder.
    """
    folder = cache_dir() / "torch"
    if os.environ.get(FOLDER) in (None, _torchs_own()):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.environ[FOLDER] = str(folder)
    return Path(os.environ.get(FOLDER, folder))


def _torchs_own() -> str | None:
    """The folder that torch chooses, and writes to the environment when its compiler is first imported."""
    try:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    except ImportError:
        return None
    return str(default_cache_dir())


def take_note(product: tuple[str, ...], device: str, reason: str) -> None:
    """Note that what a product's peers compile is on the disk, or the reason why it will never be."""
    path = _path(product, device)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.stem}.{os.getpid()}")
        fresh.write_text(json.dumps({"product": product, "reason": reason}), encoding="utf-8")
        fresh.replace(path)


def noted(product: tuple[str, ...], device: str) -> str | None:
    """The reason that a note gives, empty for code on the disk; None without a note that can be read."""
    try:
        reason = parse_json(_path(product, device).read_bytes())["reason"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return reason if isinstance(reason, str) else None


def _path(product: tuple[str, ...], device: str) -> Path:
    installed = ((name, installed_version(name)) for name in COMPILERS)
    versions = [platform.python_version(), *(f"{name} {version}" for name, version in installed if version)]
    return keep_compiled() / "equitune-notes" / f"{digest(*product, device_facts(device).slug, *versions)}.json"
