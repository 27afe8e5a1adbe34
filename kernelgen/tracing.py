"""Tells whether torch traces, fakes, transforms or casts the tensors of a call, or just runs it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Number of active dispatch modes.
modes_at_work = torch._C._len_torch_dispatch_stack
_PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter))


def is_transforming(*tensors: Tensor | None) -> bool:
    """Whether a transform of ``torch.func`` or forward mode is active, or one of the tensors is batched.

    Batched tensors outside of transforms come from ``torch.autograd.grad(..., is_grads_batched=True)``.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    return any(tensor is not None and torch._C._functorch.is_legacy_batchedtensor(tensor) for tensor in tensors)


def is_tracing() -> bool:
    """Whether torch.compile or a dispatch mode (such as ``make_fx``) is active, so that values may be unknown."""
    return torch.compiler.is_compiling() or modes_at_work() > 0


def is_eager(*tensors: Tensor) -> bool:
    """No tracing, no dispatch mode, no function transform, no forward mode, no subclass."""
    if torch.compiler.is_compiling() or modes_at_work() or is_transforming():
        return False
    return _PLAIN_TENSORS.issuperset(map(type, tensors))


def is_autocast(tensor: Tensor) -> bool:
    """Whether ``torch.autocast`` is on for the tensor's type of device."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(tensor.device.type)


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """Switches autocast off for a tensor's device: what was converted to float32 is multiplied in float32."""
    return torch.autocast(tensor.device.type, enabled=False) if is_autocast(tensor) else nullcontext()


def runs_eagerly(*tensors: Tensor) -> bool:
    """Whether torch neither traces nor transforms a call with these tensors, so that it may write in place."""
    return is_eager(*tensors) and not any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))
