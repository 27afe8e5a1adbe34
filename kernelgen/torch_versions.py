"""What older versions of torch lack, in one place: pyproject.toml names the oldest that is supported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

# Whether torch.compile traces ``vmap`` of an op that has a gradient formula: 2.11 does not. Else vmap runs eagerly.
COMPILES_VMAP = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
# Whether a graph break shows why: since torch 2.8.
SHOWS_REASONS = "reason" in inspect.signature(torch.compiler.disable).parameters


def run_eagerly(reason: str) -> Callable[[Callable], Callable]:
    """``torch.compiler.disable`` with the reason that a graph break shows, where it takes one."""
    options: dict[str, Any] = {"reason": reason} if SHOWS_REASONS else {}
    return lambda function: torch.compiler.disable(function, **options)


def register_vmap(name: str, rule: Callable, library: torch.library.Library) -> None:
    """``torch.library.register_vmap``, since torch 2.5. Only compiled code needs it: eager calls have a function."""
    register = getattr(torch.library, "register_vmap", None)
    if register is not None:
        register(name, rule, lib=library)
