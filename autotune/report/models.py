"""The sections about whole models: their rows, and the largest crystal that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autotune.bench.contenders import shares_text
from autotune.bench.largest import atoms_of, largest_other, why_ended
from autotune.report.head import commands
from autotune.report.markup import Cell, Column, Group, Markup, definitions, folded, grouped_table, join, table, tag
from autotune.report.rows import MIB, ModelRow, compared_with, mapping, number
from autotune.text import (
    CAPTURED,
    DEFAULT,
    JOINT,
    MISSING,
    STOCK,
    TUNED,
    binary_text,
    contender_name,
    count,
    error_text,
    floored_ratio,
    ratio_text,
    significant,
    time_text,
)

# Section on whole models: every row, with all its paths, errors and versions below it.

MODELS_HINT = "Wall time of a whole call, with the work of the host; the time of the device is below. Each path ran in a process of its own, with nothing beside it. Speed-up: {}'s time over Equitune's, rounded down."  # noqa: E501


def models(rows: Sequence[ModelRow]) -> Markup:
    """The whole section. Where nothing but stock ran, there is no column for the fastest other path."""
    others = any(row.best_other for row in rows)
    columns = [Column("Model", note="package"), Column("Structure", note="atoms, edges", choice=True)]
    columns += [Column("Pass", choice=True), Column("dtype", choice=True), Column("Equitune", True, "device time")]
    columns += [Column("Fastest other path", True)] if others else []
    columns += [Column("Speed-up", True, "over that path" if others else "over stock")]
    if captured := any(row.time_us(CAPTURED) > 0 for row in rows):
        columns.append(Column("Captured", True, "other path / captured"))
    if joint := any(JOINT in row.contenders for row in rows):
        columns.append(Column("With cuEquivariance", True, "Equitune's convolution in it"))
    columns += [Column("Stock", True, "stock / Equitune"), Column("Default", True, "default / Equitune")]
    columns += [Column("Peak memory", True, "fastest other path's" if others else "stock's")]
    columns += [Column("Time an atom", True)]
    kind = (others, captured, joint)
    groups = [Group(_cells(row, *kind), _details(row), "lost" if row.ratio < 1 else "") for row in rows]
    return join(
        (
            tag("p", MODELS_HINT.format(compared_with(rows)), class_="hint"),
            grouped_table("Every row of the models", columns, groups),
        )
    )


def _cells(row: ModelRow, others: bool, captured: bool, joint: bool) -> list[Cell]:
    """With cells for the fastest other path, captured steps, and Equitune inside cuEquivariance's conversion."""
    note = f"{count(row.atoms)} atoms, {count(row.edges)} edges"
    return [
        Cell(row.text("model"), row.text("model"), row.text("package")),
        Cell(row.text("structure"), None if math.isnan(row.atoms) else f"{row.atoms:09.0f}", note),
        Cell(row.which),
        Cell(row.text("dtype")),
        _time(row, TUNED, _known(row.device_us(TUNED), time_text(row.device_us(TUNED))), "best"),
        *([_fastest(row)] if others else []),
        _ratio(row),
        *([_captured(row)] if captured else []),
        *([_time(row, JOINT, _known(row.over(JOINT), ratio_text(row.over(JOINT))))] if joint else []),
        _time(row, STOCK, _known(row.over(STOCK), ratio_text(row.over(STOCK)))),
        _time(row, DEFAULT, _known(row.over(DEFAULT), ratio_text(row.over(DEFAULT)))),
        _memory(row),
        Cell(_per_atom(row, TUNED), _sort(row.per_atom_us(TUNED))),
    ]


def _captured(row: ModelRow) -> Cell:
    """A captured step, and how many times as fast it is as the fastest path without Equitune."""
    time_us = row.time_us(CAPTURED)
    if math.isnan(time_us):
        return Cell(MISSING)  # a training step
    ratio = row.time_us(row.fastest) / time_us
    return Cell(time_text(time_us), time_us, _known(ratio, floored_ratio(ratio)))


def _fastest(row: ModelRow) -> Cell:
    if row.fastest is None:
        return Cell(MISSING, None, "no other ran")
    return _time(row, row.fastest, contender_name(row.fastest))


def _known(value: float, text: str) -> str | None:
    return None if math.isnan(value) else text


def _sort(value: float) -> float | None:
    return None if math.isnan(value) else value


def _time(row: ModelRow, name: str, note: str | None = None, kind: str = "") -> Cell:
    if name not in row.contenders:
        return Cell(MISSING)
    if math.isnan(row.time_us(name)):
        return Cell("failed", None, None, "failed", row.reason(name))
    return Cell(time_text(row.time_us(name)), row.time_us(name), note, kind)


