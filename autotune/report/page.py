"""One device's page: DeviceData as a complete, self-contained HTML document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.report.data.device_data import DeviceData
from autotune.report.html.frame import Section, document
from autotune.report.html.markup import Markup, join, tag
from autotune.report.html.sources import Sources, write_sources
from autotune.report.sections import method, overview, replays, search, suite, tuned_rows
from autotune.report.sections.tuned_rows import entry_schedules
from autotune.text import MISSING, TUNED


def build_page(data: DeviceData) -> str:
    """The whole document. Equal data give equal text: its date is that of the newest record."""
    sources = write_sources(_kernels(data), data.device)
    sections = _sections(data, sources)
    return document(f"Equitune on {data.device['name']}", _header(data), sections, sources.packed())


def _header(data: DeviceData) -> tuple[Markup, ...]:
    dates = sorted({str(date)[:10] for date in data.rows["date"].dropna()})
    generators = sorted({str(version) for version in data.rows["generator"].dropna()})
    span = MISSING if not dates else dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    facts = " \N{MIDDLE DOT} ".join((f"Measured {span}", f"generator {', '.join(generators) or MISSING}"))
    return (
        tag("p", "Equitune performance report", class_="meta"),
        tag("h1", data.device["name"]),
        tag("p", facts, class_="meta"),
        tag("p", overview.sentence(data), class_="lead"),
    )


def _kernels(data: DeviceData) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each expandable row with its tuned schedules by direction."""
    yield from ((row.record, row.schedules(TUNED)) for row in data.suite)
    yield from ((entry, entry_schedules(entry)) for entry in data.entries)


def _sections(data: DeviceData, sources: Sources) -> list[Section]:
    none = tag("p", "No tuned row is stored for this device.", class_="hint")
    text = "Click a column head to sort. Click the line below a row to see its schedule, source and raw samples."
    hint = tag("p", text, class_="hint screen")
    return [
        ("headline", "Headline ratios", overview.cards(data)),
        ("suite", "Suite", join((hint, suite.suite(data.suite, sources)))),
        ("times", "Times", overview.bars(data)),
        ("rows", "Every tuned row", tuned_rows.row_table(data, sources) or none),
        ("search", "The search", search.progress(data)),
        ("replay", "Samplers compared", replays.replays(data.replays)),
        ("knobs", "Which knobs mattered", search.knobs(data)),
        ("winners", "Winning schedules", search.winners(data)),
        ("failures", "Outcomes and failures", search.failures(data)),
        ("method", "How it was measured", method.method(data)),
    ]
