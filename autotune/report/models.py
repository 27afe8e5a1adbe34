"""What a page shows of whole models: the sentence, the picker, every row with its paths, and the largest crystals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from autotune.bench.model_rows import ModelRow
from autotune.bench.rows import mapping, number
from autotune.bench.whole_models import atoms_of, largest_other, why_ended
from autotune.report.charts import COLOURS
from autotune.report.picker import Bar, Choice, Command
from autotune.text import (
    CAPTURED,
    DEFAULT,
    JOINT,
    STOCK,
    TUNED,
    contender_name,
    count,
    counted,
    error_text,
    floored_ratio,
    geometric_mean,
    path_and_form,
    ratio_text,
    significant,
    time_text,
)

PACKAGES = {"mace": "MACE", "nequip": "NequIP", "sevennet": "SevenNet", "allegro": "Allegro"}
AXES = ("Model", "Structure", "Pass", "Precision")
# Neither Equitune alone nor a competitor; the sentence below the bars says which parts are whose.
JOINT_ROLE = "both together"

# Rows of whole models to pick from.


def first_model_row(rows: Sequence[ModelRow]) -> int:
    """The place of the row to show first: energies and forces in float32, of one run, with all bars, of the package
    that comes first, nearest to the mean.
    """
    mean = geometric_mean(row.ratio for row in rows)

    def rank(row: ModelRow) -> tuple[Any, ...]:
        untimed = sum(math.isnan(row.time_us(name)) for name in (TUNED, row.best_other, STOCK, DEFAULT))
        off = math.inf if math.isnan(row.ratio) else abs(math.log(row.ratio / mean))
        kind = (row.text("pass") != "energy_forces", row.text("dtype") != "float32")
        return (not row.of_one_run, untimed, *kind, row.order[0], off)

    return min(range(len(rows)), key=lambda index: rank(rows[index]))


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
    ink = "e3nn" if name == STOCK else COLOURS.get(path_and_form(name)[0].partition("+")[0], "other")
    return Bar(role, shown, ink, row.time_us(name), row.memory(name), row.reason(name), ours=name == CAPTURED)


def _facts(row: ModelRow) -> list[str]:
    facts = [f"{count(row.atoms)} atoms, {count(row.edges)} edges"]
    if not row.of_one_run:
        facts.append("its paths were measured in several runs")
    if row.figure(TUNED, "us_per_atom") > 0:
        facts.append(f"{significant(row.figure(TUNED, 'us_per_atom'))}\N{NO-BREAK SPACE}µs an atom")
    if row.nanoseconds_a_day(TUNED) > 0:
        facts.append(f"{significant(row.nanoseconds_a_day(TUNED))} ns a day with steps of 1 fs")
    if row.device_us(TUNED) > 0:
        launches = f" in {count(row.figure(TUNED, 'launches'))} launches" if row.figure(TUNED, "launches") > 0 else ""
        facts.append(f"the device works {time_text(row.device_us(TUNED))} of it{launches}")
    if row.fastest and row.time_us(CAPTURED) > 0:
        over = floored_ratio(row.time_us(row.fastest) / row.time_us(CAPTURED))
        path = f"stock {PACKAGES.get(row.text('package'), 'code')}" if row.fastest == STOCK else row.fastest
        facts.append(f"captured, a step is {over} as fast as {contender_name(path)}")
    if row.fastest and row.capture_ratio(row.rival) > 0:
        eager, captured = (time_text(row.time_us(row.rival + form)) for form in ("", "-captured"))
        facts.append(f"{contender_name(row.rival)} takes {eager} eager, {captured} captured")
    errors = row.errors(TUNED)
    if errors:
        name = max(errors, key=lambda key: math.inf if math.isnan(errors[key]) else errors[key])
        facts.append(f"largest relative error {error_text(errors[name])} ({name}) against stock in float64")
    if row.fastest == STOCK and row.best_other is None:
        facts.append("no path but stock was timed beside it")
    elif row.fastest is None:
        facts.append("no other path was timed")
    return facts


# What all rows say, in numbers apart: kernels, capture, stress and whole steps.


# What is gained, of which pass, and how many times as fast: of a row, and the ratio of the same without stress.
GAINS: tuple[tuple[str, str, Callable[[ModelRow, float], float]], ...] = (
    ("energies and forces, each path in its fastest form", "energy_forces", lambda row, _: row.ratio),
    ("kernels: the same in time of the device alone", "energy_forces", lambda row, _: row.device_ratio),
    ("capture: Equitune captured over eager", "energy_forces", lambda row, _: row.capture_ratio(TUNED)),
    ("capture: the fastest other path's", "energy_forces", lambda row, _: row.capture_ratio(row.rival)),
    ("energies, forces and stress, where stress is optional", "energy_forces_stress", lambda row, _: row.ratio),
    ("stress: its part of that", "energy_forces_stress", lambda row, plain: row.ratio / plain),
    ("training step", "training", lambda row, _: row.ratio),
    ("step by ASE over the stock model's", "md_step", lambda row, _: row.time_us(STOCK) / row.time_us(row.ours)),
    ("step by ASE over the fastest other path's", "md_step", lambda row, _: row.ratio),
)


def gains(rows: Sequence[ModelRow]) -> dict[str, dict[str, list[float]]]:
    """The ratios of all float32 rows by what is gained and by package; rows without the figure are left out."""
    keys = ("package", "model", "structure", "pass")
    known = {tuple(map(row.text, keys)): row for row in rows if row.text("dtype") == "float32"}
    plain = {key[:3]: row.ratio for key, row in known.items() if key[3] == "energy_forces"}
    found: dict[str, dict[str, list[float]]] = {what: {} for what, _, _ in GAINS}
    for what, of_pass, gain in GAINS:
        for (package, *model, which), row in known.items():
            value = gain(row, plain.get((package, *model), math.nan))
            if which == of_pass and not math.isnan(value):
                found[what].setdefault(package, []).append(value)
    return found


def models_sentence(rows: Sequence[ModelRow], device: str) -> str:
    """What Equitune gained on all rows, by pass."""
    judged = [row for row in rows if not math.isnan(row.ratio)]
    if not judged:
        return f"No model has been timed with Equitune and without it on this {device} yet."
    others = "the fastest other path" if any(row.best_other for row in judged) else "stock"
    passes = dict.fromkeys(row.which for row in judged)
    parts = [f"{which} {_gain([row.ratio for row in judged if row.which == which])}" for which in passes]
    sentences = [f"On this {device}, Equitune is so many times as fast as {others}: {'; '.join(parts)}."]
    memory = geometric_mean(row.memory_ratio for row in judged)
    if not math.isnan(memory):
        sentences.append(f"It takes {ratio_text(memory)} the memory.")
    if not any(row.tuned for row in judged):
        sentences.append("Nothing was tuned on it.")
    return " ".join(sentences)


def _gain(ratios: Sequence[float]) -> str:
    """``2.55× (mean of 49 rows, least 0.89×)``."""
    mean, least = (floored_ratio(of(ratios)) for of in (geometric_mean, min))
    return f"{mean} (mean of {counted(len(ratios), 'row')}, least {least})" if len(ratios) > 1 else f"{mean} (one row)"


def joint_sentence(rows: Sequence[ModelRow]) -> str:
    """Of the rows that ran by Equitune and cuEquivariance together; empty without any."""
    joint = [row for row in rows if row.time_us(JOINT) > 0 and row.fastest]
    if not joint:
        return ""
    gain = _gain([row.time_us(row.fastest) / row.time_us(JOINT) for row in joint])
    return (
        "Equitune's convolution and cuEquivariance's other parts together, times as fast as the fastest path without "
        f"Equitune: {gain}."
    )


# The largest diamond crystal that each way to run a model has room for.


def largest(rows: Sequence[ModelRow]) -> list[dict[str, Any]]:
    """A line for each path of each row, in the order of the rows, the path with the most atoms first.

    over_other: its atoms over the most of a path without Equitune. edges, peak_mib, wall_ms: of its largest crystal.
    """
    lines = []
    for row in rows:
        atoms = {path: atoms_of(cell) for path, cell in row.contenders.items()}
        other = largest_other(row.contenders) or math.nan
        for path in sorted(atoms, key=lambda path: (-atoms[path], path)):
            cell = row.contenders[path]
            line = {"row": row, "path": path, "atoms": atoms[path], "over_other": atoms[path] / other}
            figures = {key: number(mapping(cell.get("largest")).get(key)) for key in ("edges", "peak_mib", "wall_ms")}
            lines.append(line | figures | {"ended": why_ended(cell)})
    return lines
