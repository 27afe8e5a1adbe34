"""Section on the kernels: every bench row against its fastest peer, as means, a figure and tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from autotune.report.data.suite_rows import GROUPS, SuiteRow, prices
from autotune.report.html import suite_figures
from autotune.report.html.markup import Cell, Column, Group, Markup, folded, grouped_table, join, table, tag
from autotune.report.html.sources import Sources
from autotune.report.sections.suite_details import details
from autotune.report.sections.suite_summary import passes, rows_text, summary
from autotune.text import (
    DEFAULT,
    MISSING,
    TUNED,
    bytes_text,
    contender_name,
    direction_name,
    error_text,
    floored_ratio,
    ratio_text,
    time_text,
)
from autotune.workload.kinds.radial_convolution import OPERATION as RADIAL_OPERATION

FORMS_HINT = " Rows of radial convolutions compare weights formed in registers with other forms of the same layer, all with Equitune's convolution; accelerate takes the fastest by the tuned database, and in the place of a GiB of weights registers if these take up to 1.05 times as long."  # noqa: E501


def suite(rows: Sequence[SuiteRow], sources: Sources) -> Markup:
    """The whole section."""
    if not rows:
        return tag("p", "No bench has been run on this device. To add rows, run equitune bench --suite.", class_="hint")
    hint = "Each row times the tuned kernel and all its peers in turns. Speed-up: the fastest peer's time over the tuned time, rounded down. A peer with larger errors than the row asks (TF32 where float32 is asked) is timed, not compared. Means are geometric."  # noqa: E501
    if any(row.text("operation") == RADIAL_OPERATION for row in rows):
        hint += FORMS_HINT
    every = tag("details", tag("summary", f"Every row of the bench: {rows_text(len(rows))}"), _table(rows, sources))
    parts = (tag("p", hint, class_="hint"), _losses(rows), summary(rows), _figure(rows))
    return join((*parts, _absent(rows), _prices(rows), every))


def _losses(rows: Sequence[SuiteRow]) -> Markup:
    """The rows slower than a peer, in words, worst first."""
    lost = sorted((row for row in rows if row.loses), key=lambda row: -1.0 if math.isnan(row.ratio) else row.ratio)
    if not lost:
        judged = any(not math.isnan(row.ratio) for row in rows)
        return tag("p", "No row is slower than its fastest peer." if judged else "No row has a peer's time.")
    lines = []
    for row in lost:
        kind = ", deterministic" if row.deterministic else ""
        facts = ", ".join(row.text(key) for key in ("dtype", "layout", "operation"))
        what = f"{row.text('label')} on {row.graph}, {facts}{kind}, {direction_name(row.which)}"
        peer = contender_name(row.peer or "")
        end = (
            f"failed: {row.reason(TUNED)}" if math.isnan(row.ratio) else f"{floored_ratio(row.ratio)} as fast as {peer}"
        )
        lines.append(tag("li", f"{what}: ", tag("strong", end)))
    head = f"Slower than the fastest peer: {len(lost)} of {rows_text(len(rows))}"
    return tag("div", tag("h3", head), tag("ul", *lines), class_="losses")


def _absent(rows: Sequence[SuiteRow]) -> Markup | None:
    """Peers without a time, in how many rows and why: ratios say nothing about them there."""
    kinds: dict[tuple[str, bool], set[str]] = {}
    for row in rows:
        kinds.setdefault((row.text("operation"), row.deterministic), set()).update(row.times)
    told = Counter(
        (name, _in_short(row.reason(name), name) if name in row.times else "not measured there")
        for row in rows
        for name in sorted(kinds[row.text("operation"), row.deterministic] - {TUNED, DEFAULT})
        if math.isnan(row.times.get(name, math.nan))
    )
    if not told:
        return None
    lines = [
        tag("li", f"{contender_name(name)}: {reason} ({rows_text(number)})")
        for (name, reason), number in sorted(told.items())
    ]
    cases = sum(told.values())
    return tag("details", tag("summary", f"Peers without a time: {cases} cases"), tag("ul", *lines))


def _in_short(reason: str, name: str) -> str:
    """The first sentence of a peer's reason, without its name."""
    return reason.replace(f"PeerError: {name}: ", "").replace("PeerError: ", "").split(". ")[0][:160]


