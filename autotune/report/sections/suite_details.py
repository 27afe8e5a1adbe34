"""Expanded details of a suite row: all contenders, raw samples, schedules, their source and resources."""

from __future__ import annotations

import math
from typing import Any

from autotune.measure.timing import LEVEL, ratio_interval
from autotune.report.data.suite_rows import SuiteRow, mapping, number
from autotune.report.html.knobs import knob_cell, union, value_text
from autotune.report.html.markup import Cell, Column, Markup, folded, join, table, tag
from autotune.report.html.samples import samples
from autotune.report.html.sources import Sources
from autotune.text import (
    DEFAULT,
    MISSING,
    TUNED,
    bytes_text,
    contender_name,
    direction_name,
    error_text,
    ratio_text,
    time_text,
)


def details(row: SuiteRow, sources: Sources) -> Markup:
    """A closed ``details`` element."""
    failed = sum(math.isnan(time) for time in row.times.values())
    parts = [f"{len(row.times)} contenders" + (f" ({failed} failed)" if failed else "")]
    parts += ["schedules"] if row.schedules(TUNED) else []
    parts += ["resources"] if row.resources(TUNED) else []
    raw = {name: row.samples(name) for name in _order(row)}
    drawn = samples(raw, _what(row))
    parts += ["raw samples"] if drawn else []
    kernels = (row.record, row.schedules(TUNED))
    source = sources.of(*kernels)
    parts += ["source"] if sources.written(*kernels) else []
    shown = (_contenders(row), drawn, _schedules(row), source, _resources(row))
    return tag("details", tag("summary", ", ".join(parts)), tag("div", folded(join(shown)), class_="opened"))


def _what(row: SuiteRow) -> str:
    return f"{row.text('label')} on {row.graph}, {direction_name(row.which)}"


def _order(row: SuiteRow) -> list[str]:
    """Ours first, then the peers by time, then those that failed."""
    last = {TUNED: -2.0, DEFAULT: -1.0}
    return sorted(row.times, key=lambda n: last.get(n, math.inf if math.isnan(row.times[n]) else row.times[n]))


def _contenders(row: SuiteRow) -> Markup:
    columns = [Column("Contender"), Column("Time", True, "quartiles"), Column("Ratio", True, "to the tuned time")]
    columns += [Column("Extra memory", True), Column("Host time", True)]
    ordered = any(not math.isnan(row.order_us(name)) for name in row.times)
    columns += [Column("Ordering", True, "of a new graph")] if ordered else []
    columns += [Column("Largest error", True), Column("Note")]
    body = [_contender(row, name, ordered) for name in _order(row)]
    floor = "" if math.isnan(row.floor_us) else f"; traffic floor {time_text(row.floor_us)}"
    copied = "" if math.isnan(row.copy_us) else f"; a copy of as many bytes takes {time_text(row.copy_us)}"
    return table(f"Contenders: {_what(row)}{floor}{copied}", columns, body)


def _contender(row: SuiteRow, name: str, ordered: bool) -> list[Cell]:
    time_us, memory, found = row.times[name], row.memory(name), row.accuracy(name)
    failed = math.isnan(time_us)
    timing = mapping(mapping(row.record.get("times")).get(name))
    low, high = (number(timing.get(key)) for key in ("q1_us", "q3_us"))
    spread = None if math.isnan(low + high) else f"{time_text(low)} to {time_text(high)}"
    ratio = time_us / row.time_us
    return [
        Cell(contender_name(name), None, _role(row, name)),
        Cell("failed", None, None, "failed") if failed else Cell(time_text(time_us), time_us, spread),
        Cell(MISSING if math.isnan(ratio) else ratio_text(ratio), None, _interval(row, name)),
        Cell(MISSING if math.isnan(memory) else bytes_text(memory)),
        Cell(time_text(row.host_us.get(name, math.nan))),
        *([Cell(time_text(row.order_us(name)))] if ordered else []),
        Cell(MISSING) if found is None else Cell(error_text(found.error), None, found.place),
        Cell(row.reason(name) if failed else "", kind="wrap"),
    ]


def _role(row: SuiteRow, name: str) -> str | None:
    if name in row.less_accurate:
        return "less accurate: not compared"
    return "fastest peer" if name == row.peer else None


def _interval(row: SuiteRow, name: str) -> str | None:
    """Interval of the ratio to the tuned time, for default and fastest peer; paired by rounds, as sampled in turn."""
    ours, theirs = row.samples(TUNED), row.samples(name)
    if name not in (DEFAULT, row.peer) or not ours or not theirs:
        return None
    low, high = ratio_interval(ours, theirs, paired=True)
    return f"{low:.3f} to {high:.3f} at {LEVEL:.0%}" if math.isfinite(high) else None


def _schedules(row: SuiteRow) -> Markup | None:
    """One line per direction, one column per knob; differences are marked, with the default's value below."""
    chosen, default = row.schedules(TUNED), row.schedules(DEFAULT)
    names = [name for name in union(chosen.values()) if name != "backend"]
    if not names:
        return None
    origins = mapping(row.record.get("origins"))
    body = []
    for direction, knobs in chosen.items():
        plain: dict[str, Any] = default.get(direction, {})
        cells = [knob_cell(knobs.get(name), plain.get(name), bool(plain)) for name in names]
        origin = origins.get(direction)
        body.append([Cell(direction_name(direction), None, None if origin is None else str(origin)), *cells])
    columns = [Column("Direction"), *(Column(name, True) for name in names)]
    return table("Tuned schedules. A dot marks knobs that differ from the default", columns, body)


def _resources(row: SuiteRow) -> Markup | None:
    ours = {name: row.resources(name) for name in (TUNED, DEFAULT)}
    names = union(found for by_direction in ours.values() for found in by_direction.values())
    if not names:
        return None
    body = [
        [Cell(direction_name(direction)), Cell(contender_name(contender)),
         *(Cell(value_text(found.get(name))) for name in names)]
        for contender, by_direction in ours.items()
        for direction, found in by_direction.items()
    ]  # fmt: skip
    columns = [Column("Direction"), Column("Schedule"), *(Column(name.replace("_", " "), True) for name in names)]
    return table("Resources reported by the compiler", columns, body)
