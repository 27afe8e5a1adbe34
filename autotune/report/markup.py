"""Markup that escapes its content, the frame of a whole document, packed data, and bars."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from autotune.text import MISSING, floored_ratio, time_text

# Build escaped and balanced HTML from text and attributes. No other module writes a tag.

VOID = {"meta", "br", "col", "hr", "wbr"}
# Sortable tables with at least this many rows also get a filter.
FILTERED = 8
# Not an HTML element: its content is moved to the packed block before a page is written.
FOLD = "fold"


class Markup(str):
    """Text that is already HTML; other text is escaped when added."""


Content = Markup | str | float | int | None


def folded(content: Markup | None) -> Markup | None:
    """Content shown only when its ``details`` is opened; :func:`document` packs it."""
    return None if content is None else tag(FOLD, content)


def join(children: Iterable[Content]) -> Markup:
    """Concatenate children, without None."""
    return Markup("".join(c if isinstance(c, Markup) else escape(str(c)) for c in children if c is not None))


def tag(name: str, /, *children: Content, **attributes: str | float | bool | None) -> Markup:
    """An element, as in ``tag("td", 3, class_="n", data_value=3.0)``.

    In names of attributes a trailing underscore is dropped, others become hyphens. None or False omits an attribute;
    True writes it without a value.
    """
    shown = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        shown.append(f" {key}" if value is True else f' {key}="{escape(str(value))}"')
    opening = f"<{name}{''.join(shown)}>"
    return Markup(opening if name in VOID else f"{opening}{join(children)}</{name}>")


@dataclass(frozen=True)
class Column:
    """``numeric`` columns are right-aligned; ``note`` is a second, smaller line of the heading.

    ``choice``: the column has few values, and readers may filter by one (the first line of its cells).
    """

    title: str
    numeric: bool = False
    note: str | None = None
    choice: bool = False


@dataclass(frozen=True)
class Cell:
    """``value`` is the sort key (the record's unrounded number); ``note`` a smaller second line."""

    content: Content
    value: float | str | None = None
    note: Content = None
    kind: str = ""
    title: str | None = None
    style: str | None = None


@dataclass(frozen=True)
class Group:
    """A row of a table with content ``below`` it, across all columns; ``kind`` is the class of both."""

    cells: Sequence[Cell]
    below: Markup | None
    kind: str = ""


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, sortable: bool = False) -> Markup:
    """A table in its own scroll container; the first cell of a row is its heading."""
    body = tag("tbody", *(_row(row, columns) for row in rows))
    return _framed(caption, columns, [body], _kind(len(rows)) if sortable else None)


def grouped_table(caption: str, columns: Sequence[Column], groups: Sequence[Group]) -> Markup:
    """A sortable table whose rows move together with the content below: each group is a separate ``tbody``."""
    bodies = []
    for group in groups:
        below = tag("tr", tag("td", group.below, colspan=len(columns)), class_="below")
        shown = None if group.below is None else below
        bodies.append(tag("tbody", _row(group.cells, columns), shown, class_=group.kind or None))
    return _framed(caption, columns, bodies, f"{_kind(len(groups))} grouped")


def _kind(rows: int) -> str:
    """The classes that the page's script selects."""
    return "sortable filtered" if rows >= FILTERED else "sortable"


def _framed(caption: str, columns: Sequence[Column], bodies: Sequence[Markup], kind: str | None) -> Markup:
    head = tag("thead", tag("tr", *(_head(column, kind is not None) for column in columns)))
    inner = tag("table", tag("caption", caption), head, *bodies, class_=kind)
    return tag("div", inner, class_="scroll", role="region", tabindex="0", aria_label=caption)


def _row(row: Sequence[Cell], columns: Sequence[Column]) -> Markup:
    return tag("tr", *(_cell(cell, column, i == 0) for i, (cell, column) in enumerate(zip(row, columns, strict=True))))


def _head(column: Column, sortable: bool) -> Markup:
    note = tag("small", column.note) if column.note else None
    # A name in snake case may break after each underscore.
    name = Markup(escape(column.title).replace("_", "_<wbr>"))
    title = tag("button", name, type="button") if sortable else name
    choice = column.title if column.choice and sortable else None
    return tag("th", title, note, scope="col", class_="n" if column.numeric else None, data_filter=choice)


def _cell(cell: Cell, column: Column, head: bool) -> Markup:
    # Most cells are numbers and most headings are words; the exceptions get a class.
    align = ("n" if column.numeric else "") if head else ("" if column.numeric else "t")
    kind = " ".join(filter(None, (align, cell.kind))) or None
    note = tag("small", cell.note) if cell.note is not None else None
    common = {"class_": kind, "data_value": cell.value, "title": cell.title, "style": cell.style}
    if head:
        return tag("th", cell.content, note, scope="row", **common)
    return tag("td", cell.content, note, **common)


def definitions(items: Iterable[tuple[str, Content]]) -> Markup:
    """Names and their meanings as a description list."""
    return tag("dl", *(join((tag("dt", name), tag("dd", value))) for name, value in items))


# The frame of all pages: title, header and sections as one document that loads nothing else.

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


# Pack content that is only shown on demand, as inert script elements.
#
# A page has thousands of tables, strip plots and sources that few readers open. They are compressed (deflate) and
# stored in base 85; the page's script unpacks them. So the page stays one file that loads nothing else.

