"""Generated source as a value: what an emitter returns and a compiler takes; and emitters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

ENTRY = "equitune_kernel"


@dataclass(frozen=True)
class Source:
    """``text`` is complete (the hand-written header is included in it); ``entry`` is its one ``extern "C"`` symbol."""

    text: str
    language: str
    entry: str = ENTRY


class Emitter(NamedTuple):
    """source: of a plan. geometry: of a plan's CUDA kernel and the numbers of edges, nodes read and nodes written,
    blocks, threads a block and dynamic shared memory in bytes.
    """

    source: Callable[[Any], Source]
    geometry: Callable[[Any, int, int, int], tuple[int, int, int]]


@functools.cache
def included(name: str) -> str:
    """A hand-written header of ``include/``, which kernels hold in their text."""
    return resources.files("kernelgen.emit").joinpath(f"include/{name}").read_text()
