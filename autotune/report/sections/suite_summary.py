"""What was gained on each kind of kernel, in one table: rows of a kind and pass have one mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from autotune.report.data.device_data import PASSES
from autotune.report.data.suite_rows import GROUPS, SuiteRow, prices
from autotune.report.html.markup import Cell, Column, Markup, table
from autotune.text import MISSING, TUNED, direction_name, floored_ratio, geometric_mean, ratio_text


def summary(rows: Sequence[SuiteRow]) -> Markup:
    """One line per kind and pass. Deterministic rows are a kind of their own."""
    columns = [Column("Kind"), Column("Pass", choice=True), Column("Rows", True)]
    columns += [Column("Speed-up", True, "mean over the fastest peer"), Column("Least", True), Column("Slower", True)]
    columns += [Column("Untuned", True, "mean over the fastest peer"), Column("Least untuned", True)]
    columns += [
        Column("Untuned default", True, "its time / tuned time"),
        Column("Traffic floor", True, "tuned / floor"),
    ]
    columns += [Column("Extra memory", True, "fastest peer's = 1"), Column("More memory", True, "rows")]
    columns += [Column("New graph", True, "speed-up if each call orders one")]
    columns += [Column("Normal mode", True, "deterministic / normal")]
    priced = {id(row): price for _, row, price in prices(rows)}
    body = []
    for kind in dict.fromkeys((*GROUPS, *(row.group for row in rows))):
        for deterministic in (False, True):
            inside = [row for row in rows if row.group == kind and row.deterministic is deterministic]
            title = kind.capitalize() + (", deterministic" if deterministic else "")
            for which in passes(inside):
                body.append(_line(title, which, [row for row in inside if row.which == which], priced))
    # Columns that only some records have.
    told = [True] * (len(columns) - 2) + [any(row.new_graph_ratio > 0 for row in rows), bool(priced)]
    columns, body = list(itertools.compress(columns, told)), [list(itertools.compress(line, told)) for line in body]
    return table("Means by kind and pass", columns, body, sortable=True)


def _line(kind: str, which: str, rows: Sequence[SuiteRow], priced: dict[int, float]) -> list[Cell]:
    ratios = [row.ratio for row in rows if not math.isnan(row.ratio)]
    untuned = [row.untuned_ratio for row in rows if not math.isnan(row.untuned_ratio)]
    lost = sum(row.loses for row in rows)
    held = [row for row in rows if not math.isnan(row.memory(TUNED) + row.memory(row.peer))]
    more = sum(row.exceeds_memory for row in held)
    of = f"{len(ratios)} of {len(rows)}" if len(ratios) < len(rows) else str(len(rows))
    return [
        Cell(kind),
        Cell(direction_name(which), which),
        Cell(of, len(rows)),
        _ratio(geometric_mean(ratios), floored_ratio, "best"),
        _least(ratios),
        Cell(str(lost) if ratios or lost else MISSING, None, None, "slow" if lost else ""),
        _ratio(geometric_mean(untuned), floored_ratio),
        _least(untuned),
        _mean(rows, lambda row: row.default_ratio),
        _mean(rows, lambda row: row.over_floor),
        _mean(rows, _memory_ratio),
        Cell(str(more) if held else MISSING, None, None, "slow" if more else ""),
        _ratio(geometric_mean(row.new_graph_ratio for row in rows), floored_ratio),
        _mean([row for row in rows if id(row) in priced], lambda row: priced[id(row)]),
    ]


def _memory_ratio(row: SuiteRow) -> float:
    theirs = row.memory(row.peer)
    return row.memory(TUNED) / theirs if theirs > 0 else math.nan


def _mean(rows: Iterable[SuiteRow], value: Callable[[SuiteRow], float]) -> Cell:
    return _ratio(geometric_mean(value(row) for row in rows), ratio_text)


def _least(ratios: Sequence[float]) -> Cell:
    least = min(ratios, default=math.nan)
    return _ratio(least, floored_ratio, "slow" if least < 1 else "")


def _ratio(value: float, text: Callable[[float], str], kind: str = "") -> Cell:
    return Cell(MISSING) if math.isnan(value) else Cell(text(value), value, None, kind)


def rows_text(number: int) -> str:
    return f"{number} row" if number == 1 else f"{number} rows"


def passes(rows: Iterable[SuiteRow]) -> list[str]:
    met = {row.which for row in rows}
    return [name for name in PASSES if name in met] + sorted(met - set(PASSES))