# Id of the element with all folded parts of a page.
PARTS = "parts"
WAITING = "It unfolds where scripts are allowed."
# The innermost: without another one inside.
_FOLDED = re.compile(f"<{FOLD}>((?:(?!<{FOLD}>).)*?)</{FOLD}>", re.DOTALL)
# Python's base 85 alphabet without the character that could begin or end an element.
_ALPHABET = str.maketrans("<", ",")


def block(name: str, data: Any) -> Markup:
    """An inert element with ``data`` as packed text."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    packed = zlib.compress(text.encode(), 9)
    written = base64.b85encode(packed, pad=True).decode().translate(_ALPHABET)
    return tag("script", Markup(written), type="text/plain", id=name, data_bytes=len(packed))


def unfolding(markup: Markup) -> tuple[Markup, Markup | None]:
    """Markup with a numbered placeholder for each folded part, and the block of these parts; None if there are none.

    A part within a part leaves a placeholder in the outer one.
    """
    parts: list[str] = []

    def place(match: re.Match[str]) -> str:
        parts.append(match[1])
        return tag("p", WAITING, class_="hint", data_part=len(parts) - 1)

    text, found = _FOLDED.subn(place, markup)
    while found:
        text, found = _FOLDED.subn(place, text)
    visible = Markup(text)
    return visible, block(PARTS, parts) if parts else None


# Bars of one row, and the picker that shows the bars of the row that a reader chooses.
#
# Written as HTML and not drawn: text beside bars wraps on narrow screens and stays text. The page holds the bars of the
# first row as they are, for readers without scripts, and those of all rows in one packed block for the script.

# A bar this many times as long as the next is cut, so that the others can still be told apart.
CUT = 4.0


@dataclass(frozen=True)
class Bar:
    """One contender. role: what it is in the comparison. ink: its colour. reason: why it has no time (NaN).

    memory: its text, or empty if unknown. ours: another form of the first bar's contender, not compared with it.
    """

    role: str
    name: str
    ink: str
    time_us: float
    memory: str = ""
    reason: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Choice:
    """A row to choose. keys: its value on each axis of the picker. bars: Equitune's first. facts: short sentences."""

    keys: tuple[str, ...]
    bars: tuple[Bar, ...]
    facts: tuple[str, ...]
    command: Markup | None = None


def bars(choice: Choice, memory: str) -> Markup:
    """One line per bar: who, bar, time, and how many times as fast Equitune is. ``memory``: head of its column."""
    ours = choice.bars[0].time_us
    times = sorted(bar.time_us for bar in choice.bars if not math.isnan(bar.time_us))
    end = times[-1] if times else math.nan
    if len(times) > 1 and times[-1] > CUT * times[-2]:
        end = CUT / 2 * times[-2]
    held = any(bar.memory for bar in choice.bars)
    head = tag("li", *(tag("span", text) for text in ("", "", "time", "Equitune is", *([memory] if held else []))),
               class_="barhead")  # fmt: skip
    lines = [_line(bar, bar.ours or bar is choice.bars[0], bar.time_us / ours, end, held) for bar in choice.bars]
    return tag("ol", head, *lines, class_="bars held" if held else "bars")


def _line(bar: Bar, ours: bool, ratio: float, end: float, held: bool) -> Markup:
    who = tag("span", tag("strong", bar.name), tag("small", bar.role) if bar.role else None, class_="who")
    memory = tag("span", bar.memory or MISSING, class_="memory") if held else None
    if math.isnan(bar.time_us):
        return tag("li", who, tag("span", bar.reason, class_="why"), tag("span", MISSING, class_="time"),
                   tag("span", class_="times"), memory)  # fmt: skip
    cut = bar.time_us > end * (1 + 1e-9)
    share = 100 * min(1.0, bar.time_us / end)
    drawn = tag("i", class_="cut" if cut else None, style=f"width:{share:.1f}%;background:var(--fig-{bar.ink})")
    track = tag("span", drawn, class_="track", title="The bar is cut: it is longer than shown" if cut else None)
    times = tag("span", class_="times") if ours else _times(ratio)
    kind = "ours" if ours else None
    return tag("li", who, track, tag("span", time_text(bar.time_us), class_="time"), times, memory, class_=kind)


def _times(ratio: float) -> Markup:
    if math.isnan(ratio):
        return tag("span", MISSING, class_="times")
    # Where the column's head has no room, each line says it.
    who, end = tag("small", "Equitune ", class_="narrow"), tag("small", " as fast")
    return tag("span", who, floored_ratio(ratio), end, class_="times slow" if ratio < 1 else "times")


def shown(choice: Choice, memory: str) -> Markup:
    """All that stands under the picker's controls."""
    facts = [tag("li", fact) for fact in choice.facts]
    again = None
    if choice.command is not None:
        again = tag("details", tag("summary", "Reproduce this row"), choice.command, class_="again")
    return join((bars(choice, memory), tag("ul", *facts, class_="facts-line"), again))


def picker(identifier: str, axes: Sequence[str], choices: Sequence[Choice], memory: str, first: int = 0) -> Markup:
    """The bars of ``choices[first]``; the script adds a control per axis that has more than one value.

    ``identifier``: of the block with all rows, unique on its page.
    """
    data: dict[str, Any] = {
        "axes": list(axes),
        "first": first,
        "rows": [[*choice.keys, shown(choice, memory)] for choice in choices],
    }
    named = " \N{MIDDLE DOT} ".join(filter(None, choices[first].keys))
    which = tag("p", named, class_="which")
    live = tag("div", shown(choices[first], memory), class_="chosen", aria_live="polite")
    return join((tag("div", which, live, class_="picker", data_rows=identifier), block(identifier, data)))
