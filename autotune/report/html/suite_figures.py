"""Figures of the suite (ratios, roofline) and of replayed searches (curves), as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from autotune.report.html.figures import WIDTH, dots
from autotune.report.html.markup import Markup
from autotune.report.html.svg import INK, inline_svg, style
from autotune.text import bytes_text, floored_ratio, geometric_mean

LANE = 0.3
GROUP_INKS = ("tuned", "cue", "oeq", "other", "e3nn", "default")
# Colour and dashes of a line; dashes distinguish lines where colours do not.
LINES: tuple[tuple[str, object], ...] = (
    ("tuned", "solid"),
    ("oeq", (0, (5, 1.5))),
    ("cue", (0, (1.5, 1.2))),
    ("muted", (0, (6, 1.5, 1.5, 1.5))),
    ("other", (0, (3, 3))),
)


def ratio_dots(lanes: Mapping[str, Sequence[float]], identifier: str, other: str = "the fastest peer") -> Markup:
    """One lane per pass and group: a dot per row at its ratio to ``other``, a stroke at the geometric mean."""
    ratios = [ratio for values in lanes.values() for ratio in values]
    low, high = min(0.9, *ratios) / 1.12, max(1.2, *ratios) * 1.12
    axes_height = LANE * len(lanes)
    height = axes_height + 0.5
    left = 0.04 + 0.0155 * max(len(name) for name in lanes)  # room for the longest name
    with style():
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes((left, 0.34 / height, 0.88 - left, axes_height / height), xscale="log")
        axes.axvspan(low, 1, color=INK["bad"], alpha=0.1, linewidth=0)
        axes.axvline(1, color=INK["text"], linewidth=1.0)
        for place, (name, values) in enumerate(lanes.items()):
            # A fixed low-discrepancy offset per row, so that dots are spread equally in every build of the page.
            spread = [place + ((0.618 * n) % 1 - 0.5) * 0.5 for n in range(len(values))]
            for ink, chosen in (("tuned", False), ("bad", True)):
                part = [n for n, ratio in enumerate(values) if (ratio < 1) is chosen]
                dots(axes, [values[n] for n in part], [spread[n] for n in part], ink, 4.2, 0.75)
            mean = geometric_mean(values)
            axes.vlines(mean, place - 0.38, place + 0.38, color=INK["text"], linewidth=1.8)
            axes.annotate(name, (0, place), (-6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                          ha="right", va="center")  # fmt: skip
            axes.annotate(floored_ratio(mean), (1, place), (4, 0), xycoords=("axes fraction", "data"),
                          textcoords="offset points", va="center", fontweight="bold")  # fmt: skip
        axes.set(xlim=(low, high), ylim=(len(lanes) - 0.5, -0.5), yticks=[], xlabel=f"speed-up over {other}")
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(FixedLocator(_ratio_ticks(low, high)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}×"))
        figure.text(0.895, 1 - 0.07 / height, "mean", va="center", fontsize=7.5, color=INK["muted"])
    told = "; ".join(
        f"{name} {len(values)} rows from {floored_ratio(min(values))} to {floored_ratio(max(values))}, "
        f"mean {floored_ratio(geometric_mean(values))}, {sum(ratio < 1 for ratio in values)} below 1"
        for name, values in lanes.items()
    )
    return inline_svg(figure, identifier, f"Dot plot, logarithmic: speed-up over {other}. {told}.")


def _ratio_ticks(low: float, high: float) -> list[float]:
    ticks: list[float] = []
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [step * 10.0**decade for decade in range(-3, 5) for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 4:
            break
    return ticks


def roofline(
    points: Mapping[str, Sequence[tuple[float, float]]], roof: Sequence[tuple[float, float]], peak: float, what: str
) -> Markup:
    """Bytes moved a second by bytes, both logarithmic: dots of kernels, and the line of copies of as many bytes.

    ``points``: a group's name to its (bytes, bytes a second). ``peak``: of a large copy, NaN if unknown.
    """
    every = [point for given in points.values() for point in given]
    sizes, rates = ([point[axis] for point in (*every, *roof)] for axis in (0, 1))
    top = max([*rates, *([peak] if math.isfinite(peak) else [])])
    with style():
        figure = Figure(figsize=(WIDTH, 2.7))
        axes = figure.add_axes((0.17, 0.15, 0.81, 0.72), xscale="log", yscale="log")
        if math.isfinite(peak):
            axes.axhline(peak, color=INK["text"], linewidth=0.9, linestyle=(0, (3, 2)))
            axes.annotate(f"large copy, {bytes_text(peak)}/s", (0, peak), (3, 3), xycoords=("axes fraction", "data"),
                          textcoords="offset points", fontsize=7.5, color=INK["muted"])  # fmt: skip
        if roof:
            axes.plot(*zip(*sorted(roof), strict=True), color=INK["text"], linewidth=1.1)
        for place, (name, given) in enumerate(points.items()):
            ink = GROUP_INKS[place % len(GROUP_INKS)]
            dots(axes, [point[0] for point in given], [point[1] for point in given], ink, 4.0, 0.7)
            start = 0.17 + 0.27 * (place % 3)
            level = 0.965 - 0.055 * (place // 3)
            key = Rectangle((start, level - 0.015), 0.022, 0.03, color=INK[ink], transform=figure.transFigure)
            figure.add_artist(key)
            figure.text(start + 0.035, level, name, fontsize=7.5, va="center")
        axes.set(xlim=(min(sizes) / 1.4, max(sizes) * 1.4), ylim=(min(rates) / 1.4, top * 1.9),
                 xlabel="compulsory traffic")  # fmt: skip
        for axis, unit in ((axes.xaxis, ""), (axes.yaxis, "/s")):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda tick, _, unit=unit: _round_bytes(tick) + unit))
    return inline_svg(figure, "roofline", f"Roofline, logarithmic: bytes a second by compulsory bytes. {what}")


def _round_bytes(value: float) -> str:
    return bytes_text(value).replace(".00", "").replace(".0", "")


def sampler_curves(curves: Mapping[str, Sequence[float]], identifier: str, what: str) -> Markup:
    """Median best so far over the best of the record, by the number of trials, one line per sampler.

    ``curves``: a sampler's name to its ratios after 1, 2, 3, ... trials; NaN before the first time.
    """
    known = [ratio for curve in curves.values() for ratio in curve if math.isfinite(ratio)]
    longest = max(len(curve) for curve in curves.values())
    with style():
        figure = Figure(figsize=(WIDTH, 2.3))
        axes = figure.add_axes((0.13, 0.15, 0.85, 0.7), xscale="log" if longest > 20 else "linear")
        axes.axhline(1.05, color=INK["text"], linewidth=0.8, linestyle=(0, (3, 2)))
        axes.annotate("5%", (0, 1.05), (2, 1.5), xycoords=("axes fraction", "data"), textcoords="offset points",
                      fontsize=7, color=INK["muted"])  # fmt: skip
        for place, (name, curve) in enumerate(curves.items()):
            ink, dashes = LINES[place % len(LINES)]
            axes.step(range(1, len(curve) + 1), curve, where="post", color=INK[ink], linewidth=1.5, linestyle=dashes)
            start = 0.13 + 0.85 * place / len(curves)
            key = figure.add_axes((start, 0.905, 0.07, 0.06))
            key.axis("off")
            key.plot([0, 1], [0, 0], color=INK[ink], linewidth=1.5, linestyle=dashes)
            figure.text(start + 0.08, 0.935, name, va="center", fontsize=7.5)
        # The first trials may be tens of times slower, but the last percents are of interest.
        axes.set(ylim=(0.98, min(3.0, max(1.2, *known) * 1.02)), xlabel="trials", xlim=(1, max(2, longest)))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}×"))
        axes.xaxis.set_minor_locator(NullLocator())
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if tick <= longest]
        axes.xaxis.set_major_locator(FixedLocator(ticks) if longest > 20 else MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
    ends = ", ".join(f"{name} {_last(curve)} after {len(curve)} trials" for name, curve in curves.items())
    return inline_svg(figure, identifier, f"Line chart: best so far over the best of all. {what}: {ends}.")


def _last(curve: Sequence[float]) -> str:
    return f"{curve[-1]:.2f} times" if curve and math.isfinite(curve[-1]) else "nothing timed"
