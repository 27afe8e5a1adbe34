"""Reads untrusted or damaged JSON: returns plain data or raises ValueError.

Every file and line of JSON is read here, so callers expect one exception. The data cannot overflow the stack or 64-bit
integers, and UTF-8 can encode it.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Equitune itself writes at most seven levels.
MOST_DEPTH = 100
# Any integer of at most this many digits fits into 64 bits.
SAFE_DIGITS = 18
_SURROGATES = re.compile("[\ud800-\udfff]")


def parse_json(text: str | bytes) -> Any:
    """The data of a text (bytes: UTF-8); ValueError for invalid JSON or nesting deeper than ``MOST_DEPTH``.

    An integer with more than ``SAFE_DIGITS`` digits becomes a float; beyond float64's range it is infinite, like
    ``1e400``. A lone surrogate becomes the replacement character.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        data = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(data)
    return _writable(data) if "\\u" in text or _SURROGATES.search(text) else data


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= SAFE_DIGITS else float(digits)


def _check_depth(data: Any) -> None:
    level, depth = [data], 0
    while level:
        if depth == MOST_DEPTH:
            raise _too_deep()
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level, depth = [item for items in inner for item in items if isinstance(item, dict | list)], depth + 1


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MOST_DEPTH} deep")


def _writable(data: Any) -> Any:
    """The same data with lone surrogates replaced, so that every text can be encoded."""
    if isinstance(data, str):
        return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", data)
    if isinstance(data, dict):
        return {_writable(key): _writable(value) for key, value in data.items()}
    return [_writable(item) for item in data] if isinstance(data, list) else data
