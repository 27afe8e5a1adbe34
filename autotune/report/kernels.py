"""The sections about kernels: the suite's rows with their summary and details, and the roofline."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from autotune.measure.timing import LEVEL, ratio_interval
from autotune.report import charts
from autotune.report.charts import knob_cell, samples, union, value_text
from autotune.report.devices import PASSES, DeviceData
from autotune.report.markup import Cell, Column, Group, Markup, folded, grouped_table, join, table, tag
from autotune.report.rows import GROUPS, SuiteRow, mapping, number, prices
from autotune.report.sources import Sources
from autotune.text import (
    DEFAULT,
    MISSING,
    TUNED,
    bytes_text,
    contender_name,
    direction_name,
    error_text,
    floored_ratio,
    geometric_mean,
    ratio_text,
    time_text,
)
from autotune.workload.kinds.radial_convolution import OPERATION as RADIAL_OPERATION

# Section on the kernels: every bench row against its fastest peer, as means, a figure and tables.

FORMS_HINT = " Rows of radial convolutions compare weights formed in registers with other forms of the same layer, all with Equitune's convolution; accelerate takes the fastest by the tuned database, and in the place of a GiB of weights registers if these take up to 1.05 times as long."  # noqa: E501


def suite(rows: Sequence[SuiteRow], sources: Sources) -> Markup:
    """The whole section."""
    if not rows:
        return tag("p", "No bench has been run on this device. To add rows, run equitune bench --suite.", class_="hint")
    hint = "Each row times the tuned kernel and all its peers in turns. Speed-up: the fastest peer's time over the tuned time, rounded down. A peer with larger errors than the row asks (TF32 where float32 is asked) is timed, not compared. Means are geometric."  # noqa: E501
    if any(row.text("operation") == RADIAL_OPERATION for row in rows):
        hint += FORMS_HINT
    every = tag(
        "details", tag("summary", f"Every row of the bench: {rows_text(len(rows))}"), _suite_table(rows, sources)
    )
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
    figure = tag("figure", caption, charts.ratio_dots(drawn, "suite-ratios"), class_="wide")
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


def _suite_table(rows: Sequence[SuiteRow], sources: Sources) -> Markup:
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
            _ours(row, priced.get(id(row))), _peer(row), _row_ratio(row), _floor(row), _default(row),
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


def _row_ratio(row: SuiteRow) -> Cell:
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


# Expanded details of a suite row: all contenders, raw samples, schedules, their source and resources.


def details(row: SuiteRow, sources: Sources) -> Markup:
    """A closed ``details`` element."""
    failed = sum(math.isnan(time) for time in row.times.values())
    parts = [f"{len(row.times)} contenders" + (f" ({failed} failed)" if failed else "")]
    parts += ["schedules"] if row.schedules(TUNED) else []
    parts += ["resources"] if row.resources(TUNED) else []
    raw = {name: row.samples(name) for name in _order(row)}
    drawn = samples(raw, _what(row))
    parts += ["raw samples"] if drawn else []
    kernels = (row.record, row.schedules(TUNED))
    source = sources.of(*kernels)
    parts += ["source"] if sources.written(*kernels) else []
    shown = (_contenders(row), drawn, _schedules(row), source, _resources(row))
    return tag("details", tag("summary", ", ".join(parts)), tag("div", folded(join(shown)), class_="opened"))


def _what(row: SuiteRow) -> str:
    return f"{row.text('label')} on {row.graph}, {direction_name(row.which)}"


def _order(row: SuiteRow) -> list[str]:
    """Ours first, then the peers by time, then those that failed."""
    last = {TUNED: -2.0, DEFAULT: -1.0}
    return sorted(row.times, key=lambda n: last.get(n, math.inf if math.isnan(row.times[n]) else row.times[n]))


def _contenders(row: SuiteRow) -> Markup:
    columns = [Column("Contender"), Column("Time", True, "quartiles"), Column("Ratio", True, "to the tuned time")]
    columns += [Column("Extra memory", True), Column("Host time", True)]
    ordered = any(not math.isnan(row.order_us(name)) for name in row.times)
    columns += [Column("Ordering", True, "of a new graph")] if ordered else []
    columns += [Column("Largest error", True), Column("Note")]
    body = [_contender(row, name, ordered) for name in _order(row)]
    floor = "" if math.isnan(row.floor_us) else f"; traffic floor {time_text(row.floor_us)}"
    copied = "" if math.isnan(row.copy_us) else f"; a copy of as many bytes takes {time_text(row.copy_us)}"
    return table(f"Contenders: {_what(row)}{floor}{copied}", columns, body)


def _contender(row: SuiteRow, name: str, ordered: bool) -> list[Cell]:
    time_us, memory, found = row.times[name], row.memory(name), row.accuracy(name)
    failed = math.isnan(time_us)
    timing = mapping(mapping(row.record.get("times")).get(name))
    low, high = (number(timing.get(key)) for key in ("q1_us", "q3_us"))
    spread = None if math.isnan(low + high) else f"{time_text(low)} to {time_text(high)}"
    ratio = time_us / row.time_us
    return [
        Cell(contender_name(name), None, _role(row, name)),
        Cell("failed", None, None, "failed") if failed else Cell(time_text(time_us), time_us, spread),
        Cell(MISSING if math.isnan(ratio) else ratio_text(ratio), None, _interval(row, name)),
        Cell(MISSING if math.isnan(memory) else bytes_text(memory)),
        Cell(time_text(row.host_us.get(name, math.nan))),
        *([Cell(time_text(row.order_us(name)))] if ordered else []),
        Cell(MISSING) if found is None else Cell(error_text(found.error), None, found.place),
        Cell(row.reason(name) if failed else "", kind="wrap"),
    ]


def _role(row: SuiteRow, name: str) -> str | None:
    if name in row.less_accurate:
        return "less accurate: not compared"
    return "fastest peer" if name == row.peer else None


def _interval(row: SuiteRow, name: str) -> str | None:
    """Interval of the ratio to the tuned time, for default and fastest peer; paired by rounds, as sampled in turn."""
    ours, theirs = row.samples(TUNED), row.samples(name)
    if name not in (DEFAULT, row.peer) or not ours or not theirs:
        return None
    low, high = ratio_interval(ours, theirs, paired=True)
    return f"{low:.3f} to {high:.3f} at {LEVEL:.0%}" if math.isfinite(high) else None


def _schedules(row: SuiteRow) -> Markup | None:
    """One line per direction, one column per knob; differences are marked, with the default's value below."""
    chosen, default = row.schedules(TUNED), row.schedules(DEFAULT)
    names = [name for name in union(chosen.values()) if name != "backend"]
    if not names:
        return None
    origins = mapping(row.record.get("origins"))
    body = []
    for direction, knobs in chosen.items():
        plain: dict[str, Any] = default.get(direction, {})
        cells = [knob_cell(knobs.get(name), plain.get(name), bool(plain)) for name in names]
        origin = origins.get(direction)
        body.append([Cell(direction_name(direction), None, None if origin is None else str(origin)), *cells])
    columns = [Column("Direction"), *(Column(name, True) for name in names)]
    return table("Tuned schedules. A dot marks knobs that differ from the default", columns, body)


