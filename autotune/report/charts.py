"""Charts of a page: SVG drawn by matplotlib, and strips of raw samples."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from autotune.measure.trial import STATES
from autotune.report.rows import measured, value_text
from autotune.text import (
    CAPTURED,
    DEFAULT,
    TUNED,
    bytes_text,
    contender_name,
    count,
    floored_ratio,
    geometric_mean,
    time_text,
)

# Figures of rows and trials: matplotlib panels as inline SVG, each about as wide as a phone.
#
# Small panels in a grid, unlike one wide chart, stay readable at any page width and need no legend: every bar, line and
# lane is labelled where it is. Times are in microseconds.

WIDTH = 3.9
# Left edge and width of the panels over trials, as shares of the figure; line names are to their right.
LEFT, LANES = 0.16, 0.68
COLOURS = {
    TUNED: "tuned",
    CAPTURED: "tuned",
    DEFAULT: "default",
    "e3nn": "e3nn",
    "e3nn-compiled": "compiled",
    "cuequivariance": "cue",
    "cuequivariance-naive": "cuenaive",
    "openequivariance": "oeq",
}


def _ticks(low: float, high: float, choices: Sequence[Sequence[float]], least: int) -> list[float]:
    """The first choice of steps in a decade with at least so many ticks on the axis, else the last."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in choices:
        ticks = [tick for decade in decades for step in steps if low <= (tick := step * 10.0**decade) <= high]
        if len(ticks) >= least:
            break
    return ticks


