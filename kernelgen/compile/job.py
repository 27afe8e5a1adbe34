"""The common interface of the compilers: a :class:`Job` is one compiler with its flags."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelgen.emit.source import Source

_LOG_LIMIT = 4000


@dataclass(frozen=True)
class Job:
    """One compiler, its flags and its target: all of a cache key except the source.

    compile: returns the binary of a source and its resource usage. check: raises ToolMissingError unless the binary can
    be used and has the function of that name.
    """

    identity: str
    flags: tuple[str, ...]
    target: str
    binary_name: str
    source_name: str
    compile: Callable[[Source], tuple[bytes, dict[str, Any]]]
    check: Callable[[Path, str], None]


def debug_level() -> int:
    """The level in ``EQUITUNE_DEBUG``, see ``kernelgen.compile.compiler``."""
    text = os.environ.get("EQUITUNE_DEBUG", "")
    return int(text) if text.isdecimal() else int(bool(text))


def shortened(log: str) -> str:
    """The beginning of a compiler's log."""
    return log if len(log) <= _LOG_LIMIT else log[:_LOG_LIMIT] + f"\n... {len(log) - _LOG_LIMIT} more characters"
