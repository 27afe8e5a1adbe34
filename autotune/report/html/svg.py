"""Convert matplotlib figures to inline SVG with CSS variables for colours.

Matplotlib has no CSS variables, so figures are drawn in the unusual placeholder colours of ``INK``, and each is
replaced by ``var(--fig-NAME)``. The page's stylesheet defines light and dark values of the variables.
"""

from __future__ import annotations

import contextlib
import io
import re

import matplotlib
from matplotlib.figure import Figure

from autotune.report.html.markup import Markup, tag

# A point of the figure is one unit of its viewBox; panels are shown at about 1.3 pixels per point.
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
    """The context for making figures: ``with style(): ...``."""
    return matplotlib.rc_context(STYLE)


def inline_svg(figure: Figure, identifier: str, description: str) -> Markup:
    """``figure`` as an ``svg`` element whose ids start with ``identifier``; screen readers read ``description``."""
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
    """Make ids unique on the page: referenced ids get a prefix and a number, others are removed."""
    body = body.replace("xlink:href", "href")
    used = dict.fromkeys(re.findall(r'(?:url\(|href=")#([^")]+)', body))
    short = {name: f"{identifier}-{place}" for place, name in enumerate(used)}
    body = re.sub(r'(url\(|href=")#([^")]+)', lambda match: f"{match[1]}#{short[match[2]]}", body)
    return re.sub(r' id="([^"]+)"', lambda m: f' id="{short[m[1]]}"' if m[1] in used else "", body)


def _compact(body: str) -> str:
    """Shorten the SVG: coordinates in tenths of a point, no invisible elements, the page's font."""
    body = re.sub(r"<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", body)
    body = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", body)
    body = re.sub(r' (?:x|y|transform|points|width|height)="[^"]*"', _rounded, body)
    body = re.sub(r' d="([^"]*)"', lambda match: f' d="{_relative(match[1])}"', body)
    body = re.sub(r' style="[^"]*"', lambda match: re.sub(r"(?<=[;:]) ", "", match[0]), body)
    body = re.sub(r'<path d="[^"]*" style="fill:none"/>', "", body)
    body = _ungrouped(re.sub(r"\s*\n\s*", " ", body).replace("> <", "><"))
    return re.sub(r'(?:<path d="[^"]*"( [^>]*)/>)(?:<path d="[^"]*"\1/>)+', _joined, body).strip()


def _rounded(match: re.Match[str]) -> str:
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), match[0])


def _relative(path: str) -> str:
    """Lines in tenths of a point, in relative coordinates; paths with curves stay unchanged."""
    tokens = path.split()
    if set(re.findall("[A-Za-z]", path)) - set("MLz"):
        return " ".join(tokens)
    text, here, start, place = "", (0, 0), (0, 0), 0
    while place < len(tokens):
        command = tokens[place]
        if command == "z":
            text, here, place = text + "z", start, place + 1
            continue
        to = round(10 * float(tokens[place + 1])), round(10 * float(tokens[place + 2]))
        across, down = to[0] - here[0], to[1] - here[1]
        if command == "M":
            text, start = f"{text}m{_tenths(across)} {_tenths(down)}", to
        else:
            level, upright = f"h{_tenths(across)}", f"v{_tenths(down)}"
            text += level if down == 0 else upright if across == 0 else f"l{_tenths(across)} {_tenths(down)}"
        here, place = to, place + 3
    return text


def _tenths(number: int) -> str:
    return f"{number / 10:g}"


def _ungrouped(body: str) -> str:
    """Remove groups without attributes."""
    kept: list[bool] = []

    def shown(match: re.Match[str]) -> str:
        if match[0] == "</g>":
            return match[0] if kept.pop() else ""
        if match[0].endswith("/>"):
            return ""
        kept.append(match[0] != "<g>")
        return match[0] if kept[-1] else ""

    return re.sub(r"</?g\b[^>]*>", shown, body)


def _joined(match: re.Match[str]) -> str:
    """Join consecutive paths of equal style into one; the first step of each is absolute."""
    drawn = "".join("M" + path[1:] for path in re.findall(r'<path d="([^"]*)"', match[0]))
    return f'<path d="{drawn}"{match[1]}/>'
