"""Matplotlib figures to inline SVG: a Figure drawn in placeholder colours enters, markup in CSS variables leaves.

Matplotlib knows no CSS variables, so figures are drawn in the colours of ``INK``, which no one would choose, and
each is replaced by ``var(--fig-NAME)``. The page's stylesheet gives the variables their light and dark values.
"""

from __future__ import annotations

import contextlib
import io
import re

import matplotlib
from matplotlib.figure import Figure

from autotune.report.markup import Markup, tag

# A point of the figure is one unit of its viewBox; panels are shown at about 1.3 pixels a point.
_NAMES = ("text", "muted", "grid", "tuned", "default", "e3nn", "compiled", "cue", "cuenaive", "oeq", "other", "bad")
INK = {name: f"#0{index:02x}bad"[:7] for index, name in enumerate(_NAMES, start=1)}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "equitune",
    "font.size": 8.0,
    "text.color": INK["text"],
    "axes.labelcolor": INK["muted"],
    "axes.edgecolor": INK["grid"],
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelsize": 8.0,
    "xtick.color": INK["grid"],
    "ytick.color": INK["grid"],
    "xtick.labelcolor": INK["muted"],
    "ytick.labelcolor": INK["muted"],
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
}


def style() -> contextlib.AbstractContextManager:
    """The context in which figures are made: ``with style(): ...``."""
    return matplotlib.rc_context(STYLE)


def inline_svg(figure: Figure, identifier: str, description: str) -> Markup:
    """``figure`` as an ``svg`` element whose ids all start with ``identifier``; ``description`` is read out for it."""
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    (box,) = re.findall(r'viewBox="([\d. ]+)"', text)
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.S)
    body = _compact(_identify(body, identifier))
    for name, colour in INK.items():
        body = body.replace(colour, f"var(--fig-{name})")
    return tag("svg", Markup(body), viewBox=box, role="img", aria_label=description, class_="figure")


def _identify(body: str, identifier: str) -> str:
    """Ids unique on the page: those that are referred to get a prefix, the others go."""
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', body))
    body = body.replace("xlink:href", "href")
    body = re.sub(r'(url\(|href=")#', rf"\1#{identifier}-", body)
    return re.sub(r' id="([^"]+)"', lambda m: f' id="{identifier}-{m[1]}"' if m[1] in used else "", body)


def _compact(body: str) -> str:
    """Two decimals are a hundredth of a pixel; the page's font stands in for matplotlib's."""
    body = re.sub(r"<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", body)

    def rounded(match: re.Match) -> str:
        return re.sub(r"(\d+\.\d{2})\d+", r"\1", match[0])

    body = re.sub(r' (?:d|x|y|transform|points)="[^"]*"', rounded, body)
    body = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", body)
    return re.sub(r"\s*\n\s*", " ", body).strip()
