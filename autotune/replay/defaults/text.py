"""The record of untuned schedules as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.database.predicted import TRIED


def costs_table(record: Mapping[str, Any]) -> Any:
    """Times over the tuned time, by way to choose: of all studies, and by size of graph."""
    from rich.table import Table

    sizes = list(record["choices"][record["chosen"]]["by size"])
    title = f"{record['device']}: time over the tuned time, {record['problems']} problems held out in turn"
    note = f"* what the runtime does; {record['studies']} studies; "
    note += f"estimates of unmeasured choices are off by {record['estimate_log_error']:.0%}"
    starts = record["starts"]
    for name, found in starts.items():
        note += f"; best of the first 2 in the order {name} {found['2']:.3f}"
    suite, kept = record["suite"], record["suite_first_run"]
    note += f"; {suite['lost']} of {suite['rows']} single passes of the suite below 0.95 of the fastest peer"
    note += f", {kept['lost']} after a first run, which tries {TRIED} schedules"
    table = Table(title=title, caption=note)
    table.add_column("choice", no_wrap=True)
    for column in ("mean", "worst", "beyond 1.35", "measured", *(f"{size}, mean" for size in sizes)):
        table.add_column(column, justify="right")
    for name, found in record["choices"].items():
        cells = [f"{found['mean']:.3f}", f"{found['worst']:.2f}", str(found["beyond"]), f"{found['measured']:.0%}"]
        cells += [f"{found['by size'][size]['mean']:.3f}" for size in sizes]
        table.add_row(f"{name} *" if name == record["chosen"] else name, *cells)
    return table


def measured_line(found: Mapping[str, Any], compared: int) -> str:
    """How many choices are measured and what those and all of them take. found: see ``evaluate.summary``."""
    count, measured = found["studies"], round(found["measured"] * found["studies"])
    text = f"{measured} of {count} choices are measured, {compared} of them beside the tuned schedule"
    if measured:
        text += f": mean {found['measured_mean']:.3f}, worst {found['measured_worst']:.2f}"
    if count > measured:
        text += f"; with {count - measured} estimates mean {found['mean']:.3f}, worst {found['worst']:.2f}"
    return text
