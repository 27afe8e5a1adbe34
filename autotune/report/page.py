"""One device's page: a DeviceData enters, a complete HTML document leaves that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from autotune.report import method, overview, replays, search, suite, tuned_rows
from autotune.report.data import DeviceData
from autotune.report.markup import Markup, join, tag
from autotune.report.sources import Sources, write_sources
from autotune.report.tuned_rows import entry_schedules
from autotune.report.words import MISSING, TUNED

# The browser is told to load nothing at all, so a mistake here could not reach the network.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def build_page(data: DeviceData) -> str:
    """The document. Equal data give equal text: its date is that of the newest record."""
    sources = write_sources(_kernels(data), data.device)
    sections = _sections(data, sources)
    package = files("autotune.report")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", f"Equitune on {data.device['name']}"),
        tag("style", Markup(package.joinpath("style.css").read_text(encoding="utf-8"))),
    )
    links = [tag("li", tag("a", title, href=f"#{anchor}")) for anchor, title, _ in sections]
    main = tag("main", *(tag("section", tag("h2", title, id=anchor), content) for anchor, title, content in sections))
    script = tag("script", Markup(package.joinpath("page.js").read_text(encoding="utf-8")))
    body = tag(
        "body", _header(data), tag("nav", tag("ul", *links), aria_label="Sections"), main, sources.packed(), script
    )
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"


def _header(data: DeviceData) -> Markup:
    dates = sorted({str(date)[:10] for date in data.rows["date"].dropna()})
    generators = sorted({str(version) for version in data.rows["generator"].dropna()})
    span = MISSING if not dates else dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    facts = " \N{MIDDLE DOT} ".join((f"Measured {span}", f"generator {', '.join(generators) or MISSING}"))
    return tag(
        "header",
        tag("p", "Equitune performance report", class_="meta"),
        tag("h1", data.device["name"]),
        tag("p", facts, class_="meta"),
        tag("p", overview.sentence(data), class_="lead"),
    )


def _kernels(data: DeviceData) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each row that a reader can open, with its tuned schedules by direction."""
    yield from ((row.record, row.schedules(TUNED)) for row in data.suite)
    yield from ((entry, entry_schedules(entry)) for entry in data.entries)


def _sections(data: DeviceData, sources: Sources) -> list[tuple[str, str, Markup]]:
    none = tag("p", "No tuned row is stored for this device.", class_="hint")
    text = "A click on a column's head sorts by it; the line below a row opens its schedule, source and raw samples."
    hint = tag("p", text, class_="hint screen")
    return [
        ("headline", "Headline ratios", overview.cards(data)),
        ("suite", "Suite", join((hint, suite.suite(data.suite, sources)))),
        ("times", "Times", overview.bars(data)),
        ("rows", "Every tuned row", tuned_rows.row_table(data, sources) or none),
        ("search", "The search", search.progress(data)),
        ("replay", "Search: samplers side by side", replays.replays(data.replays)),
        ("knobs", "Which knobs mattered", search.knobs(data)),
        ("winners", "Winning schedules", search.winners(data)),
        ("failures", "Outcomes and failures", search.failures(data)),
        ("method", "How it was measured", method.method(data)),
    ]
