"""Imports e3nn, of any supported version. All files of this project take what they need of it from here.

It loads when something of it is first used: with it come ``torch._dynamo`` and symbolic algebra, for seconds.

e3nn 0.4 reads a file of constants with ``torch.load`` when it is imported. Since torch 2.6 that function refuses the
``slice`` objects in this file, unless they are declared safe. ``mace`` turns the check off for the whole process. Here
these objects alone are declared safe, and only during the import. So e3nn 0.4 loads at once: a later import by others
would fail.
"""

from __future__ import annotations

import contextlib
import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from e3nn import o3
    from e3nn.nn import FullyConnectedNet, Gate

__all__ = ["FullyConnectedNet", "Gate", "o3", "wigner_3j"]


def _load(module: str) -> Any:
    import torch

    # Torch before 2.5 has no such function, and before 2.6 it checks nothing.
    allowing = getattr(torch.serialization, "safe_globals", lambda _: contextlib.nullcontext())
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
        raise AttributeError(f"module 'kernelgen.e3nn_import' has no attribute {name!r}")
    return getattr(_load("e3nn.nn"), name)


def wigner_3j(l1: int, l2: int, l3: int) -> torch.Tensor:
    """e3nn's coupling [2 l1 + 1, 2 l2 + 1, 2 l3 + 1] in float64.

    Computed outside of ``torch.func``: e3nn keeps it, and the tensors of a transform are of no use after it.
    """
    import torch

    with torch._C._DisableFuncTorch():
        return o3.wigner_3j(l1, l2, l3, dtype=torch.float64)
