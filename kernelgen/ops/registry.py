"""Operators by their text, so that a traced, exported or pickled graph finds its operator or rebuilds it.

An operator's text is JSON that determines it. Each operator module registers with :func:`rebuilds` how to rebuild its
kind from a text; ``import kernelgen`` imports them all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch


class Registered(Protocol):
    """What the registry needs of an operator."""

    text: str
    device: torch.device


Kind = TypeVar("Kind", bound=Registered)

# Every operator of this process.
OPERATORS: dict[str, Any] = {}
_REBUILD: dict[str, Callable[[str], Any]] = {}


def register(operator: Kind) -> Kind:
    """The first operator with the same text, if it is for the same device; else this one."""
    known = OPERATORS.setdefault(operator.text, operator)
    return known if known.device == operator.device else operator


def rebuilds(kind: str, function: Callable[[str], Any]) -> None:
    """Register ``function``, which rebuilds operators of a kind from their text."""
    _REBUILD[kind] = function


def resolve(text: str) -> Any:
    """The operator of a text, rebuilt if this process does not have it."""
    found = OPERATORS.get(text)
    if found is None:
        found = OPERATORS[text] = _REBUILD[_kind(json.loads(text))](text)
    return found


def _kind(data: dict[str, Any]) -> str:
    """The ``kind`` in a text. The two oldest kinds name none: products have an operation, harmonics do not."""
    return data.get("kind", "product" if "operation" in data else "harmonics")
