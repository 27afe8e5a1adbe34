"""Section that compares the devices of a results folder: a line per device, then what several of them measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from autotune.report.data.device_data import PASSES
from autotune.report.data.devices import DeviceRows
from autotune.report.data.model_rows import ModelRow, compared_with, mean_ratio
from autotune.report.data.suite_rows import SuiteRow
from autotune.report.html.markup import Cell, Column, Markup, join, table, tag
from autotune.text import (
    MISSING,
    STOCK,
    TUNED,
    bytes_text,
    count,
    direction_name,
    floored_ratio,
    geometric_mean,
    kind_text,
    ratio_text,
    significant,
    time_text,
)

Row = TypeVar("Row", SuiteRow, ModelRow)
HINT = "Kernels were measured on graphs of other sizes on each device, so the time is given for one edge: of the largest graph measured there, which is named below it."  # noqa: E501


def devices(found: Sequence[DeviceRows], here: str) -> Markup | None:
    """The whole section; None unless several devices have rows. ``here``: the slug of the page's device."""
    if len(found) < 2:
        return None
    ordered = sorted(found, key=lambda rows: (rows.slug != here, rows.slug))
    return join((_devices(ordered), _models(ordered), _kernels(ordered)))


def _devices(found: Sequence[DeviceRows]) -> Markup:
    columns = [Column("Device"), Column("Architecture"), Column("Units", True), Column("Copy bandwidth", True)]
    columns += [Column("Kernels", True, "rows"), Column("Speed-up", True, "over the fastest peer")]
    columns += [Column("Least", True), Column("Models", True, "rows")]
    columns += [Column("Speed-up", True, "over the fastest other path")]
    return table("Devices with measured rows", columns, [_device(rows) for rows in found])


def _device(rows: DeviceRows) -> list[Cell]:
    normal = [row for row in rows.suite if not row.deterministic]
    ratios = [row.ratio for row in normal if not math.isnan(row.ratio)]
    rates = [1e6 * row.bytes / row.floor_us for row in normal if row.bytes / row.floor_us > 0]
    units = rows.device.get("units")
    return [
        Cell(rows.name),
        Cell(str(rows.device.get("arch") or MISSING)),
        Cell(MISSING if units is None else f"{units:,}"),
        Cell(f"{bytes_text(max(rates))}/s" if rates else MISSING),
        Cell(str(len(rows.suite) or MISSING)),
        _mean(geometric_mean(ratios), floored_ratio),
        _mean(min(ratios, default=math.nan), floored_ratio),
        Cell(str(len(rows.models) or MISSING)),
        _mean(mean_ratio(rows.models), floored_ratio, _other_than_named(rows.models)),
    ]


def _mean(value: float, text: Callable[[float], str], note: str | None = None) -> Cell:
    return Cell(MISSING) if math.isnan(value) else Cell(text(value), value, note)


def _other_than_named(rows: Sequence[ModelRow]) -> str | None:
    """A note where a speed-up is not over what the column's head says."""
    found = compared_with(rows)
    return f"over {found}" if found == STOCK else None


def _by_key(rows: Iterable[Row], key: Callable[[Row], Hashable], size: Callable[[Row], float]) -> dict[Hashable, Row]:
    """Of the rows with a key, the timed one of the largest size."""
    found: dict[Hashable, Row] = {}
    for row in rows:
        before = found.get(key(row))
        if size(row) > 0 and (before is None or size(row) > size(before)):
            found[key(row)] = row
    return found


def _kernels(found: Sequence[DeviceRows]) -> Markup | None:
    """Kernels that several devices measured, by the time of one edge."""

    def key(row: SuiteRow) -> tuple[str, ...]:
        kind = kind_text(row.text("operation"), row.deterministic)
        return (row.text("label"), row.text("problem"), kind, row.text("dtype"), row.which)

    def edge_ns(row: SuiteRow) -> float:
        return 1e3 * row.time_us / row.edges

    by_device = [_by_key([row for row in rows.suite if edge_ns(row) > 0], key, lambda row: row.edges) for rows in found]
    shared = _shared(by_device)
    if not shared:
        return None
    columns = [Column("Problem"), Column("Pass", choice=True), Column("dtype", choice=True)]
    columns += [Column(rows.name, True, "an edge") for rows in found]
    order = {which: place for place, which in enumerate(PASSES)}
    body = []
    for label, problem, kind, dtype, which in sorted(shared, key=lambda k: (k[0], k[2], k[3], order.get(k[4], 99))):
        rows = [given.get((label, problem, kind, dtype, which)) for given in by_device]
        body.append([Cell(label, None, kind or None), Cell(direction_name(which), which), Cell(dtype),
                     *(_edge(row, edge_ns) for row in rows)])  # fmt: skip
    made = table("Tuned kernels: time of one edge", columns, body, sortable=True)
    head = tag("summary", f"Kernels measured on several devices: {len(body)}")
    return tag("details", head, tag("p", HINT, class_="hint"), made)


def _edge(row: SuiteRow | None, edge_ns: Callable[[SuiteRow], float]) -> Cell:
    if row is None:
        return Cell(MISSING)
    value = edge_ns(row)
    text = f"{significant(value)}\N{NO-BREAK SPACE}ns" if value < 1000 else time_text(value / 1e3)
    return Cell(text, value, f"{row.graph}, {count(row.edges)}")


def _models(found: Sequence[DeviceRows]) -> Markup | None:
    """Models that several devices measured on the same structure."""

    def key(row: ModelRow) -> tuple[str, ...]:
        return tuple(row.text(name) for name in ("model", "structure", "pass", "dtype"))

    by_device = [_by_key([row for row in rows.models if row.time_us(TUNED) > 0], key, lambda row: row.atoms)
                 for rows in found]  # fmt: skip
    shared = _shared(by_device)
    if not shared:
        return None
    columns = [Column("Model"), Column("Structure", choice=True), Column("Pass", choice=True), Column("dtype")]
    columns += [Column(rows.name, True, "over the fastest other path") for rows in found]
    body = []
    for name in sorted(shared):
        rows = [given.get(name) for given in by_device]
        which = next(row.which for row in rows if row is not None)
        times = [Cell(MISSING) if row is None else Cell(time_text(row.time_us(TUNED)), row.time_us(TUNED),
                 _gain(row)) for row in rows]  # fmt: skip
        body.append([Cell(name[0]), Cell(name[1]), Cell(which), Cell(name[3]), *times])
    return table("Models with Equitune on several devices", columns, body, sortable=True)


def _gain(row: ModelRow) -> str | None:
    if math.isnan(row.ratio):
        return None
    return " ".join(filter(None, (ratio_text(row.ratio), _other_than_named([row]))))


def _shared(by_device: Sequence[dict]) -> list:
    """Keys that at least two devices have."""
    every = dict.fromkeys(key for given in by_device for key in given)
    return [key for key in every if sum(key in given for given in by_device) > 1]
