"""Reads untrusted or damaged JSON: returns plain data or raises ValueError. And writes files whole.

Every file and line of JSON is read here, so callers expect one exception. The data cannot overflow the stack or 64-bit
integers, and UTF-8 can encode it. Its texts have no control characters but line ends and tabs: a stranger's file is
also shown on terminals, which would obey them.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

# Equitune itself writes at most seven levels.
MOST_DEPTH = 100
# Any integer of at most this many digits fits into 64 bits.
SAFE_DIGITS = 18
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# Where a text of JSON can have such a character, as it is or escaped.
_MAY_BE_UNFIT = re.compile(r"\\[ubfr]|[\x7f-\x9f\ud800-\udfff]")


def parse_json(text: str | bytes) -> Any:
    """The data of a text (bytes: UTF-8); ValueError for invalid JSON or nesting deeper than ``MOST_DEPTH``.

    An integer with more than ``SAFE_DIGITS`` digits becomes a float; beyond float64's range it is infinite, like
    ``1e400``. A lone surrogate and a control character become the replacement character.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        data = json.loads(text, parse_int=lambda digits: (int if len(digits) <= SAFE_DIGITS else float)(digits))
    except RecursionError:
        raise _too_deep() from None
    level, depth = [data], 0
    while level:
        if depth == MOST_DEPTH:
            raise _too_deep()
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level, depth = [item for items in inner for item in items if isinstance(item, dict | list)], depth + 1
    return with_fit_texts(data) if _MAY_BE_UNFIT.search(text) else data


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that nobody ever sees in part; OSError if that fails."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(data)
    fresh.replace(path)


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MOST_DEPTH} deep")


def with_fit_texts(data: Any) -> Any:
    """The same data with lone surrogates and control characters replaced: every text can be written and shown."""
    if isinstance(data, str):
        return _UNFIT.sub("\N{REPLACEMENT CHARACTER}", data)
    if isinstance(data, dict):
        return {with_fit_texts(key): with_fit_texts(value) for key, value in data.items()}
    return [with_fit_texts(item) for item in data] if isinstance(data, list) else data


def processor_lines() -> list[str]:
    """What Linux tells of the processor, ``flags : fpu vme ...`` and the like; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
