"""e3nn as a peer: its ``TensorProduct`` run eagerly, and the same compiled by ``torch.compile``."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from autotune.baselines.passes import Call
from autotune.baselines.peer import Adapter, Product, Task
from autotune.errors import PeerError
from autotune.workload import DTYPES, relayout

# torch.compile of one product takes from seconds to minutes; beyond this it is given up.
COMPILE_LIMIT_S = 120


def convolution(task: Task) -> Call:
    """Gather, e3nn's product and sum by destination, or the product alone, in e3nn's layout."""
    problem = task.workload.problem
    product = problem.reference().to(device=task.device, dtype=DTYPES[task.workload.dtype])
    if not task.is_conv:
        return product
    (sender, receiver), nodes = task.edges, task.tensors.num_nodes

    def conv(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        messages = product(x.index_select(0, sender), y, w)
        return messages.new_zeros(nodes, messages.shape[1]).index_add(0, receiver, messages)

    return conv


def eager(task: Task) -> Product:
    return Product(convolution(task))


def compiled(task: Task) -> Product:
    """Compiles both passes here, under a time limit, so that no timed call compiles."""
    from torch._functorch import config

    call = torch.compile(convolution(task), dynamic=False)
    t = task.tensors
    x = relayout(t.x, task.workload.problem.irreps_in1, task.workload.layout, "mul_ir")
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (x, t.y, t.w)]
    # Donated buffers forbid a second backward pass on a kept graph, which is what is timed. torch looks at this when it
    # compiles and again in every backward call, so it stays off in this process.
    config.donated_buffer = False
    with time_limit(COMPILE_LIMIT_S, "torch.compile"):
        out = call(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        with torch.no_grad():
            call(*inputs)
    return Product(call)


class _TimeIsUp(BaseException):
    """Not an Exception, so that the compiler's own handlers let it pass."""


@contextmanager
def time_limit(seconds: int, what: str) -> Iterator[None]:
    """PeerError after ``seconds``. Only a process's main thread can be interrupted; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    except _TimeIsUp:
        raise PeerError(f"{what} took longer than {seconds} s") from None
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
    Adapter("e3nn", ("cpu", "cuda"), lambda device: None, eager, module="e3nn"),
    Adapter("e3nn-compiled", ("cpu", "cuda"), no_compiler, compiled, module="e3nn"),
)
