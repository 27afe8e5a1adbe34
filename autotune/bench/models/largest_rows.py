"""Rows of the largest crystals: beside those of times in ``results/models/DEVICE.json``, as a pass of its own.

A cell is ``{"largest": {atoms, edges, wall_ms, peak_mib}, "ended": {atoms, why}}``: what fitted, and the first that did
not. Without ``largest`` it has the reason as ``error``. Without ``ended`` the run was interrupted. No figure is where
those of times are: contenders took different numbers of atoms, so their times must not be compared. The row's own
numbers of atoms and edges are the largest of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.text import MISSING, TUNED, contender_name, count, is_ours, ratio_text, time_text

PASS, STRUCTURE = "largest", "diamond"
Cell = Mapping[str, Any]


def is_largest(row: Mapping[str, Any]) -> bool:
    """Whether a stored row of models is one of these."""
    return row.get("pass") == PASS


def stopped(cell: Cell) -> bool:
    """Whether the doubling came to an end, or could not begin."""
    return "error" in cell or "ended" in cell


def finished(cell: Cell, most_atoms: int | None) -> bool:
    """Whether measuring again with this ceiling would say no more."""
    ended = cell.get("ended", {})
    below = "ceiling" in ended and (most_atoms is None or most_atoms >= ended["atoms"])
    return stopped(cell) and not below


def atoms_of(cell: Cell) -> int:
    """Atoms of the largest crystal that fitted; 0 if none did."""
    return int(cell.get("largest", {}).get("atoms", 0))


def largest_other(cells: Mapping[str, Cell]) -> int:
    """The most atoms that a contender without Equitune took; 0 if none took any."""
    return max((atoms_of(cell) for name, cell in cells.items() if not is_ours(name)), default=0)


def why_ended(cell: Cell) -> str:
    """``131,072 atoms: out of memory``, the reason for which nothing fitted, or that the run was interrupted."""
    ended = cell.get("ended")
    if ended:
        return f"{count(ended['atoms'])} atoms: {ended['why']}"
    return str(cell.get("error", "interrupted"))


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per model and contender, Equitune first."""
    heads = ("model", "dtype", "path", "atoms", "over largest other", "edges", "memory", "a step", "ended by")
    body = [heads, *(_line(row, name) for row in rows for name in row["contenders"])]
    widths = [max(len(cells[column]) for cells in body) for column in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in body]


def _line(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    cell = row["contenders"][name]
    head = (row["model"], row["dtype"], "Equitune" if name == TUNED else contender_name(name))
    if not atoms_of(cell):
        return (*head, *[MISSING] * 5, why_ended(cell))
    found, other = cell["largest"], largest_other(row["contenders"])
    ratio = ratio_text(found["atoms"] / other) if other else MISSING
    memory = f"{found['peak_mib'] / 1024:.2f} GiB" if "peak_mib" in found else MISSING
    return (
        *head,
        count(found["atoms"]),
        ratio,
        count(found["edges"]),
        memory,
        time_text(found["wall_ms"] * 1e3),
        why_ended(cell),
    )
