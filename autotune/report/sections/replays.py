"""Section that compares samplers: a table and a figure per record, from replays of recorded trials."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autotune.report.data.suite_rows import mapping, number
from autotune.report.html import suite_figures
from autotune.report.html.markup import Cell, Column, Markup, join, table, tag
from autotune.text import MISSING, count, direction_name, floored_ratio, time_text

SAMPLERS = {"tpe": "TPE", "climb": "TPE and neighbours", "gp": "GP", "random": "random", "default": "default order"}
NEAR = "0.05"


def replays(records: Mapping[str, Mapping[str, Any]]) -> Markup:
    """The whole section; ``records``: file name to content."""
    told = {name: record for name, record in records.items() if mapping(record.get("samplers"))}
    if not told:
        text = "No replay is stored for this device. To compare samplers on recorded trials, run equitune replay."
        return tag("p", text, class_="hint")
    hint = "Every sampler searched the same recorded schedules, once per seed, without the device. The table gives the trials until a schedule within 5% of the best was found: the median over seeds, and below it the range. The curves show the median of best so far / best of the record; dashed: 5% above the best."  # noqa: E501
    panels = [_panel(name, record, place) for place, (name, record) in enumerate(told.items())]
    return join((tag("p", hint, class_="hint"), _table(told), _transfers(told), tag("div", *panels, class_="panels")))


def sampler_name(key: str) -> str:
    """The shown name; ``default_order`` and ``default`` both mean the default order."""
    return SAMPLERS.get(key.lower().replace("_order", "").replace("-order", "").removesuffix(" order"), key)


def _samplers(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Samplers by shown name, the usual ones first."""
    found = {sampler_name(str(key)): mapping(value) for key, value in mapping(record.get("samplers")).items()}
    order = [*SAMPLERS.values()]
    return {name: found[name] for name in sorted(found, key=lambda n: (order.index(n) if n in order else 9, n))}


def trials_text(per_seed: Any) -> tuple[str, float, str | None]:
    """(median, its number or NaN, range) of trials by seed; a seed that never reached it counts as largest."""
    given = per_seed if isinstance(per_seed, list) else []
    if not given:
        return MISSING, math.nan, None
    counts = sorted(math.inf if math.isnan(number(value)) else number(value) for value in given)
    middle = len(counts) // 2
    median = counts[middle] if len(counts) % 2 else (counts[middle - 1] + counts[middle]) / 2
    never = sum(math.isinf(value) for value in counts)
    low, high = ("never" if math.isinf(value) else count(value) for value in (counts[0], counts[-1]))
    spread = low if low == high else f"{low}\N{EN DASH}{high}" if not never else f"{low} to never"
    note = f"{spread}, {len(counts) - never} of {len(counts)} seeds" if never else f"{spread}, {len(counts)} seeds"
    if math.isinf(median):
        return "not reached", math.nan, note
    return f"{median:,.0f}" if median == int(median) else f"{median:,.1f}", median, note


def _table(records: Mapping[str, Mapping[str, Any]]) -> Markup:
    names: dict[str, None] = {}
    for record in records.values():
        names |= dict.fromkeys(_samplers(record))
    columns = [Column("Record"), Column("Schedules", True), Column("Trials", True, "a search"), Column("Best", True)]
    columns += [Column("Default", True, "default / best")]
    columns += [Column(name, True, "trials to within 5%") for name in names]
    body = []
    for name, record in records.items():
        best_us, default_us = number(record.get("best_us")), number(record.get("default_us"))
        ratio = default_us / best_us if best_us > 0 else math.nan
        cells = [
            Cell(_title(name, record), None, _detail(name, record)),
            Cell(count(number(record.get("space_size")))),
            Cell(count(number(record.get("trials")))),
            Cell(time_text(best_us)),
            Cell(time_text(default_us), None, None if math.isnan(ratio) else floored_ratio(ratio)),
        ]
        samplers = _samplers(record)
        found = {key: trials_text(mapping(samplers.get(key, {}).get("trials_to")).get(NEAR)) for key in names}
        least = min((median for _, median, _ in found.values() if not math.isnan(median)), default=math.nan)
        for text, median, spread in found.values():
            cells.append(Cell(text, None if math.isnan(median) else median, spread, "best" if median == least else ""))
        body.append([*cells, _pruned(record)])
    columns.append(Column("Pruned", True, "too many spills"))
    return table("Trials until within 5% of the best", columns, body)


def _transfers(records: Mapping[str, Mapping[str, Any]]) -> Markup | None:
    """Trials that the tuner's sampler saves by starting from other kernels' winners; None without such data."""
    body = []
    for name, record in records.items():
        told = mapping(record.get("transfer"))
        sampler = sampler_name(str(told.get("sampler")))
        without, median, spread = trials_text(mapping(_samplers(record).get(sampler, {}).get("trials_to")).get(NEAR))
        for origin, found in mapping(told.get("from")).items():
            text, moved, note = trials_text(mapping(mapping(found).get("trials_to")).get(NEAR))
            saved = median - moved
            cells = [Cell(_title(name, record), None, _detail(name, record)), Cell(sampler), Cell(str(origin))]
            cells += [Cell(count(number(mapping(found).get("starts"))))]
            cells += [Cell(without, None if math.isnan(median) else median, spread)]
            cells += [Cell(text, None if math.isnan(moved) else moved, note)]
            body.append([*cells, Cell(MISSING if math.isnan(saved) else f"{saved:,.0f}")])
    if not body:
        return None
    columns = [Column("Record"), Column("Sampler"), Column("Starts from winners of"), Column("Starts", True)]
    columns += [Column("Without", True, "trials to within 5%"), Column("With", True, "trials to within 5%")]
    return table(
        "Trials saved by starting from winners of other kernels", [*columns, Column("Saved", True, "trials")], body
    )


def _title(name: str, record: Mapping[str, Any]) -> str:
    facts = [direction_name(record[key]) for key in ("label", "direction") if record.get(key)]
    return " \N{MIDDLE DOT} ".join(facts) or name


def _detail(name: str, record: Mapping[str, Any]) -> str:
    graph = record.get("graph")
    facts = [mapping(graph).get("name") or graph, *(record.get(key) for key in ("operation", "dtype", "layout"))]
    return ", ".join(fact for fact in facts if isinstance(fact, str) and fact) or name


def _pruned(record: Mapping[str, Any]) -> Cell:
    """Number of schedules that pruning would have skipped, and the fastest of them over the best."""
    told = mapping(record.get("pruning"))
    skipped, fastest = number(told.get("skipped")), number(told.get("fastest_skipped"))
    if math.isnan(skipped):
        return Cell(MISSING)
    return Cell(count(skipped), skipped, None if math.isnan(fastest) else f"fastest {floored_ratio(fastest)} the best")


def _panel(name: str, record: Mapping[str, Any], place: int) -> Markup | None:
    curves = {
        sampler: [number(ratio) for ratio in found["curve"]]
        for sampler, found in _samplers(record).items()
        if isinstance(found.get("curve"), list) and found["curve"]
    }
    if not curves:
        return None
    title, detail = _title(name, record), _detail(name, record)
    drawing = suite_figures.sampler_curves(curves, f"replay{place}", f"{title}, {detail}")
    note = f"{detail} \N{MIDDLE DOT} median best so far / best of the record"
    return tag("figure", tag("figcaption", title, tag("small", note)), drawing)
