"""Generated source: the result of an emitter and the input of a compiler; and what an emitter is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

ENTRY = "equitune_kernel"


@dataclass(frozen=True)
class Source:
    """``text`` is complete and contains its hand-written headers; ``entry`` is its only ``extern "C"`` symbol."""

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
    """The text of a hand-written header of ``include/``, which kernels contain."""
    return resources.files("kernelgen.emit").joinpath(f"include/{name}").read_text()
