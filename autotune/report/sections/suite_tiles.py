"""Tiles that summarise the suite: cards with one large number each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from autotune.report.data.device_data import PASSES
from autotune.report.data.suite_rows import GROUPS, SuiteRow, prices
from autotune.report.html.markup import Markup, join, tag
from autotune.text import TUNED, direction_name, floored_ratio, geometric_mean, ratio_text

CLEAR = 1.05
# Dense graphs, on which traffic dominates; elsewhere launches or uneven degrees do.
FLOOR_GRAPHS = ("carbon", "water")


def tiles(rows: Sequence[SuiteRow]) -> Markup:
    """Tiles: speed-up by group and pass, rows won, time over the floor, default, memory, determinism."""
    normal = [row for row in rows if not row.deterministic]
    dense = [row for row in _in(normal, GROUPS[0]) if row.graph in FLOOR_GRAPHS]
    over = f"tuned time / traffic floor: {GROUPS[0]} on {' and '.join(FLOOR_GRAPHS)}"
    shown: list[Markup | None] = [_count_tile(rows)]
    for name in dict.fromkeys((*GROUPS, *(row.group for row in normal))):
        group = _in(normal, name)
        shown.append(_mean_tile(name.capitalize(), "speed-up over the fastest peer", group, lambda r: r.ratio))
    shown.append(_mean_tile("Time over the traffic floor", over, dense, lambda r: r.over_floor, up=True))
    shown.append(_mean_tile("Untuned default", "default time / tuned time", normal, lambda r: r.default_ratio, up=True))
    return tag("div", *shown, _memory_tile(rows), _price_tile(rows), class_="cards")


def _in(rows: Iterable[SuiteRow], group: str) -> list[SuiteRow]:
    return [row for row in rows if row.group == group]


def _tile(title: str, note: str, big: str, value: float | None, over: str, lines: Iterable[tuple[str, str]]) -> Markup:
    listing = tag("dl", *(join((tag("dt", name), tag("dd", text))) for name, text in lines))
    head = tag("h3", title, " ", tag("small", note))
    return tag("div", head, tag("span", big, class_="big", data_value=value), tag("span", over, class_="over"),
               listing, class_="card")  # fmt: skip


def _mean_tile(
    title: str, over: str, rows: Sequence[SuiteRow], value: Callable[[SuiteRow], float], up: bool = False
) -> Markup | None:
    """The geometric mean over rows with the value, and one per pass; ``up``: larger is worse, so not rounded down."""
    known = [row for row in rows if math.isfinite(value(row))]
    if not known:
        return None
    text = ratio_text if up else floored_ratio
    lines = []
    for name in passes(known):
        values = [value(row) for row in known if row.which == name]
        lines.append((f"{direction_name(name)} ({len(values)})", text(geometric_mean(values))))
    mean = geometric_mean(value(row) for row in known)
    of = f"{rows_text(len(known))}" if len(known) == len(rows) else f"{len(known)} of {rows_text(len(rows))}"
    return _tile(title, of, text(mean), mean, over, lines)


def rows_text(number: int) -> str:
    return f"{number} row" if number == 1 else f"{number} rows"


def passes(rows: Iterable[SuiteRow]) -> list[str]:
    met = {row.which for row in rows}
    return [name for name in PASSES if name in met] + sorted(met - set(PASSES))


def _count_tile(rows: Sequence[SuiteRow]) -> Markup:
    judged = [row for row in rows if row.loses or not math.isnan(row.ratio)]
    level, clear = sum(row.ratio >= 1 for row in judged), sum(row.ratio >= CLEAR for row in judged)
    lines = [(f"{CLEAR} or more", _of(clear, len(judged))),
             ("slower", str(sum(row.ratio < 1 for row in judged))),
             ("tuned kernel failed", str(sum(math.isnan(row.ratio) for row in judged))),
             ("no peer ran", str(len(rows) - len(judged)))]  # fmt: skip
    over = "rows where no peer is faster"
    return _tile("Speed-up of 1.00 or more", rows_text(len(rows)), f"{level} of {len(judged)}", level, over, lines)


def _of(part: int, whole: int) -> str:
    # Rounded down, as ratios are: 94.9% is not 95%.
    return f"{part} ({math.floor(100 * part / whole)}%)" if whole else str(part)


def _memory_tile(rows: Sequence[SuiteRow]) -> Markup | None:
    known = [row for row in rows if not math.isnan(row.memory(TUNED) + row.memory(row.peer))]
    if not known:
        return None
    more = [row for row in known if row.exceeds_memory]
    by_pass = [(direction_name(name), str(sum(row.which == name for row in more))) for name in passes(more)]
    over = "of the rows need more extra memory than the fastest peer"
    return _tile("Memory", f"{len(known)} of {rows_text(len(rows))}", str(len(more)), len(more), over, by_pass)


def _price_tile(rows: Sequence[SuiteRow]) -> Markup | None:
    found = [(row, price) for _, row, price in prices(rows) if math.isfinite(price)]
    if not found:
        return None
    mean = geometric_mean(price for _, price in found)
    lines = [(f"{direction_name(name)} ({len(values)})", ratio_text(geometric_mean(values)))
             for name in passes(row for row, _ in found)
             if (values := [price for row, price in found if row.which == name])]  # fmt: skip
    return _tile(
        "Deterministic mode", rows_text(len(found)), ratio_text(mean), mean, "deterministic time / normal time", lines
    )