def _figure(rows: Sequence[SuiteRow]) -> Markup | None:
    normal = [row for row in rows if not row.deterministic and not math.isnan(row.ratio)]
    if not normal:
        return None
    lanes: dict[str, list[float]] = {}
    for name in passes(normal):
        for row in normal:
            if row.which == name:
                lanes.setdefault(f"{direction_name(name)}, {GROUPS.get(row.group, row.group)}", []).append(row.ratio)
    note = "One dot per row, logarithmic axis. Bars, numbers: geometric means. Shaded: the tuned kernel is slower."
    caption = tag("figcaption", "Speed-up over the fastest peer", tag("small", note))
    ends = [*GROUPS.values()]
    # By group, then by pass, as in the table.
    order = sorted(lanes, key=lambda lane: next((n for n, end in enumerate(ends) if lane.endswith(end)), len(ends)))
    drawn = {name: lanes[name] for name in order}
    figure = tag("figure", caption, suite_figures.ratio_dots(drawn, "suite-ratios"), class_="wide")
    return tag("details", tag("summary", f"Each row as a dot: {rows_text(len(normal))}"), folded(figure))


def _prices(rows: Sequence[SuiteRow]) -> Markup | None:
    """Every deterministic row with the normal row of its kernel."""
    pairs = prices(rows)
    if not pairs:
        return None
    columns = [Column("Problem"), Column("Graph", note="edges, nodes"), Column("dtype", note="layout"), Column("Pass")]
    columns += [Column(name, True) for name in ("Normal", "Deterministic")]
    columns += [Column("Cost", True, "deterministic / normal")]
    body = []
    for normal, row, price in pairs:
        missing = math.isnan(price)
        body.append([
            *_identity(row), Cell(direction_name(row.which), row.which), _ours(normal), _ours(row),
            Cell(MISSING if missing else ratio_text(price), None if missing else price),
        ])  # fmt: skip
    text = "Cost of bitwise reproducible results: deterministic mode against normal mode"
    head = tag("summary", f"Deterministic mode: {rows_text(len(pairs))}")
    return tag("details", head, table(text, columns, body, sortable=True))


def _identity(row: SuiteRow) -> list[Cell]:
    kind = f"{row.text('dtype')} {row.text('layout')}"
    return [
        Cell(row.text("label"), row.text("label")),
        Cell(row.graph or MISSING, None if math.isnan(row.edges) else f"{row.edges:09.0f} {row.graph}", row.size),
        Cell(row.text("dtype"), kind, row.text("layout")),
    ]


def row_cells(row: SuiteRow) -> list[Cell]:
    """Cells that identify a row: problem, graph, dtype, operation and pass."""
    operation = row.text("operation")
    note = "deterministic" if row.deterministic else None
    kernel = Cell(operation, f"{operation} {row.deterministic}", note)
    return [*_identity(row), kernel, Cell(direction_name(row.which), row.which)]


def _table(rows: Sequence[SuiteRow], sources: Sources) -> Markup:
    """Every row, sortable; a row expands to all contenders, raw samples, schedules and their source."""
    priced = {id(row): price for _, row, price in prices(rows)}
    columns = [Column("Problem"), Column("Graph", note="edges, nodes", choice=True)]
    columns += [Column("dtype", note="layout", choice=True), Column("Operation", choice=True)]
    columns += [Column("Pass", choice=True), Column("Tuned", True)]
    columns += [
        Column("Fastest peer", True),
        Column("Speed-up", True, "over that peer"),
        Column("Traffic floor", True, "floor / tuned"),
    ]
    columns += [Column("Default", True, "default / tuned")]
    told: list[tuple[Column, Callable[[SuiteRow], Cell], bool]] = [
        (Column("Registers", True, "per direction; spills"), _registers, any(_has_registers(row) for row in rows)),
        (Column("Extra memory", True, "fastest peer's"), _memory, any(row.memory(TUNED) >= 0 for row in rows)),
        (Column("Host time", True, "least of the peers"), _host, any(TUNED in row.host_us for row in rows)),
        (Column("Largest error", True, "relative"), _error, any(row.accuracy() for row in rows)),
    ]
    more = [(column, cell) for column, cell, known in told if known]  # old files have none of these
    groups = []
    for row in rows:
        cells = [
            *row_cells(row),
            _ours(row, priced.get(id(row))), _peer(row), _ratio(row), _floor(row), _default(row),
            *(cell(row) for _, cell in more),
        ]  # fmt: skip
        groups.append(Group(cells, details(row, sources), "lost" if row.loses else ""))
    return grouped_table("Every row of the bench", [*columns, *(column for column, _ in more)], groups)


