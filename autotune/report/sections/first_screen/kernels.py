"""Rows of kernels to pick from, and the sentence about all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autotune.report.data.device_data import PASSES, DeviceData
from autotune.report.data.suite_rows import SuiteRow, mapping
from autotune.report.html.bars import Bar, Choice
from autotune.report.html.figures import COLOURS
from autotune.report.sections.first_screen.reproduce import Shipped, kernel_command, shipped
from autotune.report.sections.suite_summary import rows_text
from autotune.text import (
    DEFAULT,
    TUNED,
    binary_text,
    contender_name,
    direction_name,
    error_text,
    floored_ratio,
    geometric_mean,
    kind_text,
    ratio_text,
    time_text,
)

AXES = ("Problem", "Graph", "Pass", "Form")
STOCK = "e3nn"
# Of rows equally near to the mean, what most readers run comes first.
USUAL = ("force_step", "forward+backward", "forward")


def kernel_rows(data: DeviceData) -> list[SuiteRow]:
    """The bench rows, then the tuned entries that were compared with a peer and of which the bench has no row."""
    benched = {(row.kernel, row.deterministic) for row in data.suite}
    entries = [SuiteRow(_as_row(entry)) for entry in data.entries]
    rows = [*data.suite, *(row for row in entries if row.peer and (row.kernel, row.deterministic) not in benched)]
    chosen = rows or entries  # tuned without peers: the default alone is there to compare with

    def order(row: SuiteRow) -> tuple[Any, ...]:
        place = PASSES.index(row.which) if row.which in PASSES else len(PASSES)
        return (row.text("label"), _zero(row.edges), row.graph, place, _form(row))

    return sorted((row for row in chosen if row.times), key=order)


def _as_row(entry: dict[str, Any]) -> dict[str, Any]:
    times = {TUNED: entry, DEFAULT: entry.get("default"), **mapping(entry.get("peers"))}
    errors = {TUNED: {str(entry.get("direction")): mapping(entry.get("errors"))}}
    times = {name: found for name, found in times.items() if isinstance(found, dict)}
    return entry | {"pass": entry.get("direction"), "times": times, "errors": errors}


def _zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def choices(rows: Sequence[SuiteRow], backend: str) -> list[Choice]:
    known = shipped()
    return [_choice(row, backend, known) for row in rows]


def first_of(rows: Sequence[SuiteRow]) -> int:
    """The place of the row to show first: of the usual kind, and nearest to the mean speed-up."""
    mean = geometric_mean(row.ratio for row in rows)
    judged = [row for row in rows if not math.isnan(row.ratio)] or list(rows)

    def rank(row: SuiteRow) -> tuple[Any, ...]:
        usual = (row.text("operation") == "conv", row.text("dtype") == "float32", not row.deterministic)
        bars = sum(name in row.times for name in (STOCK, DEFAULT))
        which = USUAL.index(row.which) if row.which in USUAL else len(USUAL)
        off = 0.0 if math.isnan(row.ratio) else abs(math.log(row.ratio / mean))
        return (*(not part for part in usual), -bars, which, off)

    return min(range(len(rows)), key=lambda place: (rows[place] not in judged, *rank(rows[place])))


def _form(row: SuiteRow) -> str:
    operation = row.text("operation") or "conv"
    kind = kind_text(None if operation == "conv" else operation, row.deterministic)
    return ", ".join(filter(None, (kind or "convolution", row.text("dtype"), row.text("layout"))))


def _choice(row: SuiteRow, backend: str, known: Shipped) -> Choice:
    peers = [row.peer] if row.peer and row.peer != STOCK else []
    stock = [STOCK] if STOCK in row.times else []
    roles = {TUNED: "tuned", STOCK: "stock", DEFAULT: "untuned default"}
    if row.peer == STOCK:
        roles[STOCK] = "stock, fastest peer"
    names = [TUNED, *peers, *stock, *([DEFAULT] if DEFAULT in row.times else [])]
    bars = tuple(_bar(row, name, roles.get(name, "fastest peer")) for name in names)
    keys = (row.text("label"), row.graph, direction_name(row.which), _form(row))
    return Choice(keys, bars, tuple(_facts(row)), kernel_command(row, backend, known))


def _bar(row: SuiteRow, name: str, role: str) -> Bar:
    time_us, memory = row.times.get(name, math.nan), row.memory(name)
    shown = "Equitune" if name in (TUNED, DEFAULT) else contender_name(name)
    held = "" if math.isnan(memory) else binary_text(memory)
    reason = row.reason(name) if math.isnan(time_us) else ""
    return Bar(role, shown, COLOURS.get(name, "other"), time_us, held, reason)


def _facts(row: SuiteRow) -> list[str]:
    facts = []
    if row.size:
        facts.append(row.size)
    if row.floor_us / row.time_us > 0:
        facts.append(
            f"memory alone takes {time_text(row.floor_us)}, {row.floor_us / row.time_us:.0%} of Equitune's time"
        )
    if not math.isnan(row.order_us()):
        facts.append(f"ordering a new graph takes {time_text(row.order_us())}")
    found = row.accuracy()
    if found is not None:
        facts.append(f"largest relative error {error_text(found.error)}")
    return facts


def sentence(rows: Sequence[SuiteRow], device: str) -> str:
    """What tuning gained on all rows, in one sentence."""
    normal = [row for row in rows if not row.deterministic]
    judged = [row for row in normal if not math.isnan(row.ratio)]
    if judged:
        mean, least = geometric_mean(row.ratio for row in judged), min(row.ratio for row in judged)
        text = f"On this {device}, Equitune's kernels are {floored_ratio(mean)} as fast as the fastest peer on the mean of {rows_text(len(judged))}, least {floored_ratio(least)}"  # noqa: E501
        memory = geometric_mean(row.memory(TUNED) / row.memory(row.peer) for row in judged if row.memory(row.peer) > 0)
        return text + ("." if math.isnan(memory) else f", with {ratio_text(memory)} the extra memory.")
    timed = [row for row in normal if not math.isnan(row.default_ratio)]
    if not timed:
        return "No tuned time has been published for this device yet."
    mean, least = geometric_mean(row.default_ratio for row in timed), min(row.default_ratio for row in timed)
    return f"On this {device}, tuned kernels are {floored_ratio(mean)} as fast as the untuned default on the mean of {rows_text(len(timed))}, least {floored_ratio(least)}; no peer was timed."  # noqa: E501
