"""Section on memory: the largest diamond crystal that each way to run a model has room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.bench.largest import atoms_of, largest_other, why_ended
from autotune.report.data.model_rows import MIB, ModelRow
from autotune.report.data.suite_rows import mapping, number
from autotune.report.html.markup import Cell, Column, Markup, join, table, tag
from autotune.report.sections.first_screen.reproduce import commands
from autotune.text import MISSING, STOCK, TUNED, binary_text, contender_name, count, ratio_text, time_text

HINT = "Energies, forces and stress of one step, each path alone on the device. The crystal was doubled until it failed, so up to twice as many atoms may fit."  # noqa: E501


def largest(rows: Sequence[ModelRow]) -> Markup:
    """The whole section; empty without rows."""
    if not rows:
        return Markup("")
    columns = [Column("Model"), Column("Path"), Column("Atoms", True, "over the largest other path's")]
    columns += [Column("Edges", True), Column("Peak memory", True), Column("A step", True), Column("Ended by")]
    body = [_line(row, name) for row in rows for name in _by_atoms(row)]
    told = [commands(row.text("command")) for row in rows if row.text("command")]
    return join((tag("p", HINT, class_="hint"), table("Largest diamond crystals", columns, body), *told))


def _by_atoms(row: ModelRow) -> list[str]:
    return sorted(row.contenders, key=lambda name: (-atoms_of(row.contenders[name]), name))


def _line(row: ModelRow, name: str) -> list[Cell]:
    cell = row.contenders[name]
    shown = {TUNED: "Equitune", STOCK: "stock"}.get(name, contender_name(name))
    found: dict[str, Any] = mapping(cell.get("largest"))
    memory, wall_us = MIB * number(found.get("peak_mib")), 1e3 * number(found.get("wall_ms"))
    return [
        Cell(row.text("model"), None, row.text("dtype")),
        Cell(shown),
        _atoms(atoms_of(cell), largest_other(row.contenders)),
        Cell(count(number(found.get("edges")))),
        Cell(binary_text(memory)),
        Cell(time_text(wall_us)),
        Cell(why_ended(cell), kind="wrap"),
    ]


def _atoms(atoms: int, other: int) -> Cell:
    if not atoms:
        return Cell(MISSING)
    return Cell(count(atoms), None, ratio_text(atoms / other) if other else None)
