"""What differs between versions of e3nn and torch; and whether torch traces a call or just runs it.

All files of this project take what they need of e3nn from here. It loads when something of it is first used: with it
come ``torch._dynamo`` and symbolic algebra, for seconds.

e3nn 0.4 reads a file of constants with ``torch.load`` when it is imported. Since torch 2.6 that function refuses the
``slice`` objects in this file, unless they are declared safe. ``mace`` turns the check off for the whole process. Here
these objects alone are declared safe, and only during the import. So e3nn 0.4 loads at once: a later import by others
would fail.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from e3nn import o3
    from e3nn.nn import FullyConnectedNet, Gate

__all__ = ["FullyConnectedNet", "Gate", "o3", "wigner_3j"]


def _load(module: str) -> Any:
    # Torch before 2.5 has no such function, and before 2.6 it checks nothing.
    allowing = getattr(torch.serialization, "safe_globals", lambda _: nullcontext())
    with allowing([slice]):
        return importlib.import_module(module)


class _Later:
    """A module that loads when something of it is used."""

    def __init__(self, module: str) -> None:
        self._name, self._module = module, None

    def __getattr__(self, name: str) -> Any:
        if self._module is None:
            self._module = _load(self._name)
        return getattr(self._module, name)


if not TYPE_CHECKING:
    o3 = _Later("e3nn.o3")
    if version("e3nn").startswith("0.4."):
        _load("e3nn.o3")


def __getattr__(name: str) -> Any:
    if name not in ("FullyConnectedNet", "Gate"):
        raise AttributeError(f"module 'kernelgen.compat' has no attribute {name!r}")
    return getattr(_load("e3nn.nn"), name)


def wigner_3j(l1: int, l2: int, l3: int) -> torch.Tensor:
    """e3nn's coupling [2 l1 + 1, 2 l2 + 1, 2 l3 + 1] in float64.

    Computed outside of ``torch.func``: e3nn keeps it, and the tensors of a transform are of no use after it.
    """
    with torch._C._DisableFuncTorch():
        return o3.wigner_3j(l1, l2, l3, dtype=torch.float64)


# What older versions of torch lack, in one place: pyproject.toml names the oldest that is supported.

# Whether torch.compile traces ``vmap`` of an op that has a gradient formula: 2.11 does not. Else vmap runs eagerly.
COMPILES_VMAP = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


# ``torch.compiler.disable`` and ``assume_constant_result`` load ``torch._dynamo``, half as long as torch itself, when a
# module is imported. These two say the same to it when it traces.


def run_eagerly(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``torch.compiler.disable``, with the reason that a graph break shows since torch 2.8."""

    def disabled(function: Callable[..., Any]) -> Callable[..., Any]:
        later: Any = torch._disable_dynamo(function)  # type: ignore[attr-defined]
        later._torchdynamo_disable, later._torchdynamo_disable_msg = True, reason
        return later

    return disabled


def constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.assume_constant_result``."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def register_vmap(name: str, rule: Callable[..., Any], library: torch.library.Library) -> None:
    """``torch.library.register_vmap``, since torch 2.5. Only compiled code needs it: eager calls have a function."""
    register = getattr(torch.library, "register_vmap", None)
    if register is not None:
        register(name, rule, lib=library)


# Tells whether torch traces, fakes, transforms or casts the tensors of a call, or just runs it.

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


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Switches autocast off for a tensor's device: what was converted to float32 is multiplied in float32."""
    return torch.autocast(tensor.device.type, enabled=False) if is_autocast(tensor) else nullcontext()


def runs_eagerly(*tensors: Tensor) -> bool:
    """Whether torch neither traces nor transforms a call with these tensors, so that it may write in place."""
    return is_eager(*tensors) and not any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))
