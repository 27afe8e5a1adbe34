"""Table of all tuned rows with their expandable details."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from autotune.report.data.device_data import DeviceData
from autotune.report.data.suite_rows import mapping, number
from autotune.report.html.knobs import knob_cell, union
from autotune.report.html.markup import Cell, Column, Group, Markup, folded, grouped_table, join, table, tag
from autotune.report.html.samples import samples
from autotune.report.html.sources import Sources
from autotune.text import (
    DEFAULT,
    MISSING,
    TUNED,
    TimeUnit,
    bytes_text,
    contender_name,
    count,
    direction_name,
    entry_note,
    error_text,
    kind_text,
    time_text,
    unit_for,
)


def entry_schedules(entry: dict[str, Any]) -> dict[str, Any]:
    """Direction to knobs, as in bench rows."""
    knobs = mapping(entry.get("schedule"))
    return {str(entry.get("direction")): knobs} if knobs else {}


def row_table(data: DeviceData, sources: Sources) -> Markup | None:
    """Every tuned row, sortable, with schedule, source and samples below; reasons of failed peers as notes."""
    rows = data.rows[data.rows["source"] == "tuned"]
    if rows.empty:
        return None
    # Our columns come before the peers', which may need scrolling.
    ours = [name for name in data.contenders("tuned") if name in (TUNED, DEFAULT)]
    peers = [name for name in data.contenders("tuned") if name not in ours]
    unit = unit_for(data.times[data.times["row"].isin(rows.index)]["time_us"])
    notes: dict[str, int] = {}
    columns = [Column("Problem"), Column("Direction", choice=True), Column("dtype", note="layout", choice=True)]
    columns += [Column("Graph", note="edges", choice=True)]
    spread = f"{unit.name}, quartiles"
    columns += [Column(_head_name(name), True, spread if name == TUNED else unit.name) for name in ours]
    columns += [Column("Speed-up", True, "over the fastest peer"), Column("Traffic floor", True, "floor / tuned")]
    columns.append(Column("Largest error", True, "relative, allowed"))
    columns += [Column(_head_name(name), True, unit.name) for name in peers]
    body: list[Group] = []
    for row, record in rows.iterrows():
        cells = [
            Cell(record["label"], record["label"], kind_text(record["operation"], record["deterministic"]) or None),
            Cell(direction_name(record["direction"]), str(record["direction"])),
            Cell(record["dtype"], f"{record['dtype']} {record['layout']}", record["layout"]),
            Cell(record["graph"] or MISSING, record["graph_class"], count(record["edges"])),
        ]
        cells += [_time_cell(data.time(row, name), name, unit, notes) for name in ours]
        cells += [_ratio_cell(data, row), _floor_cell(data, row), _error_cell(record)]
        cells += [_time_cell(data.time(row, name), name, unit, notes) for name in peers]
        # The first rows of the frame are the entries, in their order.
        body.append(Group(cells, _details(data, data.entries[int(str(row))], sources)))
    caption = "Tuned rows: medians of the final interleaved measurement"
    listing = tag("ol", *(tag("li", reason) for reason in notes), class_="notes") if notes else None
    return join((grouped_table(caption, columns, body), listing))


def best_peer(data: DeviceData, row: int) -> tuple[str, float] | None:
    """The fastest peer of a row, and the tuned kernel's speed-up over it."""
    tuned = data.time(row, TUNED)
    peers = data.times[(data.times["row"] == row) & ~data.times["contender"].isin([TUNED, DEFAULT])]
    peers = peers[peers["time_us"].notna()]
    if tuned is None or math.isnan(tuned["time_us"]) or peers.empty:
        return None
    fastest = peers.loc[peers["time_us"].idxmin()]
    return str(fastest["contender"]), float(fastest["time_us"] / tuned["time_us"])


def _head_name(name: str) -> str:
    return {TUNED: "Tuned", DEFAULT: "Default"}.get(name, contender_name(name))


def _time_cell(record: pd.Series | None, name: str, unit: TimeUnit, notes: dict[str, int]) -> Cell:
    if record is None:
        return Cell(MISSING)
    if math.isnan(record["time_us"]):
        reason = f"{contender_name(name)}: {record['error']}"
        place = notes.setdefault(reason, len(notes) + 1)
        return Cell(join(("failed ", tag("sup", place))), None, None, "failed", reason)
    low, high = record["q1_us"], record["q3_us"]
    spread = f"{unit.text(low)}\N{EN DASH}{unit.text(high)}" if math.isfinite(low) and math.isfinite(high) else None
    if name == TUNED:
        return Cell(unit.text(record["time_us"]), record["time_us"], spread, "best")
    title = f"quartiles {spread} {unit.name}" if spread else None
    return Cell(unit.text(record["time_us"]), record["time_us"], None, "", title)


