"""One device's page: DeviceData as a complete, self-contained HTML document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autotune.report.devices import DeviceData, DeviceRows
from autotune.report.head import devices, first_screen, kernel_picker, method, provenance
from autotune.report.kernels import roofline, suite
from autotune.report.markup import Markup, Section, document, folded, join, tag
from autotune.report.models import largest, models
from autotune.report.sources import Sources, write_sources
from autotune.report.tuning import (
    entry_schedules,
    failures,
    knobs,
    progress,
    replays,
    row_table,
    winners,
)
from autotune.text import TUNED, count


def build_page(data: DeviceData, others: Sequence[DeviceRows] = ()) -> str:
    """The whole document. Equal data give equal text: its date is that of the newest record.

    others: the rows of all devices of the results folder, this one's included.
    """
    sources = write_sources(_kernels(data), data.device)
    sections = [section for section in _sections(data, others, sources) if section.content]
    return document(f"Equitune on {data.device['name']}", _header(data), sections, sources.packed())


def _header(data: DeviceData) -> tuple[Markup, ...]:
    dates = sorted({str(date)[:10] for date in data.rows["date"].dropna()})
    span = "" if not dates else f", measured {dates[0] if len(dates) == 1 else f'{dates[0]} to {dates[-1]}'}"
    return (
        tag("p", f"Equitune performance report{span}", class_="meta"),
        tag("h1", data.device["name"]),
        first_screen(data),
    )


def _kernels(data: DeviceData) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each expandable row with its tuned schedules by direction."""
    yield from ((row.record, row.schedules(TUNED)) for row in data.suite)
    yield from ((entry, entry_schedules(entry)) for entry in data.entries)


def _sections(data: DeviceData, others: Sequence[DeviceRows], sources: Sources) -> Iterator[Section]:
    hint = "Click a column head to sort. Click the line below a row to see its schedule, source and raw samples."
    click = tag("p", hint, class_="hint screen")
    if data.models:
        yield Section("models", "Models", models(data.models))
    yield Section("largest", "Largest crystal that fits", largest(data.largest))
    picked = kernel_picker(data) if data.models else None  # else it is the first screen
    yield Section("kernels", "Kernels", join((picked, suite(data.suite, sources))))
    yield Section("roofline", "Roofline", roofline(data) or Markup(""), "kernels against the device's memory")
    text = ", ".join(rows.name for rows in others)
    yield Section("devices", "Devices compared", devices(others, data.slug) or Markup(""), text)
    searched = f"{count(len(data.entries))} tuned kernels, {count(len(data.trials))} trials"
    yield Section("search", "The search", _search(data, join((click, _tuned(data, sources)))), searched)
    yield Section("method", "How it was measured", method(data), "values first, cold caches, in turns")
    told = "device, versions, commands, generators, hashes"
    yield Section("provenance", "Provenance", provenance(data), told)


def _tuned(data: DeviceData, sources: Sources) -> Markup:
    none = tag("p", "No tuned row is stored for this device.", class_="hint")
    return row_table(data, sources) or none


def _search(data: DeviceData, tuned: Markup) -> Markup:
    """The story of the search, which is long and unfolds only on demand."""
    parts = (
        ("rows", "Every tuned row", tuned),
        ("progress", "Progress", progress(data)),
        ("replay", "Samplers compared", replays(data.replays)),
        ("knobs", "Which knobs mattered", knobs(data)),
        ("winners", "Winning schedules", winners(data)),
        ("failures", "Outcomes and failures", failures(data)),
    )
    return join(tag("details", tag("summary", tag("h3", title, id=anchor)), folded(content), class_="fold")
                for anchor, title, content in parts)  # fmt: skip