def time_axis(axis: Any, low: float, high: float) -> None:
    """At most eight ticks on a logarithmic time axis: decades or 1, 2, 5; even steps on a short axis."""
    ticks = _ticks(low, high, ((1,), (1, 2, 5)), least=3)
    ticks = ticks[:: max(1, -(-len(ticks) // 8))]
    if len(ticks) < 3:
        ticks = [tick for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda tick, _: _without_zeros(time_text(tick))))


def _without_zeros(text: str) -> str:
    """Of ``1.00 ms`` and ``2.0 kB``, whose decimals say nothing of a tick."""
    return re.sub(r"\.00?(?=\s)", "", text)


def _spread(number: float) -> float:
    """A fixed low-discrepancy offset, so that dots are spread equally in every build of the page."""
    return ((0.618 * number) % 1 - 0.5) * 0.5


def dots(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, size: float, alpha: float = 1.0) -> None:
    """Many dots as one path of zero-length strokes with round ends, a tenth of the bytes of markers."""
    points = np.column_stack([x, y])[np.isfinite(np.asarray(y, dtype=float))]
    if not len(points):
        return
    codes = [Outline.MOVETO, Outline.LINETO] * len(points)
    outline = Outline(np.repeat(points, 2, axis=0), codes)
    outline.should_simplify = False
    axes.add_patch(PathPatch(outline, fill=False, edgecolor=INK[colour], linewidth=size, capstyle="round", alpha=alpha))


def _limits(times: Sequence[float]) -> tuple[float, float]:
    finite = [time for time in times if math.isfinite(time)]
    return min(finite) / 1.12, max(finite) * 1.12


def search_progress(trials: pd.DataFrame, default_us: float, identifier: str, what: str) -> Markup:
    """Every trial of a study in order: times as dots, best so far as a line, failures in one lane per state."""
    timed = measured(trials)
    failed = [state for state in (*STATES[1:], "other") if (states_of(trials) == state).any()]
    lanes = 0.15 * len(failed)
    height = 1.95 + lanes + (0.08 if failed else 0)
    last = max(1.0, float(np.nanmax(trials["number"].to_numpy(dtype=float))))
    with style():
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes((LEFT, 0.36 / height, LANES, 1.5 / height), yscale="log")
        if not timed.empty:
            numbers, times = timed["number"].to_numpy(dtype=float), timed["time_us"].to_numpy(dtype=float)
            dots(axes, numbers, times, "muted", 3.2, 0.55)
            best = np.minimum.accumulate(times)
            axes.step([*numbers, last], [*best, best[-1]], where="post", color=INK["tuned"], linewidth=1.6)
            low, high = _limits([*times, default_us])
            axes.set_ylim(low, high)
            time_axis(axes.yaxis, low, high)
            if math.isfinite(default_us):
                axes.axhline(default_us, color=INK["text"], linewidth=0.9, linestyle=(0, (3, 2)))
            _line_names(axes, best[-1], default_us)
        else:
            axes.set_yticks([])
            axes.text(0.5, 0.5, "no trial was timed", transform=axes.transAxes, ha="center", color=INK["muted"])
        axes.set(xlim=(-0.02 * last, 1.02 * last), xlabel="trial")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if failed:
            _failure_lanes(figure.add_axes((LEFT, 1.92 / height, LANES, lanes / height)), trials, failed, last)
    best_text = "none was timed" if timed.empty else f"best {time_text(timed['time_us'].min())}"
    text = f"{what}: {count(len(trials))} trials, {len(timed)} timed, {best_text}, default {time_text(default_us)}."
    return inline_svg(figure, identifier, f"Progress of the search. {text}")


def _line_names(axes: Axes, best_us: float, default_us: float) -> None:
    """Names of the two lines at their right ends, moved apart if they would overlap."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    best, default = ((math.log(time) - low) / (high - low) for time in (best_us, default_us))
    gap = 0.24 - abs(best - default)
    if gap > 0:  # the default's name goes to the side its line is on
        side = 1 if default >= best else -1
        best, default = best - side * gap / 2, default + side * gap / 2
    shift = max(0.0, 0.1 - min(value for value in (best, default) if math.isfinite(value)))
    for level, name, time_us, ink in ((best, "best", best_us, "tuned"), (default, "default", default_us, "text")):
        if math.isfinite(time_us):
            axes.annotate(f"{name}\n{time_text(time_us)}", (1.02, level + shift), xycoords="axes fraction", va="center",
                          color=INK[ink], fontsize=7.5, linespacing=1.1)  # fmt: skip


def states_of(trials: pd.DataFrame) -> pd.Series:
    return trials["state"].where(trials["state"].isin(STATES), "other")


def _failure_lanes(axes: Axes, trials: pd.DataFrame, states: list[str], last: float) -> None:
    for lane, state in enumerate(states):
        numbers = trials["number"][states_of(trials) == state].to_numpy(dtype=float)
        axes.vlines(numbers, lane - 0.32, lane + 0.32, color=INK["bad"], linewidth=1.0)
    axes.set(xlim=(-0.02 * last, 1.02 * last), ylim=(len(states) - 0.5, -0.5), xticks=[])
    axes.set_yticks(range(len(states)), states)
    axes.tick_params(axis="y", length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def importance_bars(importances: pd.DataFrame, identifier: str, what: str) -> Markup:
    """Two bars per knob: the columns ``importance`` and ``explained`` of the frame, whose index is the knobs."""
    height = 0.32 + 0.3 * len(importances)
    measures = (("importance", "tuned", "PED-ANOVA importance"), ("explained", "default", "variance explained"))
    with style():
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes((0.36, 0.03 / height, 0.62, 0.3 * len(importances) / height))
        for offset, (measure, ink, _) in zip((-0.19, 0.19), measures, strict=True):
            for row, share in enumerate(importances[measure]):
                axes.barh(row + offset, share, height=0.36, color=INK[ink])
                axes.annotate(f"{share:.0%}", (share, row + offset), (3, 0), textcoords="offset points", va="center",
                              fontsize=7, color=INK["muted"])  # fmt: skip
        widest = float(importances[["importance", "explained"]].max().max())
        axes.set(xlim=(0, 1.18 * (widest or 1.0)), ylim=(len(importances) - 0.45, -0.55), xticks=[])
        axes.set_yticks(range(len(importances)), list(importances.index), color=INK["text"])
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.spines["bottom"].set_visible(False)
        for column, (_, ink, name) in enumerate(measures):
            start = 0.02 + 0.5 * column
            _key(figure, start, 1 - 0.11 / height, 0.08 / height, ink, name, "muted")
    shares = ", ".join(f"{knob} {row.importance:.0%} and {row.explained:.0%}" for knob, row in importances.iterrows())
    return inline_svg(figure, identifier, f"Knob importances and shares of variance explained. {what}: {shares}.")


def _key(figure: Figure, left: float, middle: float, height: float, ink: str, name: str, text: str) -> None:
    """What a colour stands for: a box of it, then a name."""
    corner = (left, middle - height / 2)
    figure.add_artist(Rectangle(corner, 0.022, height, color=INK[ink], transform=figure.transFigure))
    figure.text(left + 0.035, middle, name, va="center", fontsize=7.5, color=INK[text])


def knob_strip(trials: pd.DataFrame, knob: str, values: Sequence[Any], identifier: str, what: str) -> Markup:
    """Times of all timed trials by the value of one knob, with each value's median."""
    timed = measured(trials)
    chosen = [schedule.get(knob) for schedule in timed["schedule"]]
    times = timed["time_us"].to_numpy(dtype=float)
    spread = [_spread(n) for n in timed["number"].to_numpy(dtype=float)]
    medians = []
    with style():
        figure = Figure(figsize=(WIDTH, 1.75))
        axes = figure.add_axes((0.16, 0.2, 0.82, 0.76), yscale="log")
        for column, value in enumerate(values):
            inside = [i for i, other in enumerate(chosen) if other == value and type(other) is type(value)]
            dots(axes, [column + spread[i] for i in inside], [times[i] for i in inside], "muted", 3.2, 0.55)
            medians.append(float(np.median(times[inside])))
            axes.hlines(medians[-1], column - 0.36, column + 0.36, color=INK["tuned"], linewidth=1.8)
        low, high = _limits(list(times))
        axes.set(xlim=(-0.6, len(values) - 0.4), ylim=(low, high))
        time_axis(axes.yaxis, low, high)
        step = -(-len(values) // 12)
        axes.set_xticks(range(0, len(values), step), [value_text(value) for value in values[::step]])
    shown = "; ".join(f"{value_text(v)} {time_text(m)}" for v, m in zip(values, medians, strict=True))
    return inline_svg(figure, identifier, f"Times by {knob}. {what}, medians: {shown}.")


# Figures of the suite (ratios, roofline) and of replayed searches (curves), as inline SVG.

LANE_INCHES = 0.3
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
    axes_height = LANE_INCHES * len(lanes)
    height = axes_height + 0.5
    left = 0.04 + 0.0155 * max(len(name) for name in lanes)  # room for the longest name
    with style():
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes((left, 0.34 / height, 0.88 - left, axes_height / height), xscale="log")
        axes.axvspan(low, 1, color=INK["bad"], alpha=0.1, linewidth=0)
        axes.axvline(1, color=INK["text"], linewidth=1.0)
        for lane, (name, values) in enumerate(lanes.items()):
            spread = [lane + _spread(n) for n in range(len(values))]
            for ink, chosen in (("tuned", False), ("bad", True)):
                part = [n for n, ratio in enumerate(values) if (ratio < 1) is chosen]
                dots(axes, [values[n] for n in part], [spread[n] for n in part], ink, 4.2, 0.75)
            mean = geometric_mean(values)
            axes.vlines(mean, lane - 0.38, lane + 0.38, color=INK["text"], linewidth=1.8)
            axes.annotate(name, (0, lane), (-6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                          ha="right", va="center")  # fmt: skip
            axes.annotate(floored_ratio(mean), (1, lane), (4, 0), xycoords=("axes fraction", "data"),
                          textcoords="offset points", va="center", fontweight="bold")  # fmt: skip
        axes.set(xlim=(low, high), ylim=(len(lanes) - 0.5, -0.5), yticks=[], xlabel=f"speed-up over {other}")
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(FixedLocator(_ticks(low, high, ((1, 2, 5), (1, 1.5, 2, 3, 5, 7)), least=4)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}×"))
        figure.text(0.895, 1 - 0.07 / height, "mean", va="center", fontsize=7.5, color=INK["muted"])
    told = "; ".join(
        f"{name} {len(values)} rows from {floored_ratio(min(values))} to {floored_ratio(max(values))}, "
        f"mean {floored_ratio(geometric_mean(values))}, {sum(ratio < 1 for ratio in values)} below 1"
        for name, values in lanes.items()
    )
    return inline_svg(figure, identifier, f"Dot plot, logarithmic: speed-up over {other}. {told}.")


def roofline(
    points: Mapping[str, Sequence[tuple[float, float]]], roof: Sequence[tuple[float, float]], peak: float, what: str
) -> Markup:
    """Bytes moved a second by bytes, both logarithmic: dots of kernels, and the line of copies of as many bytes.

    ``points``: a group's name to its (bytes, bytes a second). ``peak``: of a large copy, NaN if unknown.
    """
    every = [point for group in points.values() for point in group]
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
        for index, (name, group) in enumerate(points.items()):
            ink = GROUP_INKS[index % len(GROUP_INKS)]
            dots(axes, [point[0] for point in group], [point[1] for point in group], ink, 4.0, 0.7)
            start = 0.17 + 0.27 * (index % 3)
            level = 0.965 - 0.055 * (index // 3)
            _key(figure, start, level, 0.03, ink, name, "text")
        axes.set(xlim=(min(sizes) / 1.4, max(sizes) * 1.4), ylim=(min(rates) / 1.4, top * 1.9),
                 xlabel="bytes moved")  # fmt: skip
        for axis, unit in ((axes.xaxis, ""), (axes.yaxis, "/s")):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda tick, _, unit=unit: _without_zeros(bytes_text(tick)) + unit))
    return inline_svg(figure, "roofline", f"Roofline, logarithmic: bytes a second by bytes moved. {what}")


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
        for index, (name, curve) in enumerate(curves.items()):
            ink, dashes = LINES[index % len(LINES)]
            axes.step(range(1, len(curve) + 1), curve, where="post", color=INK[ink], linewidth=1.5, linestyle=dashes)
            start = 0.13 + 0.85 * index / len(curves)
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
    last = {
        name: f"{curve[-1]:.2f} times" if math.isfinite(curve[-1]) else "nothing timed"
        for name, curve in curves.items()
    }
    ends = ", ".join(f"{name} {last[name]} after {len(curve)} trials" for name, curve in curves.items())
    return inline_svg(figure, identifier, f"Line chart: best so far over the best of all. {what}: {ends}.")


# Raw samples of one bench row: a lane of dots per contender, drawn by a template, because a page has hundreds of them.

# In units of the drawing's viewBox, half a pixel each: integers place dots precisely enough.
STRIPS_WIDTH, NAMES, STRIP, AXIS = 720, 240, 30, 28
LEAST = 0.01
INKS = COLOURS | {"before": "muted", "after": "tuned"}


@dataclass(frozen=True)
class Lane:
    """One contender's dots; beyond: those off the axis, which stand at its end in another colour."""

    name: str
    y: float
    ink: str
    inside: tuple[tuple[int, int], ...]
    beyond: tuple[tuple[int, int], ...]
    listed: str
    samples: int


@dataclass(frozen=True)
class Strips:
    """Lanes of raw samples in percent of a median. label: all of it in words. limit: the end of the axis.

    left, width, bottom: of the lanes; height: with the axis below them.
    """

    lanes: tuple[Lane, ...]
    limit: float
    label: str
    bottom: int
    height: int
    left: int = NAMES
    width: int = STRIPS_WIDTH

    @property
    def samples(self) -> int:
        return sum(lane.samples for lane in self.lanes)


def strips(by_contender: Mapping[str, Sequence[float]], what: str, origin: str | None = None) -> Strips | None:
    """One lane per contender with samples; None without any. ``what``: the row, in words.

    ``origin``: the contender whose median all lanes use; by default each uses its own.
    """
    known = {name: times for name, times in by_contender.items() if times}
    if not known:
        return None
    shares = {name: [time / median(known[origin or name]) - 1 for time in times] for name, times in known.items()}
    limit = axis_limit(list(shares.values()))
    half, middle = (STRIPS_WIDTH - NAMES - 20) / 2, NAMES + (STRIPS_WIDTH - NAMES) / 2
    lanes, told = [], []
    for index, (name, times) in enumerate(known.items()):
        top, step = STRIP * (index + 0.15), 0.7 * STRIP / len(times)
        dots: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for sample, share in enumerate(shares[name]):
            x = round(middle + half * max(-1.0, min(1.0, share / limit)))
            dots[abs(share) <= limit].append((x, round(top + step * (sample + 0.5))))
        listed = ", ".join(f"{time:g}" if time >= 1e6 else f"{time:.3f}".rstrip("0").rstrip(".") for time in times)
        shown = contender_name(name)
        y, ink = STRIP * (index + 0.72), INKS.get(name, "other")
        lanes.append(Lane(shown, y, ink, tuple(dots[True]), tuple(dots[False]), listed, len(times)))
        reach = f"from {time_text(min(times))} to {time_text(max(times))}"
        told.append(f"{shown} {len(times)} samples, median {time_text(median(times))}, {reach}")
    bottom = STRIP * len(lanes)
    label = f"Strip plot of raw samples. {what}: {'; '.join(told)}."
    return Strips(tuple(lanes), limit, label, bottom, bottom + AXIS)


def axis_limit(shares: Sequence[Sequence[float]]) -> float:
    """Wide enough for 19 of 20 samples of the widest lane, at least 1%: an outlier must not compress the rest."""
    widest = [sorted(map(abs, lane))[math.ceil(0.95 * len(lane)) - 1] for lane in shares]
    return max(LEAST, 1.1 * max(widest, default=0.0))


# Convert matplotlib figures to inline SVG with CSS variables for colours.
#
# Matplotlib has no CSS variables, so figures are drawn in the unusual placeholder colours of ``INK``, and each is
# replaced by ``var(--fig-NAME)``. The page's stylesheet defines light and dark values of the variables.

# A point of the figure is one unit of its viewBox; panels are shown at about 1.3 pixels per point.
_NAMES = ("text", "muted", "grid", "tuned", "default", "e3nn", "compiled", "cue", "cuenaive", "oeq", "other", "bad")
INK = {name: f"#0{index:02x}bad"[:7] for index, name in enumerate(_NAMES, start=1)}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "equitune",
    "font.sans-serif": ["DejaVu Sans"],  # measures text; the page shows its own font
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


def style() -> contextlib.AbstractContextManager[Any]:
    """The context for making figures: ``with style(): ...``."""
    return matplotlib.rc_context(STYLE)


def inline_svg(figure: Figure, identifier: str, description: str) -> Markup:
    """``figure`` as an ``svg`` element whose ids start with ``identifier``; screen readers read ``description``."""
    out = io.StringIO()
    with style():
        figure.savefig(
            out, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    text = out.getvalue()
    width, height = (72 * inches for inches in figure.get_size_inches())
    body = text[text.index("</defs>") + len("</defs>") : text.rindex("</svg>")]  # the first defs style the whole page
    body = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{identifier}-", body)
    for name, colour in INK.items():
        body = body.replace(colour, f"var(--fig-{name})")
    opening = Markup('<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="{}" class="figure">')
    return opening.format(width, height, description) + Markup(body + "</svg>")
