"""Rows of whole models to pick from, and the sentence about all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autotune.report.data.model_rows import ModelRow, compared_with, mean_ratio
from autotune.report.html.bars import Bar, Choice
from autotune.report.html.figures import COLOURS
from autotune.report.sections.first_screen.reproduce import commands
from autotune.text import (
    CAPTURED,
    DEFAULT,
    JOINT,
    STOCK,
    TUNED,
    binary_text,
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
RANDOM = "The models have their published hyperparameters and random weights: times do not depend on weights, predictions do."  # noqa: E501


def choices(rows: Sequence[ModelRow]) -> list[Choice]:
    return [_choice(row) for row in rows]


def first_of(rows: Sequence[ModelRow]) -> int:
    """The place of the row to show first: energies and forces in float32, with all bars, nearest to the mean."""
    mean = mean_ratio(rows)

    def rank(row: ModelRow) -> tuple[Any, ...]:
        untimed = sum(math.isnan(row.time_us(name)) for name in (TUNED, row.best_other, STOCK, DEFAULT))
        off = math.inf if math.isnan(row.ratio) else abs(math.log(row.ratio / mean))
        return (untimed, row.text("pass") != "energy_forces", row.text("dtype") != "float32", off)

    return min(range(len(rows)), key=lambda place: rank(rows[place]))


def _choice(row: ModelRow) -> Choice:
    other = row.best_other
    ours = "tuned" if row.tuned else "not tuned on this device"
    roles = {TUNED: ours, CAPTURED: "captured: one launch a step", JOINT: JOINT_ROLE, STOCK: "stock"}
    roles[DEFAULT] = "untuned default"
    captured = CAPTURED if row.time_us(CAPTURED) > 0 else None  # it has no training step
    names = [name for name in (TUNED, captured, JOINT, other, STOCK, DEFAULT) if name and name in row.contenders]
    bars = tuple(_bar(row, name, roles.get(name, "fastest other path")) for name in names)
    command = row.text("command")
    keys = (row.text("model"), row.text("structure"), row.which, row.text("dtype"))
    return Choice(keys, bars, tuple(_facts(row)), commands(command) if command else None)


def _bar(row: ModelRow, name: str, role: str) -> Bar:
    time_us, memory = row.time_us(name), row.memory(name)
    package = PACKAGES.get(row.text("package"), row.text("package"))
    shown = "Equitune" if name in (TUNED, CAPTURED, DEFAULT) else package if name == STOCK else contender_name(name)
    reason = row.reason(name) if math.isnan(time_us) else ""
    held = "" if math.isnan(memory) else binary_text(memory)
    return Bar(role, shown, ink(name), time_us, held, reason, ours=name == CAPTURED)


def _path(row: ModelRow, name: str) -> str:
    return f"stock {PACKAGES.get(row.text('package'), 'code')}" if name == STOCK else contender_name(name)


def ink(name: str) -> str:
    """Stock has e3nn's colour, and a path that joins two has the first one's."""
    return "e3nn" if name == STOCK else COLOURS.get(name.partition("+")[0], "other")


def _facts(row: ModelRow) -> list[str]:
    facts = [f"{count(row.atoms)} atoms, {count(row.edges)} edges"]
    if row.per_atom_us(TUNED) > 0:
        facts.append(f"{significant(row.per_atom_us(TUNED))}\N{NO-BREAK SPACE}µs an atom")
    if row.device_us(TUNED) > 0:
        launches = f" in {count(row.launches(TUNED))} launches" if row.launches(TUNED) > 0 else ""
        facts.append(f"the device works {time_text(row.device_us(TUNED))} of it{launches}")
    if row.fastest and row.time_us(CAPTURED) > 0:
        over = floored_ratio(row.time_us(row.fastest) / row.time_us(CAPTURED))
        facts.append(f"captured, a step is {over} as fast as {_path(row, row.fastest)}")
    found = row.errors(TUNED)
    if found:
        name = max(found, key=lambda key: math.inf if math.isnan(found[key]) else found[key])
        facts.append(f"largest relative error {error_text(found[name])} ({name}) against stock in float64")
    if row.fastest == STOCK and row.best_other is None:
        facts.append("no path but stock was timed beside it")
    elif row.fastest is None:
        facts.append("no other path was timed")
    return facts


def sentence(rows: Sequence[ModelRow], device: str) -> str:
    """What Equitune gained on all rows, in one sentence."""
    judged = [row for row in rows if not math.isnan(row.ratio)]
    if not judged:
        return f"No model has been timed with Equitune and without it on this {device} yet."
    mean, least = mean_ratio(judged), min(row.ratio for row in judged)
    memory = geometric_mean(row.memory_ratio for row in judged)
    held = "" if math.isnan(memory) else f", with {ratio_text(memory)} the memory"
    told = f"On this {device}, Equitune runs {_many(judged)} {floored_ratio(mean)} as fast as {compared_with(judged)} on the mean, least {floored_ratio(least)}{held}."  # noqa: E501
    untuned = "" if any(row.tuned for row in judged) else "Nothing was tuned on it."
    return " ".join(filter(None, (told, untuned)))


def joint_sentence(rows: Sequence[ModelRow]) -> str:
    """Of the rows that ran by Equitune and cuEquivariance together; empty without any."""
    joint = [row for row in rows if row.time_us(JOINT) > 0 and row.fastest]
    if not joint:
        return ""
    ratios = [row.time_us(row.fastest) / row.time_us(JOINT) for row in joint]
    mean, least = geometric_mean(ratios), min(ratios)
    return f"Equitune's convolution and cuEquivariance's other parts together run {_many(joint)} {floored_ratio(mean)} as fast as the fastest path without Equitune, least {floored_ratio(least)}."  # noqa: E501


def _many(rows: Sequence[ModelRow]) -> str:
    cases = len({(row.text("model"), row.text("structure")) for row in rows})
    return f"{cases} model{'s' if cases > 1 else ''}" if _structures(rows) == 1 else f"{cases} models × structures"


def _structures(rows: Sequence[ModelRow]) -> int:
    return len({row.text("structure") for row in rows})
