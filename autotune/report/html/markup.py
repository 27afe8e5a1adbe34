"""Build escaped and balanced HTML from text and attributes. No other module writes a tag."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

VOID = {"meta", "br", "col", "hr", "wbr"}
# Sortable tables with at least this many rows also get a filter.
FILTERED = 8
# Not an HTML element: its content is moved to the packed block before a page is written.
FOLD = "fold"


class Markup(str):
    """Text that is already HTML; other text is escaped when added."""


Content = Markup | str | float | int | None


def folded(content: Markup | None) -> Markup | None:
    """Content shown only when its ``details`` is opened; ``frame.document`` packs it."""
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
