"""What a page shows of whole models: the sentence, the picker, every row with its paths, and the largest crystals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.bench.contenders import shares_text
from autotune.bench.largest import atoms_of, largest_other, why_ended
from autotune.report.charts import COLOURS
from autotune.report.picker import Bar, Choice, Command, Picker
from autotune.report.rows import MIB, ModelRow, compared_with, mapping, mean_ratio, number
from autotune.text import (
    CAPTURED,
    DEFAULT,
    JOINT,
    STOCK,
    TUNED,
    contender_name,
    count,
    error_text,
    floored_ratio,
    geometric_mean,
    ratio_text,
    significant,
    time_text,
)

PACKAGES = {"mace": "MACE", "nequip": "NequIP", "sevennet": "SevenNet", "allegro": "Allegro"}
AXES = ("Model", "Structure", "Pass", "Precision")
# Neither Equitune alone nor a competitor; the sentence below the bars says which parts are whose.
JOINT_ROLE = "both together"

# Rows of whole models to pick from.


def model_picker(rows: Sequence[ModelRow]) -> Picker:
    choices = tuple(model_choice(row) for row in rows)
    return Picker("model-rows", AXES, choices, first_model_row(rows), "peak memory")


def first_model_row(rows: Sequence[ModelRow]) -> int:
    """The place of the row to show first: energies and forces in float32, with all bars, nearest to the mean."""
    mean = mean_ratio(rows)

    def rank(row: ModelRow) -> tuple[Any, ...]:
        untimed = sum(math.isnan(row.time_us(name)) for name in (TUNED, row.best_other, STOCK, DEFAULT))
        off = math.inf if math.isnan(row.ratio) else abs(math.log(row.ratio / mean))
        return (untimed, row.text("pass") != "energy_forces", row.text("dtype") != "float32", off)

    return min(range(len(rows)), key=lambda place: rank(rows[place]))


def model_choice(row: ModelRow) -> Choice:
    other = row.best_other
    roles = {
        TUNED: "tuned" if row.tuned else "not tuned on this device",
        CAPTURED: "captured: one launch a step",
        JOINT: JOINT_ROLE,
        STOCK: "stock",
        DEFAULT: "untuned default",
    }
    captured = CAPTURED if row.time_us(CAPTURED) > 0 else None  # it has no training step
    names = [name for name in (TUNED, captured, JOINT, other, STOCK, DEFAULT) if name and name in row.contenders]
    bars = tuple(_bar(row, name, roles.get(name, "fastest other path")) for name in names)
    keys = (row.text("model"), row.text("structure"), row.which, row.text("dtype"))
    return Choice(keys, bars, tuple(_facts(row)), Command(row.text("command")) if row.text("command") else None)


def _bar(row: ModelRow, name: str, role: str) -> Bar:
    package = PACKAGES.get(row.text("package"), row.text("package"))
    shown = "Equitune" if name in (TUNED, CAPTURED, DEFAULT) else package if name == STOCK else contender_name(name)
    # Stock has e3nn's colour, and a path that joins two has the first one's.
    ink = "e3nn" if name == STOCK else COLOURS.get(name.partition("+")[0], "other")
    return Bar(role, shown, ink, row.time_us(name), row.memory(name), row.reason(name), ours=name == CAPTURED)


def _facts(row: ModelRow) -> list[str]:
    facts = [f"{count(row.atoms)} atoms, {count(row.edges)} edges"]
    if row.per_atom_us(TUNED) > 0:
        facts.append(f"{significant(row.per_atom_us(TUNED))}\N{NO-BREAK SPACE}µs an atom")
    if row.device_us(TUNED) > 0:
        launches = f" in {count(row.launches(TUNED))} launches" if row.launches(TUNED) > 0 else ""
        facts.append(f"the device works {time_text(row.device_us(TUNED))} of it{launches}")
    if row.fastest and row.time_us(CAPTURED) > 0:
        over = floored_ratio(row.time_us(row.fastest) / row.time_us(CAPTURED))
        path = contender_name(row.fastest)
        path = f"stock {PACKAGES.get(row.text('package'), 'code')}" if row.fastest == STOCK else path
        facts.append(f"captured, a step is {over} as fast as {path}")
    errors = row.errors(TUNED)
    if errors:
        name = max(errors, key=lambda key: math.inf if math.isnan(errors[key]) else errors[key])
        facts.append(f"largest relative error {error_text(errors[name])} ({name}) against stock in float64")
    if row.fastest == STOCK and row.best_other is None:
        facts.append("no path but stock was timed beside it")
    elif row.fastest is None:
        facts.append("no other path was timed")
    return facts


# Sentences about all rows.


def models_sentence(rows: Sequence[ModelRow], device: str) -> str:
    """What Equitune gained on all rows, in one sentence."""
    judged = [row for row in rows if not math.isnan(row.ratio)]
    if not judged:
        return f"No model has been timed with Equitune and without it on this {device} yet."
    mean, least = floored_ratio(mean_ratio(judged)), floored_ratio(min(row.ratio for row in judged))
    memory = geometric_mean(row.memory_ratio for row in judged)
    held = "" if math.isnan(memory) else f", with {ratio_text(memory)} the memory"
    untuned = "" if any(row.tuned for row in judged) else " Nothing was tuned on it."
    return f"On this {device}, Equitune runs {_many(judged)} {mean} as fast as {compared_with(judged)} on the mean, least {least}{held}.{untuned}"  # noqa: E501


def joint_sentence(rows: Sequence[ModelRow]) -> str:
    """Of the rows that ran by Equitune and cuEquivariance together; empty without any."""
    joint = [row for row in rows if row.time_us(JOINT) > 0 and row.fastest]
    if not joint:
        return ""
    ratios = [row.time_us(row.fastest) / row.time_us(JOINT) for row in joint]
    mean, least = floored_ratio(geometric_mean(ratios)), floored_ratio(min(ratios))
    return f"Equitune's convolution and cuEquivariance's other parts together run {_many(joint)} {mean} as fast as the fastest path without Equitune, least {least}."  # noqa: E501


def _many(rows: Sequence[ModelRow]) -> str:
    cases = len({(row.text("model"), row.text("structure")) for row in rows})
    one_structure = len({row.text("structure") for row in rows}) == 1
    return f"{cases} model{'s' if cases > 1 else ''}" if one_structure else f"{cases} models × structures"


# Every row, with all its paths, errors and versions below it.


@dataclass(frozen=True)
class PathLine:
    """One path of a row. parts: of the device's time. held: what the forward pass keeps, in bytes, and its parts."""

    key: str
    name: str
    note: str
    ratio: float
    parts: str
    held: float
    held_parts: str
    errors: str


