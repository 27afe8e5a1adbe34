"""Generated source: the result of an emitter and the input of a compiler; and what an emitter is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from kernelgen.emit.launch import LaunchRule

ENTRY = "equitune_kernel"


@dataclass(frozen=True)
class Source:
    """``text`` is complete and contains its hand-written headers; ``entry`` is its only ``extern "C"`` symbol.

    arch_suffix: ``a`` for CUDA text with instructions that one architecture alone has: its code runs on no other.
    """

    text: str
    language: str
    entry: str = ENTRY
    arch_suffix: str = ""


class Emitter(NamedTuple):
    """source: of a plan. launch: how a plan's CUDA kernel is launched."""

    source: Callable[[Any], Source]
    launch: Callable[[Any], LaunchRule]


@functools.cache
def included(name: str) -> str:
    """The text of a hand-written header of ``include/``, which kernels contain."""
    return resources.files("kernelgen.emit").joinpath(f"include/{name}").read_text()