def _time(row: SuiteRow, contender: str, note: str | None = None, kind: str = "") -> Cell:
    if contender not in row.times:
        return Cell(MISSING)
    time_us = row.times[contender]
    if math.isnan(time_us):
        return Cell("failed", None, None, "failed", row.reason(contender))
    return Cell(time_text(time_us), time_us, note, kind)


def _ours(row: SuiteRow, price: float | None = None) -> Cell:
    note = None if price is None or math.isnan(price) else f"{ratio_text(price)} the normal"
    return _time(row, TUNED, note, "best")


def _peer(row: SuiteRow) -> Cell:
    return _time(row, row.peer, contender_name(row.peer)) if row.peer else Cell(MISSING, None, "no peer ran")


def _ratio(row: SuiteRow) -> Cell:
    if math.isnan(row.ratio):
        return Cell("lost", 0.0, "tuned failed", "slow") if row.loses else Cell(MISSING)
    return Cell(floored_ratio(row.ratio), row.ratio, "slower" if row.loses else None, "slow" if row.loses else "")


def _floor(row: SuiteRow) -> Cell:
    share = row.floor_us / row.time_us
    return Cell(MISSING) if math.isnan(share) else Cell(f"{share:.0%}", share, time_text(row.floor_us))


def _default(row: SuiteRow) -> Cell:
    return _time(row, DEFAULT, None if math.isnan(row.default_ratio) else ratio_text(row.default_ratio))


def _has_registers(row: SuiteRow) -> bool:
    return any("registers" in found for found in row.resources(TUNED).values())


def _registers(row: SuiteRow) -> Cell:
    """Registers by direction in the order of the pass, separated by a slash."""
    found = row.resources(TUNED)
    if not _has_registers(row):
        return Cell(MISSING)
    numbers = [found[name].get("registers") for name in found]
    spills = [found[name].get("spill_bytes") or 0 for name in found]
    title = "; ".join(f"{direction_name(name)}: {registers} registers, {spill} bytes spilled"
                      for name, registers, spill in zip(found, numbers, spills, strict=True))  # fmt: skip
    shown = " / ".join(MISSING if given is None else str(given) for given in numbers)
    note = f"{' / '.join(map(str, spills))} B" if any(spills) else "no spills"
    return Cell(shown, max(given or 0 for given in numbers), note, "", title)


def _memory(row: SuiteRow) -> Cell:
    ours, theirs = row.memory(TUNED), row.memory(row.peer)
    if math.isnan(ours):
        return Cell(MISSING)
    note = MISSING if math.isnan(theirs) else f"{'exceeds ' if row.exceeds_memory else ''}{bytes_text(theirs)}"
    return Cell(bytes_text(ours), ours, note, "slow" if row.exceeds_memory else "")


def _host(row: SuiteRow) -> Cell:
    ours = row.host_us.get(TUNED)
    if ours is None:
        return Cell(MISSING)
    peers = {name: time for name, time in row.host_us.items() if name not in (TUNED, DEFAULT)}
    least = min(peers, key=lambda name: peers[name], default=None)
    note = None if least is None else f"{contender_name(least)} {time_text(peers[least])}"
    return Cell(time_text(ours), ours, note, "slow" if least and ours > peers[least] else "")


def _error(row: SuiteRow) -> Cell:
    found = row.accuracy()
    if found is None:
        return Cell(MISSING)
    bad = math.isnan(found.error)
    return Cell(error_text(found.error), None if bad else found.error, found.place, "slow" if bad else "")