def _resources(row: SuiteRow) -> Markup | None:
    ours = {name: row.resources(name) for name in (TUNED, DEFAULT)}
    names = union(found for by_direction in ours.values() for found in by_direction.values())
    if not names:
        return None
    body = [
        [Cell(direction_name(direction)), Cell(contender_name(contender)),
         *(Cell(value_text(found.get(name))) for name in names)]
        for contender, by_direction in ours.items()
        for direction, found in by_direction.items()
    ]  # fmt: skip
    columns = [Column("Direction"), Column("Schedule"), *(Column(name.replace("_", " "), True) for name in names)]
    return table("Resources reported by the compiler", columns, body)


# What was gained on each kind of kernel, in one table: rows of a kind and pass have one mean.


def summary(rows: Sequence[SuiteRow]) -> Markup:
    """One line per kind and pass. Deterministic rows are a kind of their own."""
    columns = [Column("Kind"), Column("Pass", choice=True), Column("Rows", True)]
    columns += [Column("Speed-up", True, "mean over the fastest peer"), Column("Least", True), Column("Slower", True)]
    columns += [Column("Untuned", True, "mean over the fastest peer"), Column("Least untuned", True)]
    columns += [
        Column("Untuned default", True, "its time / tuned time"),
        Column("Traffic floor", True, "tuned / floor"),
    ]
    columns += [Column("Extra memory", True, "fastest peer's = 1"), Column("More memory", True, "rows")]
    columns += [Column("New graph", True, "speed-up if each call orders one")]
    columns += [Column("Normal mode", True, "deterministic / normal")]
    priced = {id(row): price for _, row, price in prices(rows)}
    body = []
    for kind in dict.fromkeys((*GROUPS, *(row.group for row in rows))):
        for deterministic in (False, True):
            inside = [row for row in rows if row.group == kind and row.deterministic is deterministic]
            title = kind.capitalize() + (", deterministic" if deterministic else "")
            for which in passes(inside):
                body.append(_line(title, which, [row for row in inside if row.which == which], priced))
    # Columns that only some records have.
    told = [True] * (len(columns) - 2) + [any(row.new_graph_ratio > 0 for row in rows), bool(priced)]
    columns, body = list(itertools.compress(columns, told)), [list(itertools.compress(line, told)) for line in body]
    return table("Means by kind and pass", columns, body, sortable=True)


