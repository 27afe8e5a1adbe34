"""Figures of rows and trials: matplotlib panels as inline SVG, each about as wide as a phone.

Small panels in a grid, unlike one wide chart, stay readable at any page width and need no legend: every bar, line and
lane is labelled in place. Times are given in microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from autotune.measure.trial import STATES
from autotune.report.data.knob_importance import measured
from autotune.report.html.markup import Markup
from autotune.report.html.svg import INK, inline_svg, style
from autotune.text import CAPTURED, DEFAULT, TUNED, count, significant, time_text

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


def time_axis(axis: Any, low: float, high: float) -> None:
    """At most eight ticks on a logarithmic time axis: decades or 1, 2, 5; even steps on a short axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1,), (1, 2, 5)):
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) >= 3:
            break
    ticks = ticks[:: max(1, -(-len(ticks) // 8))]
    if len(ticks) < 3:
        ticks = [tick for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(
        FuncFormatter(lambda tick, _: time_text(tick).replace(".00", "").replace(".0\xa0", "\xa0"))
    )


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
    failed = [state for state in (*STATES[1:], "other") if (_states(trials) == state).any()]
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
    for place, name, time_us, ink in ((best, "best", best_us, "tuned"), (default, "default", default_us, "text")):
        if math.isfinite(time_us):
            axes.annotate(f"{name}\n{time_text(time_us)}", (1.02, place + shift), xycoords="axes fraction", va="center",
                          color=INK[ink], fontsize=7.5, linespacing=1.1)  # fmt: skip


def _states(trials: pd.DataFrame) -> pd.Series:
    return trials["state"].where(trials["state"].isin(STATES), "other")


def _failure_lanes(axes: Axes, trials: pd.DataFrame, states: list[str], last: float) -> None:
    for lane, state in enumerate(states):
        numbers = trials["number"][_states(trials) == state].to_numpy(dtype=float)
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
        for offset, (column, ink, _) in zip((-0.19, 0.19), measures, strict=True):
            for place, share in enumerate(importances[column]):
                axes.barh(place + offset, share, height=0.36, color=INK[ink])
                axes.annotate(f"{share:.0%}", (share, place + offset), (3, 0), textcoords="offset points", va="center",
                              fontsize=7, color=INK["muted"])  # fmt: skip
        widest = float(importances[["importance", "explained"]].max().max())
        axes.set(xlim=(0, 1.18 * (widest or 1.0)), ylim=(len(importances) - 0.45, -0.55), xticks=[])
        axes.set_yticks(range(len(importances)), list(importances.index), color=INK["text"])
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.spines["bottom"].set_visible(False)
        for place, (_, ink, name) in enumerate(measures):
            start = 0.02 + 0.5 * place
            figure.text(start + 0.035, 1 - 0.11 / height, name, va="center", fontsize=7.5, color=INK["muted"])
            key = Rectangle(
                (start, 1 - 0.15 / height), 0.022, 0.08 / height, color=INK[ink], transform=figure.transFigure
            )
            figure.add_artist(key)
    shares = ", ".join(f"{knob} {row.importance:.0%} and {row.explained:.0%}" for knob, row in importances.iterrows())
    return inline_svg(figure, identifier, f"Knob importances and shares of variance explained. {what}: {shares}.")


def knob_strip(trials: pd.DataFrame, knob: str, values: Sequence[Any], identifier: str, what: str) -> Markup:
    """Times of all timed trials by the value of one knob, with each value's median."""
    timed = measured(trials)
    chosen = [schedule.get(knob) for schedule in timed["schedule"]]
    times = timed["time_us"].to_numpy(dtype=float)
    # A fixed low-discrepancy offset per trial, so that dots are spread equally in every build of the page.
    spread = [((0.618 * n) % 1 - 0.5) * 0.5 for n in timed["number"].to_numpy(dtype=float)]
    medians = []
    with style():
        figure = Figure(figsize=(WIDTH, 1.75))
        axes = figure.add_axes((0.16, 0.2, 0.82, 0.76), yscale="log")
        for place, value in enumerate(values):
            inside = [i for i, other in enumerate(chosen) if other == value and type(other) is type(value)]
            dots(axes, [place + spread[i] for i in inside], [times[i] for i in inside], "muted", 3.2, 0.55)
            medians.append(float(np.median(times[inside])))
            axes.hlines(medians[-1], place - 0.36, place + 0.36, color=INK["tuned"], linewidth=1.8)
        low, high = _limits(list(times))
        axes.set(xlim=(-0.6, len(values) - 0.4), ylim=(low, high))
        time_axis(axes.yaxis, low, high)
        step = -(-len(values) // 12)
        axes.set_xticks(range(0, len(values), step), [_value_text(value) for value in values[::step]])
    shown = "; ".join(f"{_value_text(v)} {time_text(m)}" for v, m in zip(values, medians, strict=True))
    return inline_svg(figure, identifier, f"Times by {knob}. {what}, medians: {shown}.")


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return significant(value) if isinstance(value, float) else str(value)
