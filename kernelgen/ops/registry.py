"""Operators by their text, so that a traced, exported or pickled graph finds its own, or has it built again.

An operator's text is JSON that says all of it. Each module of operators tells with :func:`rebuilds` how its kind is
made from a text, and ``import kernelgen`` imports them all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch


class Registered(Protocol):
    """What an operator is known by."""

    text: str
    device: torch.device


Kind = TypeVar("Kind", bound=Registered)

# Every operator of this process.
OPERATORS: dict[str, Any] = {}
_REBUILD: dict[str, Callable[[str], Any]] = {}


def register(operator: Kind) -> Kind:
    """The operator of the same text that was made first, if it is for the same device; else this one."""
    known = OPERATORS.setdefault(operator.text, operator)
    return known if known.device == operator.device else operator


def rebuilds(kind: str, function: Callable[[str], Any]) -> None:
    """Operators of a kind are made from their text by ``function``."""
    _REBUILD[kind] = function


def resolve(text: str) -> Any:
    """The operator of a text, rebuilt if this process has not made it."""
    found = OPERATORS.get(text)
    if found is None:
        found = OPERATORS[text] = _REBUILD[_kind(json.loads(text))](text)
    return found


def _kind(data: dict[str, Any]) -> str:
    """The ``kind`` that a text names; the two oldest kinds do not: products have an operation, harmonics have none."""
    return data.get("kind", "product" if "operation" in data else "harmonics")
