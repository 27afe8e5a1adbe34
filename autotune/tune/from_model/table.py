"""The table of ``equitune tune --model``: each kernel of a model, what it loads, and the model's times."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence

from autotune.database.lookup import Tuning
from autotune.text import direction_name, ratio_text, time_text
from autotune.tune.from_model.before_and_after import PassTimes
from autotune.tune.from_model.needs import Need, label_of
from autotune.workload.config import load_all
from autotune.workload.kinds.registry import kernel_kind, problem_from_key

# Columns are as wide as needed: a narrower terminal wraps lines, but no number is truncated.
WIDE = 1000
# Longest text of a problem, in characters.
MOST_TEXT = 48


def as_text(
    name: str,
    device: str,
    before: Sequence[Need],
    after: Sequence[Need],
    places: Mapping[str, Sequence[str]],
    times: Iterable[PassTimes],
) -> str:
    """The whole text: kernels, one sentence on them, and the times of the passes."""
    tuned = sum(need.is_tuned for need in before)
    now = sum(need.is_tuned for need in after) - tuned
    left = len(after) - tuned - now
    counts = f"{len(after)} kernels: {tuned} tuned before, {now} tuned now, {left} not tuned"
    lines = [f"{name} on {device}", *_kernels(before, after, places), counts]
    lines += [_sentence(one) for one in times]
    if not left:
        lines.append("nothing is left to tune here")
    return "\n".join(lines)


def _kernels(before: Sequence[Need], after: Sequence[Need], places: Mapping[str, Sequence[str]]) -> list[str]:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for title in ("module", "kernel", "direction", "dtype, layout", "graph", "before", "now"):
        table.add_column(title, no_wrap=True)
    for title in ("time", "vs default"):
        table.add_column(title, no_wrap=True, justify="right")
    names = {problem: name for name, problem in load_all().items()}
    for old, new in zip(before, after, strict=True):
        asked, problem = old.request, problem_from_key(old.request.problem)
        first = kernel_kind(asked.operation).describe(problem)[0]
        what = names.get(problem) or (first if len(first) <= MOST_TEXT else label_of(problem, asked.operation, names))
        kind = f"{asked.dtype} {asked.layout}" + (" deterministic" if asked.deterministic else "")
        place = _place(places.get(asked.problem, ()))
        row = (place, what, direction_name(asked.direction), kind, asked.graph_class.text, old.found.origin)
        table.add_row(*row, _now(old, new), *_figures(new.found))
    out = io.StringIO()
    Console(file=out, width=WIDE, no_color=True, markup=False, emoji=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def _place(names: Sequence[str]) -> str:
    return "" if not names else names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _now(old: Need, new: Need) -> str:
    if not new.is_tuned:
        return "not tuned"
    return "tuned already" if old.is_tuned else "tuned"


def _figures(found: Tuning) -> tuple[str, str]:
    """Time of a tuned kernel, and its speed-up over the default schedule."""
    entry = found.entry
    if entry is None or found.origin != "exact":
        return "", ""
    return time_text(entry.time_us), ratio_text(entry.default["time_us"] / entry.time_us)


def _sentence(one: PassTimes) -> str:
    times = f"{time_text(1e3 * one.before_ms)} before, {time_text(1e3 * one.after_ms)} after"
    interval = f"{one.low:.2f} to {one.high:.2f}, " if math.isfinite(one.high) else ""
    return f"{one.name}: {times}: {one.ratio:.2f} times as fast ({interval}{one.rounds} rounds)"
