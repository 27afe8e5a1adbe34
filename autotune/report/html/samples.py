"""Raw samples of one bench row: a strip plot and the numbers, by contender.

Strips are written here and not drawn by matplotlib, because a page has hundreds, each with a few hundred dots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from autotune.report.html.figures import COLOURS
from autotune.report.html.markup import Markup, join, tag
from autotune.text import contender_name, time_text

# In units of the drawing's viewBox, half a pixel each: integers, which are short, place dots precisely enough.
WIDTH, NAMES, LANE, AXIS = 720, 240, 30, 28
LEAST = 0.01
INKS = COLOURS | {"before": "muted", "after": "tuned"}


def samples(by_contender: Mapping[str, Sequence[float]], what: str) -> Markup | None:
    """A closed ``details``, or None if no contender has samples. ``what``: the row, in words."""
    known = {name: list(times) for name, times in by_contender.items() if times}
    if not known:
        return None
    numbers = [join((tag("dt", f"{contender_name(name)}, {len(times)}"), tag("dd", _listed(times))))
               for name, times in known.items()]  # fmt: skip
    note = "Deviation from each contender's median; samples run from top to bottom."
    drawing = tag("figure", tag("figcaption", "Spread", tag("small", note)), strips(known, what))
    listing = tag("details", tag("summary", "The numbers, in µs"), tag("dl", *numbers, class_="numbers"))
    total = sum(map(len, known.values()))
    return tag("details", tag("summary", f"Raw samples: {total:,}"), drawing, listing, class_="samples")


def _listed(times: Sequence[float]) -> str:
    return ", ".join(f"{time:g}" if time >= 1e6 else f"{time:.3f}".rstrip("0").rstrip(".") for time in times)


def strips(by_contender: Mapping[str, Sequence[float]], what: str, origin: str | None = None) -> Markup:
    """One lane per contender, in percent of its median; dots beyond the axis are at its end, in another colour.

    ``origin``: the contender whose median all lanes use; by default each uses its own.
    """
    shares = {name: _shares(times, by_contender[origin or name]) for name, times in by_contender.items()}
    limit = axis_limit(list(shares.values()))
    bottom = LANE * len(shares)
    middle = NAMES + (WIDTH - NAMES) / 2
    parts = [tag("path", d=f"M{middle:g} 0V{bottom:g}", stroke="var(--fig-grid)", fill="none")]
    for place, (name, given) in enumerate(shares.items()):
        parts.append(_text(NAMES - 16, LANE * (place + 0.72), "end", "text", contender_name(name)))
        points = [(middle + max(-1.0, min(1.0, share / limit)) * (WIDTH - NAMES - 20) / 2,
                   LANE * (place + 0.15 + 0.7 * (n + 0.5) / len(given))) for n, share in enumerate(given)]  # fmt: skip
        inside = [abs(share) <= limit for share in given]
        ink = INKS.get(name, "other")
        for wanted, colour in ((True, ink), (False, "bad")):
            dots = _dots([point for point, fits in zip(points, inside, strict=True) if fits is wanted])
            parts.append(tag("path", d=dots, stroke=f"var(--fig-{colour})", class_="dots") if dots else Markup(""))
    for x, anchor, text in ((NAMES + 8, "start", f"\N{MINUS SIGN}{limit:.1%}"), (middle, "middle", "median"),
                            (WIDTH - 4, "end", f"+{limit:.1%}")):  # fmt: skip
        parts.append(_text(x, bottom + AXIS - 4, anchor, "muted", text))
    told = "; ".join(
        f"{contender_name(name)} {len(times)} samples, median {time_text(median(times))}, "
        f"from {time_text(min(times))} to {time_text(max(times))}"
        for name, times in by_contender.items()
    )
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH:g} {bottom + AXIS:g}", role="img", class_="figure strips",
               aria_label=f"Strip plot of raw samples. {what}: {told}.")  # fmt: skip


def _dots(points: Iterable[tuple[float, float]]) -> str:
    """A path of zero-length strokes with round ends, in relative coordinates, which take the fewest bytes."""
    text, before = "", (0, 0)
    for x, y in points:
        here = round(x), round(y)
        text += f"m{here[0] - before[0]} {here[1] - before[1]}h0"
        before = here
    return text


def _shares(times: Sequence[float], origin: Sequence[float]) -> list[float]:
    middle = median(origin)
    return [time / middle - 1 for time in times]


def axis_limit(shares: Sequence[Sequence[float]]) -> float:
    """Wide enough for 19 of 20 samples of the widest lane, at least 1%: an outlier must not compress the rest."""
    widest = [sorted(map(abs, given))[math.ceil(0.95 * len(given)) - 1] for given in shares]
    return max(LEAST, 1.1 * max(widest, default=0.0))


def _text(x: float, y: float, anchor: str, ink: str, text: str) -> Markup:
    return tag("text", text, x=f"{x:g}", y=f"{y:g}", text_anchor=anchor, fill=f"var(--fig-{ink})")