@dataclass(frozen=True)
class ModelLine:
    """A row of the table and what opens below it."""

    row: ModelRow
    paths: tuple[PathLine, ...]
    software: tuple[tuple[str, str], ...]

    @property
    def holds(self) -> bool:
        return any(path.held > 0 for path in self.paths)

    @property
    def captured_ratio(self) -> float:
        """How many times as fast a captured step is as the fastest path without Equitune."""
        return self.row.time_us(self.row.fastest) / self.row.time_us(CAPTURED)


@dataclass(frozen=True)
class ModelsSection:
    """others, captured, joint: whether any row has such a path, and so the table a column for it."""

    lines: tuple[ModelLine, ...]
    compared_with: str
    others: bool
    captured: bool
    joint: bool


def models(rows: Sequence[ModelRow]) -> ModelsSection | None:
    """None without rows."""
    if not rows:
        return None
    lines = tuple(ModelLine(row, tuple(_path(row, name) for name in row.contenders), _software(row)) for row in rows)
    return ModelsSection(
        lines=lines,
        compared_with=compared_with(rows),
        others=any(row.best_other for row in rows),
        captured=any(row.time_us(CAPTURED) > 0 for row in rows),
        joint=any(JOINT in row.contenders for row in rows),
    )


def _software(row: ModelRow) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((str(name), str(version)) for name, version in mapping(row.record.get("software")).items()))


def _path(row: ModelRow, name: str) -> PathLine:
    held = row.held_parts(name)
    return PathLine(
        key=name,
        name={DEFAULT: "Equitune, untuned default"}.get(name, path_name(name)),
        note="fastest other path" if row.best_other and name == row.fastest else "",
        ratio=row.over(name),
        parts=shares_text(row.device_parts(name)),
        held=MIB * sum(held.values()) if held else math.nan,
        held_parts=shares_text(held),
        errors=", ".join(f"{key} {error_text(value)}" for key, value in row.errors(name).items()),
    )


def path_name(name: str) -> str:
    return {TUNED: "Equitune", STOCK: "stock"}.get(name, contender_name(name))


# The largest diamond crystal that each way to run a model has room for.


@dataclass(frozen=True)
class CrystalLine:
    """One path of a model. atoms: 0 if none fitted. other: the most atoms of a path without Equitune, or 0."""

    row: ModelRow
    path: str
    atoms: int
    other: int
    edges: float
    memory: float
    step_us: float
    ended: str


@dataclass(frozen=True)
class LargestSection:
    """lines: by row, the path with the most atoms first."""

    lines: tuple[CrystalLine, ...]
    commands: tuple[str, ...]


def largest(rows: Sequence[ModelRow]) -> LargestSection | None:
    """None without rows."""
    commands = tuple(row.text("command") for row in rows if row.text("command"))
    return LargestSection(tuple(_crystal_lines(rows)), commands) if rows else None


def _crystal_lines(rows: Iterable[ModelRow]) -> Iterable[CrystalLine]:
    for row in rows:
        for name in sorted(row.contenders, key=lambda name: (-atoms_of(row.contenders[name]), name)):
            cell = row.contenders[name]
            crystal = mapping(cell.get("largest"))
            yield CrystalLine(
                row=row,
                path=path_name(name),
                atoms=atoms_of(cell),
                other=largest_other(row.contenders),
                edges=number(crystal.get("edges")),
                memory=MIB * number(crystal.get("peak_mib")),
                step_us=1e3 * number(crystal.get("wall_ms")),
                ended=why_ended(cell),
            )