def _ratio_cell(data: DeviceData, row: int) -> Cell:
    found = best_peer(data, row)
    if found is None:
        return Cell(MISSING)
    name, ratio = found
    return Cell(f"{ratio:,.2f}×", ratio, contender_name(name), "slow" if ratio < 1 else "")


def _floor_cell(data: DeviceData, row: int) -> Cell:
    record, tuned = data.rows.loc[row], data.time(row, TUNED)
    if tuned is None or math.isnan(tuned["time_us"]) or math.isnan(record["floor_us"]):
        return Cell(MISSING)
    share = record["floor_us"] / tuned["time_us"]
    return Cell(f"{share:.1%}", share, time_text(record["floor_us"]), title=f"{bytes_text(record['bytes'])} compulsory")


def _error_cell(record: pd.Series) -> Cell:
    if not record["error_slot"]:
        return Cell(MISSING)
    value, tolerance = record["error"], record["tolerance"]
    allowed = None if math.isnan(tolerance) else f"\N{LESS-THAN OR EQUAL TO} {error_text(tolerance)}"
    bad = math.isnan(value) or value > tolerance
    sort = None if math.isnan(value) else value
    return Cell(error_text(value), sort, allowed, "slow" if bad else "", f"largest for output {record['error_slot']}")


def _details(data: DeviceData, entry: dict[str, Any], sources: Sources) -> Markup | None:
    """A closed ``details`` element, or None if the entry has no schedule."""
    chosen = mapping(entry.get("schedule"))
    if not chosen:
        return None
    default = mapping(mapping(entry.get("default")).get("schedule"))
    names = [name for name in union([chosen]) if name != "backend"]
    cells = [knob_cell(chosen.get(name), default.get(name), bool(default)) for name in names]
    what = f"{entry.get('label')}, {direction_name(entry.get('direction'))}, {entry_note(entry)}"
    knobs = table(f"Schedule: {what}", [Column(name, True) for name in names], [cells]) if names else None
    drawn = samples({TUNED: _searched(data, entry)}, f"{what}, in the search")
    kernels = (entry, entry_schedules(entry))
    source = sources.of(*kernels)
    certified = _certificate(entry, what)
    parts = ["schedule", *(["certificate"] if certified else []), *(["source"] if sources.written(*kernels) else [])]
    parts += ["raw samples of the search"] if drawn else []
    shown = tag("div", folded(join((knobs, certified, source, drawn))), class_="opened")
    return tag("details", tag("summary", ", ".join(parts)), shown)


def _certificate(entry: dict[str, Any], what: str) -> Markup | None:
    """What is known about a published kernel besides its times; older entries have no certificate."""
    known, gain = mapping(entry.get("certificate")), mapping(entry.get("gain"))
    if not known:
        return None
    errors = mapping(entry.get("errors"))
    cells = [
        Cell(", ".join(f"{slot} {error_text(number(error))}" for slot, error in errors.items()) or MISSING),
        Cell(error_text(number(known["equivariance"])) if "equivariance" in known else MISSING),
        Cell("yes" if known.get("bitwise") else "no"),
        Cell(count(number(known.get("edges")))),
        Cell(_gain_text(gain)),
        Cell(str(entry.get("source") or MISSING)),
        Cell(str(known.get("environment") or MISSING)),
    ]
    columns = [Column("Errors", note="against float64"), Column("Equivariance", True, "relative error")]
    columns += [Column("Reproducible", note="bit for bit"), Column("Edges", True, "checked")]
    columns += [Column("Gain over the default"), Column("Source", note="hash"), Column("Environment", note="hash")]
    return table(f"Certificate: {what}", columns, [cells])


def _gain_text(gain: dict[str, Any]) -> str:
    if not gain:
        return "no gain beyond the noise; the default schedule is published"
    ratio, low, high, level = (number(gain.get(key)) for key in ("ratio", "low", "high", "level"))
    return f"{ratio:.3f}\N{MULTIPLICATION SIGN} ({low:.3f} to {high:.3f} at {level:.0%})"


def _searched(data: DeviceData, entry: dict[str, Any]) -> list[float]:
    """Samples from this schedule's trials: an entry only stores median and quartiles of its published samples."""
    file = str(mapping(entry.get("trials")).get("file")).rpartition("/")[2].removesuffix(".jsonl")
    trials = data.trials[data.trials["file"] == file]
    given = zip(trials["schedule"], trials["samples_us"], strict=True)
    return [time for schedule, times in given if schedule == entry.get("schedule") for time in times]
