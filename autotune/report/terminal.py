"""Results as a table for the terminal, printed at the end of a tuning run."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autotune import text
from autotune.bench.rows import SuiteRow
from autotune.report.devices import DeviceData, device_slugs, load_device
from autotune.report.rows import contenders

if TYPE_CHECKING:
    from rich.console import Console

# Columns are as wide as needed: a narrower terminal wraps lines, but no number is truncated.
WIDE = 1000
# Reasons of a failed peer that are printed, and characters of each; the report page has all.
MOST_REASONS, LONGEST_REASON = 2, 160
# Columns that only entries of other objectives than time have, by their key in a record.
BESIDES: dict[str, tuple[str, Callable[[SuiteRow], str]]] = {
    "joules": ("energy", lambda row: text.joules_text(row.joules(text.TUNED))),
    "memory": ("memory", lambda row: text.bytes_text(row.memory(text.TUNED))),
    "objectives": ("tuned by", lambda row: row.objectives or "time"),
}


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

    if not data.tuned:
        return
    table = Table(title=str(data.device["name"]), box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("problem", "direction", "dtype, layout"):
        table.add_column(name, no_wrap=True)
    peers = [name for name in contenders(data.tuned) if name != text.TUNED]
    besides = [column for key, column in BESIDES.items() if any(key in row.record for row in data.tuned)]
    titles = (*(title for title, _ in besides), *(f"vs {_short(name)}" for name in peers))
    for name in ("tuned", *titles, "floor", "error"):
        table.add_column(name, justify="right")
    for row in data.tuned:
        share, worst = 1 / row.over_floor, row.accuracy()
        table.add_row(
            f"{row.text('label')} on {row.graph}",
            text.direction_name(row.which) + (" deterministic" if row.deterministic else ""),
            f"{row.text('dtype')} {row.text('layout')}",
            text.time_text(row.time_us),
            *(cell(row) for _, cell in besides),
            *(_ratio(row, name) for name in peers),
            text.MISSING if math.isnan(share) else f"{share:.0%}",
            text.MISSING if worst is None else text.error_text(worst.error),
        )
    console.print(table)
    console.print(
        "vs: speed-up over it (95% interval); floor: traffic floor / tuned time; error: largest relative error",
        style="dim",
    )
    if any(row.stored_count(name) is not None for row in data.tuned for name in peers):
        console.print("(3 samples): so few give no interval", style="dim")
    for name in peers:
        reasons = {row.reason(name) for row in data.tuned if name in row.times and math.isnan(row.times[name])}
        failed = sorted(reason for reason in reasons if text.without_time(reason) == "failed")
        for reason in failed[:MOST_REASONS]:
            console.print(
                f"{text.contender_name(name)} failed: {' '.join(reason.split())[:LONGEST_REASON]}", style="dim"
            )


def _short(name: str) -> str:
    """A column heading in two lines at most."""
    return text.contender_name(name).removeprefix("untuned ").replace(" ", "\n", 1)


def _ratio(row: SuiteRow, name: str) -> str:
    if name not in row.times:
        return text.MISSING
    time_us = row.times[name]
    if math.isnan(time_us):
        return text.without_time(row.reason(name))
    if name == text.DEFAULT and row.default_schedule == row.record.get("schedule"):
        return "default"
    interval = row.stored_interval(name)
    ratio, few = text.ratio_text(time_us / row.time_us), row.stored_count(name)
    if interval is None:
        return ratio if few is None else f"{ratio} ({few} samples)"
    return f"{ratio} ({text.significant(interval[0])}\N{EN DASH}{text.significant(interval[1])})"
