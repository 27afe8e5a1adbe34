"""Table cells for knobs and resources."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from autotune.report.html.markup import Cell
from autotune.text import MISSING


def union(mappings: Iterable[Any]) -> list[str]:
    """Names of all plain values, in order of first appearance."""
    names: dict[str, None] = {}
    for mapping in mappings:
        if isinstance(mapping, dict):
            names |= {name: None for name, value in mapping.items() if not isinstance(value, dict | list)}
    return list(names)


def value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return MISSING if math.isnan(value) else f"{value:,g}"
    return MISSING if value is None else str(value)


def knob_cell(chosen: Any, default: Any, known: bool) -> Cell:
    """A knob's value, marked if it differs from a ``known`` default."""
    changed = known and chosen != default
    note = f"default {value_text(default)}" if changed else None
    return Cell(value_text(chosen), None, note, "changed" if changed else "")