def _line(kind: str, which: str, rows: Sequence[SuiteRow], priced: dict[int, float]) -> list[Cell]:
    ratios = [row.ratio for row in rows if not math.isnan(row.ratio)]
    untuned = [row.untuned_ratio for row in rows if not math.isnan(row.untuned_ratio)]
    lost = sum(row.loses for row in rows)
    held = [row for row in rows if not math.isnan(row.memory(TUNED) + row.memory(row.peer))]
    more = sum(row.exceeds_memory for row in held)
    of = f"{len(ratios)} of {len(rows)}" if len(ratios) < len(rows) else str(len(rows))
    return [
        Cell(kind),
        Cell(direction_name(which), which),
        Cell(of, len(rows)),
        _summary_ratio(geometric_mean(ratios), floored_ratio, "best"),
        _least(ratios),
        Cell(str(lost) if ratios or lost else MISSING, None, None, "slow" if lost else ""),
        _summary_ratio(geometric_mean(untuned), floored_ratio),
        _least(untuned),
        _mean(rows, lambda row: row.default_ratio),
        _mean(rows, lambda row: row.over_floor),
        _mean(rows, _memory_ratio),
        Cell(str(more) if held else MISSING, None, None, "slow" if more else ""),
        _summary_ratio(geometric_mean(row.new_graph_ratio for row in rows), floored_ratio),
        _mean([row for row in rows if id(row) in priced], lambda row: priced[id(row)]),
    ]


def _memory_ratio(row: SuiteRow) -> float:
    theirs = row.memory(row.peer)
    return row.memory(TUNED) / theirs if theirs > 0 else math.nan


def _mean(rows: Iterable[SuiteRow], value: Callable[[SuiteRow], float]) -> Cell:
    return _summary_ratio(geometric_mean(value(row) for row in rows), ratio_text)


def _least(ratios: Sequence[float]) -> Cell:
    least = min(ratios, default=math.nan)
    return _summary_ratio(least, floored_ratio, "slow" if least < 1 else "")


def _summary_ratio(value: float, text: Callable[[float], str], kind: str = "") -> Cell:
    return Cell(MISSING) if math.isnan(value) else Cell(text(value), value, None, kind)


def rows_text(number: int) -> str:
    return f"{number} row" if number == 1 else f"{number} rows"


def passes(rows: Iterable[SuiteRow]) -> list[str]:
    met = {row.which for row in rows}
    return [name for name in PASSES if name in met] + sorted(met - set(PASSES))


# Section that holds each kernel's traffic to what the device's memory gives.

ROOFLINE_HINT = "A kernel must read each input and write each output once. A dot is a row of the bench: these bytes, and how many of them the tuned kernel moves a second. The line is a copy of as many bytes, measured in the same run; dashed: a large copy. Dots on the line are as fast as memory allows; dots far below it wait for arithmetic or for uneven work. The records hold no operation counts, so there is no roof for arithmetic."  # noqa: E501


def roofline(data: DeviceData) -> Markup | None:
    """The whole section; None if no row has a time and its bytes."""
    rows = [row for row in data.suite if not row.deterministic and row.bytes / row.time_us > 0]
    if not rows:
        return None
    points: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys((*GROUPS, *(row.group for row in rows))):
        given = [(row.bytes, 1e6 * row.bytes / row.time_us) for row in rows if row.group == name]
        if given:
            points[GROUPS.get(name, name)] = given
    # The traffic floor is the time at the rate of a large copy.
    peak = max((1e6 * row.bytes / row.floor_us for row in rows if row.floor_us > 0), default=math.nan)
    copies = _copies(rows)
    told = "; ".join(f"{name} {len(given)} rows up to {bytes_text(max(rate for _, rate in given))}/s"
                     for name, given in points.items())  # fmt: skip
    note = told + ("." if math.isnan(peak) else f"; a large copy {bytes_text(peak)}/s.")
    caption = tag("figcaption", "Bytes moved a second", tag("small", "One dot per row, both axes logarithmic"))
    drawn = tag("figure", caption, charts.roofline(points, copies, peak, note), class_="wide")
    return join((tag("p", ROOFLINE_HINT, class_="hint"), drawn, _roofline_table(rows)))


def _copies(rows: Sequence[SuiteRow]) -> list[tuple[float, float]]:
    """The median rate of copies, by size."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if row.copy_us > 0:
            found.setdefault(row.bytes, []).append(1e6 * row.bytes / row.copy_us)
    return sorted((size, median(rates)) for size, rates in found.items())


def _roofline_table(rows: Sequence[SuiteRow]) -> Markup:
    """How near each kind comes to a copy of as many bytes, and the fastest peers to it."""
    columns = [Column("Kind"), Column("Rows", True), Column("Equitune", True, "mean share of the copy's rate")]
    columns += [Column("Highest", True), Column("Fastest peer", True, "mean share of the copy's rate")]
    body = []
    for name in dict.fromkeys((*GROUPS, *(row.group for row in rows))):
        inside = [row for row in rows if row.group == name and _least_us(row) > 0]
        if not inside:
            continue
        ours = [_least_us(row) / row.time_us for row in inside]
        theirs = geometric_mean(_least_us(row) / row.peer_us for row in inside)
        body.append([Cell(name.capitalize()), Cell(str(len(inside))), _share(geometric_mean(ours)), _share(max(ours)),
                     _share(theirs)])  # fmt: skip
    return table("Share of the rate of a copy of as many bytes", columns, body)


def _least_us(row: SuiteRow) -> float:
    """The time of a copy of as many bytes, or of the traffic floor where it was not measured."""
    return row.floor_us if math.isnan(row.copy_us) else row.copy_us


def _share(value: float) -> Cell:
    return Cell(MISSING) if math.isnan(value) else Cell(f"{value:.0%}", number(value))
