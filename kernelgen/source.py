"""Generated source as a value: what an emitter returns and a compiler takes."""

from __future__ import annotations

from dataclasses import dataclass

ENTRY = "equitune_kernel"


@dataclass(frozen=True)
class Source:
    """``text`` is complete (the hand-written header is included in it); ``entry`` is its one ``extern "C"`` symbol."""

    text: str
    language: str
    entry: str = ENTRY
