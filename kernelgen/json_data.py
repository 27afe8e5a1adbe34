"""JSON that others may have written, or something has damaged: text enters, plain data leaves, or a ValueError.

Every file and line of JSON is read here. So a reader has one exception to expect, and what it does with the data later
cannot run out of stack, of float64's range, or of what UTF-8 can hold.
"""

from __future__ import annotations

import json
import re
from typing import Any

# What Equitune writes is nested seven deep.
MOST_DEPTH = 100
# Digits of an integer that 64 bits hold for certain.
SAFE_DIGITS = 18
_SURROGATES = re.compile("[\ud800-\udfff]")


def parse_json(text: str | bytes) -> Any:
    """The data of a text (bytes: UTF-8); ValueError for what is no JSON, or is nested deeper than ``MOST_DEPTH``.

    An integer that 64 bits may not hold becomes a float, infinite beyond float64's range as ``1e400`` is in any case.
    A surrogate without its other half becomes the replacement character.
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
    """The same with every text such as can be written and printed."""
    if isinstance(data, str):
        return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", data)
    if isinstance(data, dict):
        return {_writable(key): _writable(value) for key, value in data.items()}
    return [_writable(item) for item in data] if isinstance(data, list) else data
