"""What older versions of torch lack, in one place: pyproject.toml names the oldest that is supported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


def run_eagerly(reason: str) -> Callable[[Callable], Callable]:
    """``torch.compiler.disable`` with the reason that a graph break shows; before torch 2.8 it takes none."""
    takes_reason = "reason" in inspect.signature(torch.compiler.disable).parameters
    options: dict[str, Any] = {"reason": reason} if takes_reason else {}
    return lambda function: torch.compiler.disable(function, **options)


def register_vmap(name: str, rule: Callable, library: torch.library.Library) -> None:
    """``torch.library.register_vmap``, since torch 2.5. Only compiled code needs it: eager calls have a function."""
    register = getattr(torch.library, "register_vmap", None)
    if register is not None:
        register(name, rule, lib=library)
