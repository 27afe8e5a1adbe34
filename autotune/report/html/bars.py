"""Bars of one row, and the picker that shows the bars of the row that a reader chooses.

Written as HTML and not drawn: text beside bars wraps on narrow screens and stays text. The page holds the bars of the
first row as they are, for readers without scripts, and those of all rows in one packed block for the script.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.report.html.markup import Markup, join, tag
from autotune.report.html.packed import block
from autotune.text import MISSING, floored_ratio, time_text

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
