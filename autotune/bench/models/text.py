"""Model rows as a table: time a step, its ratio to Equitune's, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.bench.models.contenders import STOCK
from autotune.bench.models.kernel_groups import shares_text
from autotune.bench.models.rows import Row
from autotune.bench.rows import DEFAULT, OURS
from autotune.text import JOINT, is_ours, time_text


def row_lines(row: Row) -> list[str]:
    """A line for the row, then one for each contender."""
    size = f"{row['atoms']} atoms, {row['edges']} edges"
    weights = ", random weights" if row["weights"] == "random" else ""
    lines = [f"{row['model']} on {row['structure']} ({size}), {row['pass']}, {row['dtype']}{weights}"]
    cells = row["contenders"]
    width = max(len(name) for name in cells)
    for name, cell in cells.items():
        lines.append(f"  {name:{width}}  {_cell_text(cell, cells.get(OURS, {}))}")
        if name == OURS and cell.get("device_parts_ms"):
            lines.append(f"  {'':{width}}  device {cell['device_ms']:.3g} ms: {shares_text(cell['device_parts_ms'])}")
        if name == OURS and (held := cell.get("held_parts_mib")):
            lines.append(f"  {'':{width}}  kept for gradients {sum(held.values()):.3g} MiB: {shares_text(held)}")
    return lines


def _cell_text(cell: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    if "error" in cell:
        return f"- {cell['error']}"
    parts = [f"{time_text(cell['wall_ms'] * 1e3):>9}", f"{cell['us_per_atom']:9.2f} us/atom"]
    if "wall_ms" in ours and cell is not ours:
        parts.append(f"{cell['wall_ms'] / ours['wall_ms']:6.2f}x")
    else:
        parts.append(" " * 7)
    if "peak_mib" in cell:
        parts.append(f"{cell['peak_mib']:8.0f} MiB")
    errors = ", ".join(f"{name} {error:.0e}" for name, error in cell.get("errors", {}).items())
    return "  ".join([*parts, errors]).rstrip()


def best_other(row: Row) -> tuple[str, float] | None:
    """The fastest contender without Equitune, and its milliseconds."""
    times = {
        name: cell["wall_ms"] for name, cell in row["contenders"].items() if not is_ours(name) and "wall_ms" in cell
    }
    return min(times.items(), key=lambda item: (item[1], item[0])) if times else None


def table_lines(rows: Sequence[Row]) -> list[str]:
    """One line per row: Equitune's step, and how many times as long the fastest other path, stock and untuned take.

    Equitune inside cuEquivariance's conversion has a column where a row has it.
    """
    heads = ("model", "structure", "pass", "Equitune", "fastest other", "stock", "untuned", "memory", "stock's")
    body = [heads, *(_line(row) for row in rows)]
    if any(JOINT in row["contenders"] for row in rows):
        beside = ["with cuEquivariance", *(_joint(row["contenders"]) for row in rows)]
        body = [(*cells[:4], one, *cells[4:]) for cells, one in zip(body, beside, strict=True)]
    widths = [max(len(cells[column]) for cells in body) for column in range(len(body[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in body]


def _line(row: Row) -> tuple[str, ...]:
    cells = row["contenders"]
    ours, stock, default = (cells.get(name, {}) for name in (OURS, STOCK, DEFAULT))
    other = best_other(row)
    shown = "-" if "wall_ms" not in ours else time_text(ours["wall_ms"] * 1e3)
    beside = "-" if other is None else f"{_ratio(other[1], ours)} {other[0]}"
    ratios = [_ratio_of(cell, ours) for cell in (stock, default)]
    memory = [f"{cell['peak_mib'] / 1024:.2f} GiB" if "peak_mib" in cell else "-" for cell in (ours, stock)]
    return (row["model"], row["structure"], row["pass"], shown, beside, *ratios, *memory)


def _joint(cells: Mapping[str, Any]) -> str:
    return _ratio_of(cells.get(JOINT, {}), cells.get(OURS, {}))


def _ratio_of(cell: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    return _ratio(cell["wall_ms"], ours) if "wall_ms" in cell else "-"


def _ratio(wall_ms: float, ours: Mapping[str, Any]) -> str:
    return f"{wall_ms / ours['wall_ms']:.2f}x" if "wall_ms" in ours else f"{wall_ms:.3g} ms"