def _ratio(row: ModelRow) -> Cell:
    if math.isnan(row.ratio):
        return Cell(MISSING)
    return Cell(floored_ratio(row.ratio), row.ratio, None, "slow" if row.ratio < 1 else "")


def _memory(row: ModelRow) -> Cell:
    ours, theirs = row.memory(TUNED), row.memory(row.fastest)
    if math.isnan(ours):
        return Cell(MISSING)
    return Cell(binary_text(ours), ours, _known(theirs, binary_text(theirs)), "slow" if ours > theirs else "")


def _per_atom(row: ModelRow, name: str) -> str:
    value = row.per_atom_us(name)
    return MISSING if math.isnan(value) else f"{significant(value)}\N{NO-BREAK SPACE}µs"


def _details(row: ModelRow) -> Markup:
    """A closed ``details``: all paths, the software, the command."""
    what = f"{row.text('model')} on {row.text('structure')}, {row.which}"
    columns = [Column("Path"), Column("Wall time", True), Column("Ratio", True, "to Equitune's")]
    columns += [Column("Device time", True), Column("Launches", True), Column("Of the device's time")]
    columns += [Column("Time an atom", True)]
    held = any(row.held_parts(name) for name in row.contenders)
    columns += [Column("Peak memory", True)]
    columns += [Column("Kept for gradients", note="by the forward pass")] if held else []
    columns += [Column("First call", True), Column("Relative errors"), Column("Note")]
    body = [_contender(row, name, held) for name in row.contenders]
    software = row.record.get("software")
    versions = sorted((str(name), str(version)) for name, version in software.items()) if software else []
    parts = [table(f"Paths: {what}", columns, body)]
    if row.text("command"):
        parts.append(commands(row.text("command")))
    if versions:
        parts.append(tag("div", definitions(versions), class_="facts"))
    summary = tag("summary", f"{len(row.contenders)} paths, command, versions")
    return tag("details", summary, tag("div", folded(join(parts)), class_="opened"))


def _contender(row: ModelRow, name: str, held: bool) -> list[Cell]:
    """The cells of a path; held: whether there is a column for what it keeps for gradients."""
    failed, ratio, first = math.isnan(row.time_us(name)), row.over(name), row.first_call_s(name)
    errors = ", ".join(f"{key} {error_text(value)}" for key, value in row.errors(name).items())
    shown = {TUNED: "Equitune", DEFAULT: "Equitune, untuned default", STOCK: "stock"}.get(name, contender_name(name))
    return [
        Cell(shown, None, "fastest other path" if row.best_other and name == row.fastest else None),
        _time(row, name),
        Cell(MISSING if math.isnan(ratio) else ratio_text(ratio)),
        Cell(time_text(row.device_us(name))),
        Cell(count(row.launches(name))),
        Cell(shares_text(row.device_parts(name)) or MISSING, kind="wrap"),
        Cell(_per_atom(row, name)),
        Cell(binary_text(row.memory(name))),
        *([_held(row, name)] if held else []),
        Cell(MISSING if math.isnan(first) else f"{significant(first)}\N{NO-BREAK SPACE}s"),
        Cell(errors or MISSING, kind="wrap"),
        Cell(row.reason(name) if failed else "", kind="wrap"),
    ]


def _held(row: ModelRow, name: str) -> Cell:
    parts = row.held_parts(name)
    if not parts:
        return Cell(MISSING)
    return Cell(f"{binary_text(MIB * sum(parts.values()))}: {shares_text(parts)}", kind="wrap")


# Section on memory: the largest diamond crystal that each way to run a model has room for.

LARGEST_HINT = "Energies, forces and stress of one step, each path alone on the device. The crystal was doubled until it failed, so up to twice as many atoms may fit."  # noqa: E501


def largest(rows: Sequence[ModelRow]) -> Markup:
    """The whole section; empty without rows."""
    if not rows:
        return Markup("")
    columns = [Column("Model"), Column("Path"), Column("Atoms", True, "over the largest other path's")]
    columns += [Column("Edges", True), Column("Peak memory", True), Column("A step", True), Column("Ended by")]
    body = [_line(row, name) for row in rows for name in _by_atoms(row)]
    told = [commands(row.text("command")) for row in rows if row.text("command")]
    return join((tag("p", LARGEST_HINT, class_="hint"), table("Largest diamond crystals", columns, body), *told))


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
