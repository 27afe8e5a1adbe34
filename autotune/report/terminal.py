"""Results as a table for the terminal, printed at the end of a tuning run."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.report.devices import DeviceData, device_slugs, load_device
from autotune.text import (
    MISSING,
    TUNED,
    contender_name,
    direction_name,
    error_text,
    ratio_text,
    time_text,
    without_time,
)

if TYPE_CHECKING:
    from rich.console import Console

# Columns are as wide as needed: a narrower terminal wraps lines, but no number is truncated.
WIDE = 1000


def summary_table(results_dir: str | Path, device: str | None = None) -> str:
    """One line per published entry, one table per device (``device``: only that slug), as plain text."""
    from rich.console import Console

    results = Path(results_dir)
    out = io.StringIO()
    console = Console(file=out, width=WIDE, no_color=True, markup=False, emoji=False)
    for slug in device_slugs(results):
        if device in (None, slug):
            _print(console, load_device(results, slug))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip("\n") or "no tuned entry yet"


def _print(console: Console, data: DeviceData) -> None:
    from rich import box
    from rich.table import Table

    rows = data.rows[data.rows["source"] == "tuned"]
    if rows.empty:
        return
    table = Table(title=str(data.device["name"]), box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("problem", "direction", "dtype, layout"):
        table.add_column(name, no_wrap=True)
    peers = [name for name in data.contenders("tuned") if name != TUNED]
    for name in ("tuned", *(f"vs {_short(name)}" for name in peers), "floor", "error"):
        table.add_column(name, justify="right")
    for row, record in rows.iterrows():
        tuned = data.time(row, TUNED)
        time_us = math.nan if tuned is None else float(tuned["time_us"])
        ratios = [_ratio(data, row, name, time_us) for name in peers]
        floor = record["floor_us"] / time_us
        error = error_text(record["error"]) if record["error_slot"] else MISSING
        problem = f"{record['label']} on {record['graph'] or record['graph_class']}"
        direction = direction_name(record["direction"])
        direction += " deterministic" if record["deterministic"] else ""
        share = MISSING if math.isnan(floor) else f"{floor:.0%}"
        kind = f"{record['dtype']} {record['layout']}"
        table.add_row(problem, direction, kind, time_text(time_us), *ratios, share, error)
    console.print(table)
    console.print("vs: speed-up over it; floor: traffic floor / tuned time; error: largest relative error", style="dim")


def _short(name: str) -> str:
    """A column heading in two lines at most."""
    return contender_name(name).removeprefix("untuned ").replace(" ", "\n", 1)


def _ratio(data: DeviceData, row: int, name: str, time_us: float) -> str:
    found = data.time(row, name)
    if found is None:
        return MISSING
    if math.isnan(found["time_us"]):
        return without_time(str(found["error"]))
    return ratio_text(float(found["time_us"]) / time_us)
