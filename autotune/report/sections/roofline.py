"""Section that holds each kernel's traffic to what the device's memory gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from autotune.report.data.device_data import DeviceData
from autotune.report.data.suite_rows import GROUPS, SuiteRow, number
from autotune.report.html import suite_figures
from autotune.report.html.markup import Cell, Column, Markup, join, table, tag
from autotune.text import MISSING, bytes_text, geometric_mean

HINT = "A kernel must read each input and write each output once. A dot is a row of the bench: these bytes, and how many of them the tuned kernel moves a second. The line is a copy of as many bytes, measured in the same run; dashed: a large copy. Dots on the line are as fast as memory allows; dots far below it wait for arithmetic or for uneven work. The records hold no operation counts, so there is no roof for arithmetic."  # noqa: E501


def roofline(data: DeviceData) -> Markup | None:
    """The whole section; None if no row has a time and its bytes."""
    rows = [row for row in data.suite if not row.deterministic and row.bytes / row.time_us > 0]
    if not rows:
        return None
    points: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys((*GROUPS, *(row.group for row in rows))):
        given = [(row.bytes, 1e6 * row.bytes / row.time_us) for row in rows if row.group == name]
        if given:
            points[GROUPS.get(name, name)] = given
    # The traffic floor is the time at the rate of a large copy.
    peak = max((1e6 * row.bytes / row.floor_us for row in rows if row.floor_us > 0), default=math.nan)
    copies = _copies(rows)
    told = "; ".join(f"{name} {len(given)} rows up to {bytes_text(max(rate for _, rate in given))}/s"
                     for name, given in points.items())  # fmt: skip
    note = told + ("." if math.isnan(peak) else f"; a large copy {bytes_text(peak)}/s.")
    caption = tag("figcaption", "Bytes moved a second", tag("small", "One dot per row, both axes logarithmic"))
    drawn = tag("figure", caption, suite_figures.roofline(points, copies, peak, note), class_="wide")
    return join((tag("p", HINT, class_="hint"), drawn, _table(rows)))


def _copies(rows: Sequence[SuiteRow]) -> list[tuple[float, float]]:
    """The median rate of copies, by size."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if row.copy_us > 0:
            found.setdefault(row.bytes, []).append(1e6 * row.bytes / row.copy_us)
    return sorted((size, median(rates)) for size, rates in found.items())


def _table(rows: Sequence[SuiteRow]) -> Markup:
    """How near each kind comes to a copy of as many bytes, and the fastest peers to it."""
    columns = [Column("Kind"), Column("Rows", True), Column("Equitune", True, "mean share of the copy's rate")]
    columns += [Column("Highest", True), Column("Fastest peer", True, "mean share of the copy's rate")]
    body = []
    for name in dict.fromkeys((*GROUPS, *(row.group for row in rows))):
        inside = [row for row in rows if row.group == name and _least_us(row) > 0]
        if not inside:
            continue
        ours = [_least_us(row) / row.time_us for row in inside]
        theirs = geometric_mean(_least_us(row) / row.peer_us for row in inside)
        body.append([Cell(name.capitalize()), Cell(str(len(inside))), _share(geometric_mean(ours)), _share(max(ours)),
                     _share(theirs)])  # fmt: skip
    return table("Share of the rate of a copy of as many bytes", columns, body)


def _least_us(row: SuiteRow) -> float:
    """The time of a copy of as many bytes, or of the traffic floor where it was not measured."""
    return row.floor_us if math.isnan(row.copy_us) else row.copy_us


def _share(value: float) -> Cell:
    return Cell(MISSING) if math.isnan(value) else Cell(f"{value:.0%}", number(value))
