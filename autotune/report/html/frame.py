"""The frame of all pages: title, header and sections as one document that loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

from autotune.report.html.markup import Markup, join, tag
from autotune.report.html.packed import unfolding

# Forbids the browser to load anything, so that no mistake here can reach the network.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


class Section(NamedTuple):
    """A part of a page. summary: what stands beside the title while the section is closed; None for an open one."""

    anchor: str
    title: str
    content: Markup
    summary: str | None = None


def document(title: str, header: Sequence[Markup | None], sections: Sequence[Section], inert: Markup | None) -> str:
    """The whole document. ``inert``: data that the script unpacks on demand."""
    package = files("autotune.report")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", title),
        tag("style", Markup(package.joinpath("page.css").read_text(encoding="utf-8"))),
    )
    links = [tag("li", tag("a", section.title, href=f"#{section.anchor}")) for section in sections]
    nav = tag("nav", tag("ul", *links), aria_label="Sections")
    main = tag("main", *map(_section, sections))
    script = tag("script", Markup(package.joinpath("page.js").read_text(encoding="utf-8")))
    visible, parts = unfolding(main)
    body = tag("body", tag("header", join(header)), nav, visible, parts, inert, script)
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"


def _section(section: Section) -> Markup:
    head = tag("h2", section.title, id=section.anchor)
    if section.summary is None:
        return tag("section", head, section.content)
    summary = tag("summary", head, tag("span", section.summary, class_="meta"))
    return tag("section", tag("details", summary, section.content, class_="fold"))
