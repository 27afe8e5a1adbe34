"""Generated source as a value: what an emitter returns and a compiler takes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources

ENTRY = "equitune_kernel"


@dataclass(frozen=True)
class Source:
    """``text`` is complete (the hand-written header is included in it); ``entry`` is its one ``extern "C"`` symbol."""

    text: str
    language: str
    entry: str = ENTRY


@functools.cache
def included(name: str) -> str:
    """A hand-written header of ``include/``, which kernels hold in their text."""
    return resources.files("kernelgen.emit").joinpath(f"include/{name}").read_text()
