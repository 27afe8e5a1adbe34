"""Generated source: the result of an emitter and the input of a compiler."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources

ENTRY = "equitune_kernel"


@dataclass(frozen=True)
class Source:
    """``text`` is complete and contains its hand-written headers; ``entry`` is its only ``extern "C"`` symbol."""

    text: str
    language: str
    entry: str = ENTRY


@functools.cache
def included(name: str) -> str:
    """The text of a hand-written header of ``include/``, which kernels contain."""
    return resources.files("kernelgen.emit").joinpath(f"include/{name}").read_text()
