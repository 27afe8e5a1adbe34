"""Stored rows of comparisons: ``results/bench/DEVICE.json``, one row per workload and pass.

Rows are plain data, which :class:`SuiteRow` reads. A newer row replaces the one with its identity, and the file is
replaced whole.
"""

from __future__ import annotations

import functools
import io
import math
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import filelock

from autotune.database.maintenance import driver_version
from autotune.database.store import device_record, replace_file, text_of_lines
from autotune.measure.timing import LEVEL, SLOWER, range_text, ratio_interval, verdict
from autotune.text import DEFAULT, TUNED, counted, direction_name, geometric_mean, kind_text, time_text, without_time
from autotune.workload.config import find_problem
from autotune.workload.kind import KernelKind
from autotune.workload.known_kinds import KINDS, OPERATIONS, kernel_kind
from autotune.workload.workload import GraphClass
from kernelgen.device import DeviceFacts
from kernelgen.errors import EquituneError
from kernelgen.files import parse_json

SCHEMA = 1
# Fields whose figures vary by more than their fourth digit from run to run.
ROUNDED, DIGITS = ("errors", "certificates", "order_ms", "joules"), 4
IDENTITY = ("problem", "operation", "dtype", "layout", "graph_class", "pass")
Row = dict[str, Any]


def identity_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key of a row. Rows older than the deterministic mode lack that field."""
    return (*(row[name] for name in IDENTITY), row.get("deterministic", False))


@functools.lru_cache(maxsize=4096)
def _largest_allowed(operation: str, problem: str, dtype: str) -> float:
    """The relative error that our kernels of a problem may have; infinite for a problem that is not known here."""
    try:
        return kernel_kind(operation).tolerance(find_problem(problem), dtype)
    except (EquituneError, KeyError):
        return math.inf


def lost_peers(stored: Row | None, row: Row) -> dict[str, str]:
    """Peers that failed, with the reason, which have a time in the stored row of the same kernels, software and code.

    What failed is then this machine, not the peer: a library that it lacks, or a compiler that was disturbed.
    """
    if stored is None or any(stored.get(name) != row.get(name) for name in ("sources", "schedules", "software")):
        return {}
    failed = {name: str(result["error"]) for name, result in row["times"].items() if "error" in result}
    timed = {name for name, result in stored["times"].items() if "error" not in result} - {TUNED, DEFAULT}
    before, now = stored.get("code", {}), row.get("code", {})
    timed = {name for name in timed if before.get(name, now.get(name)) == now.get(name)}
    return {name: reason for name, reason in failed.items() if name in timed}


def bench_path(folder: Path, facts: DeviceFacts) -> Path:
    return folder / "bench" / f"{facts.slug}.json"


def stored_rows(folder: Path, facts: DeviceFacts) -> list[Row]:
    """The device's rows; none if the file is missing or invalid."""
    return _read(bench_path(folder, facts)) or []


def _read(path: Path) -> list[Row] | None:
    """Rows of a file; None if it is invalid."""
    if not path.exists():
        return []
    try:
        rows = parse_json(path.read_bytes())["rows"]
        for row in rows:
            _ = identity_of(row), row["times"].keys()
        return rows
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def store_rows(folder: Path, facts: DeviceFacts, rows: Sequence[Row]) -> list[Row]:
    """Merge rows into the device's file atomically, and return what it has of them; an invalid file is moved aside.

    In the place of a row with :func:`lost_peers` the stored one stays, with the date of this try.
    """
    path = bench_path(folder, facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = folder / "studies" / f"{facts.slug}-bench.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(lock, timeout=60):
        before = _read(path)
        if before is None:
            path.rename(path.with_name(f"{path.stem}.corrupt-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}.json"))
        merged = {identity_of(row): row for row in before or []}
        stored = [merged.get(identity_of(row)) for row in rows]
        kept = [
            old | {"tried": row["date"]} if old is not None and lost_peers(old, row) else row
            for old, row in zip(stored, rows, strict=True)
        ]
        merged |= {identity_of(row): row for row in kept}
        replace_file(path, record_text(facts, [merged[identity] for identity in sorted(merged)]))
    return kept


def record_text(facts: DeviceFacts, rows: Sequence[Row]) -> str:
    """A bench record as JSON with a line for each row, which ``equitune report --compare`` reads."""
    head = {"schema": SCHEMA, "device": device_record(facts, driver_version(facts))}
    return text_of_lines(head, "rows", map(without_noise, rows))


def without_noise(row: Row) -> Row:
    """The row with as many digits of its errors, certificates and ordering times as mean something."""
    return {name: _rounded(value) if name in ROUNDED else value for name, value in row.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


# A stored row with the values that tables and pages need: ratios, errors and resources.
#
# Rows of older files lack some keys, and a contender may have failed: unknown values are NaN, None or empty.


def number(value: Any) -> float:
    """A finite float, or NaN for None, text, infinities and missing values."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def positive(value: Any) -> float:
    """A finite positive float, else NaN."""
    return number(value) if number(value) > 0 else math.nan


def mapping(value: Any) -> dict[str, Any]:
    """``value`` if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def sample_times(value: Any) -> list[float]:
    """The valid times in a stored list of samples, without null, text and values that are not positive."""
    return [number(item) for item in (value if isinstance(value, list | tuple) else ()) if number(item) > 0]


@dataclass(frozen=True)
class Accuracy:
    """A relative error against float64 e3nn, NaN if not a number. ``place``: direction, output, worst block."""

    error: float
    place: str


class SuiteRow:
    """One row of the bench; times in microseconds, memory in bytes. A ratio above 1: we are faster."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        # The pass, such as ``force_step``.
        self.which = self.text("pass")
        graph, resources = mapping(record.get("graph")), mapping(record.get("resources"))
        self.graph = str(graph.get("name") or self.text("graph_class"))
        self.edges, self.nodes = number(graph.get("edges")), number(graph.get("nodes"))
        self.deterministic = record.get("deterministic") is True
        # How it differs from a normal convolution: plain, deterministic, both or nothing.
        self.form = kind_text(self.text("operation"), self.deterministic)
        # The row in words, and in a line of a terminal.
        label = self.text("label")
        self.what = f"{label} on {self.graph}, {direction_name(self.which)}"
        self.kernel_text = f"{self.text('operation')} {self.text('dtype')}{' deterministic' * self.deterministic}"
        self.name = f"{label} on {self.graph}, {self.kernel_text}, {self.which}"
        # The key shared by the deterministic and the normal row of a kernel; its end are the pass and the graph.
        parts = ("label", "problem", "operation", "dtype", "layout", "graph_class", "pass")
        self.kernel = (*map(self.text, parts), self.graph)
        # Knobs of the default, as an entry keeps them; None in other records.
        self.default_schedule = self._timing(DEFAULT).get("schedule")
        # Contender -> median; NaN if it failed.
        self.times = {name: positive(self._timing(name).get("time_us")) for name in mapping(record.get("times"))}
        self.time_us, self.default_us = (self.times.get(name, math.nan) for name in (TUNED, DEFAULT))
        self.default_ratio = self.default_us / self.time_us
        # Compulsory traffic, its time, and that of a copy of as many bytes in the same run, which older records lack.
        self.bytes = self.number("bytes")
        self.floor_us, self.copy_us = positive(record.get("floor_us")), self.number("copy_us")
        self.least_us = self.floor_us if math.isnan(self.copy_us) else self.copy_us
        self.over_floor = self.time_us / self.floor_us
        # Traffic that ``ncu`` counted, of an entry's row.
        self.dram_bytes = number(resources.get("dram_read_bytes")) + number(resources.get("dram_write_bytes"))
        # Contenders that are timed, but not compared, such as TF32 products for ``ieee``: their errors are larger than
        # those of our kernels may be. An entry of the database keeps no peer's errors: there the peer's name tells.
        problem = self.text("problem")
        limit = _largest_allowed(self.text("operation"), problem, self.text("dtype"))
        worst = {name: self.accuracy(name) for name in mapping(record.get("errors"))}
        named = {name for name in record.get("peers") or () if name.endswith("-tf32") and "|ieee|" in problem}
        self.less_accurate = named | {name for name, found in worst.items() if found and found.error > limit}
        # The others; and the fastest of these that has a time.
        peers = [name for name in self.times if name not in {TUNED, DEFAULT} | self.less_accurate]
        timed = [name for name in peers if self.times[name] > 0]
        self.peer = min(timed, key=lambda name: (self.times[name], name), default=None)
        self.peer_us = self.times[self.peer] if self.peer else math.nan
        # Speed-ups over the fastest peer: ours, the untuned default's, and ours if every call met a new graph.
        self.ratio, self.untuned_ratio = self.peer_us / self.time_us, self.peer_us / self.default_us
        with_order = (time_us for name in peers if (time_us := self.times[name] + self.order_us(name)) > 0)
        self.new_graph_ratio = min(with_order, default=math.nan) / (self.time_us + self.order_us())
        # Whether it is slower than the fastest peer, or failed where a peer did not.
        self.loses = self.ratio < 1 or (math.isnan(self.time_us) and self.peer is not None)
        theirs = self.memory(self.peer)
        self.memory_ratio = self.memory(TUNED) / theirs if theirs > 0 else math.nan
        # Whether it needs more memory than the fastest peer; False if either is unknown.
        self.exceeds_memory = self.memory(TUNED) > theirs
        # Contender -> host time of a call; the peer whose call costs the host least.
        host_us = {name: number(value) for name, value in mapping(record.get("host_us")).items()}
        self.host_us = {name: time_us for name, time_us in host_us.items() if not math.isnan(time_us)}
        others = self.host_us.keys() - {TUNED, DEFAULT}
        self.fastest_host = min(others, key=lambda name: (self.host_us[name], name), default=None)
        # By what its schedules were tuned, where it was not time.
        self.objectives = " and ".join(sorted(set(map(str, mapping(record.get("objectives")).values()))))

    def text(self, key: str) -> str:
        return str(self.record.get(key) or "")

    def number(self, key: str) -> float:
        return number(self.record.get(key))

    @property
    def kind(self) -> KernelKind:
        operation = self.text("operation")
        return kernel_kind(operation) if operation in OPERATIONS else KINDS[0]

    @property
    def size(self) -> str:
        """What its graph has, such as ``460,710 edges, 5,184 nodes``; empty if unknown."""
        return self.kind.size_text(self.edges, self.nodes)

    @property
    def group(self) -> str:
        return self.kind.group(self.text("problem"), self.text("operation"), self.text("dtype"))

    def _timing(self, contender: str) -> dict[str, Any]:
        return mapping(mapping(self.record.get("times")).get(contender))

    def reason(self, contender: str) -> str:
        """Why a contender has no time."""
        return str(self._timing(contender).get("error") or "no time was recorded")

    def order_us(self, contender: str = TUNED) -> float:
        """Time of ordering a graph that is met for the first time (``order_ms``); NaN if it was not measured."""
        order_ms = self.record.get("order_ms")
        ours = order_ms if contender == TUNED else None  # older rows have one number, which is ours
        return 1e3 * number(order_ms.get(contender) if isinstance(order_ms, dict) else ours)

    def memory(self, contender: str | None) -> float:
        return number(mapping(self.record.get("memory")).get(contender or ""))

    def joules(self, contender: str | None) -> float:
        """Of a call; NaN if it was not measured."""
        return number(mapping(self.record.get("joules")).get(contender or ""))

    @property
    def noise(self) -> str:
        """Why not to trust its times, by any of its contenders; empty if they may be trusted."""
        said = (mapping(self._timing(name).get("conditions")).get("noise") for name in self.times)
        return next(filter(None, said), "")

    def samples(self, contender: str) -> list[float]:
        """Raw samples in measured order, in microseconds, without invalid values."""
        return sample_times(self._timing(contender).get("samples_us"))

    def quartiles_us(self, contender: str) -> tuple[float, float]:
        q1, q3 = (number(self._timing(contender).get(key)) for key in ("q1_us", "q3_us"))
        return q1, q3

    def interval(self, contender: str) -> str:
        """Of the ratio to the tuned time, for default and fastest peer; paired by rounds, as sampled in turn."""
        ours, theirs = self.samples(TUNED), self.samples(contender)
        if contender not in (DEFAULT, self.peer) or not ours or not theirs:
            return ""
        low, high = ratio_interval(ours, theirs, paired=True)
        return f"{low:.3f} to {high:.3f} at {LEVEL:.0%}" if math.isfinite(high) else ""

    def stored_interval(self, contender: str) -> tuple[float, float] | None:
        """Of the ratio to the tuned time, as an entry keeps it, without samples; None if it does not."""
        gain = {} if self.objectives else mapping(self.record.get("gain"))  # of another objective it is no time's
        kept = gain if contender == DEFAULT else self._timing(contender)
        low, high = number(kept.get("low")), number(kept.get("high"))
        return None if math.isnan(low) or math.isnan(high) else (low, high)

    def stored_count(self, contender: str) -> int | None:
        """Of samples too few for an interval, as an entry keeps it; None if it does not."""
        kept = self._timing(contender).get("samples")
        return kept if isinstance(kept, int) else None

    def schedules(self, contender: str) -> dict[str, dict[str, Any]]:
        """Direction -> knobs."""
        return self._by_direction("schedules", contender)

    def resources(self, contender: str) -> dict[str, dict[str, Any]]:
        """Direction -> the compiler's report."""
        return self._by_direction("resources", contender)

    def _by_direction(self, key: str, contender: str) -> dict[str, dict[str, Any]]:
        found = mapping(mapping(self.record.get(key)).get(contender))
        return {direction: record for direction, record in found.items() if isinstance(record, dict)}

    def accuracy(self, contender: str = TUNED) -> Accuracy | None:
        """The largest error of a contender; one that is not a number (NaN, null, infinity) counts as the largest."""
        errors = [
            Accuracy(error, ", ".join(filter(None, (direction.replace("_", " "), slot, where))))
            for direction, slots in mapping(mapping(self.record.get("errors")).get(contender)).items()
            for slot, leaf in mapping(slots).items()
            for error, where in _leaf(leaf)
        ]
        return max(errors, key=lambda a: math.inf if math.isnan(a.error) else a.error, default=None)


def _leaf(value: Any) -> Iterator[tuple[float, str]]:
    """The error of one output and its worst block, stored as a number, or as a number and text in an object or list."""
    if value is None or isinstance(value, int | float):
        yield number(value), ""
    elif isinstance(value, dict | list):
        parts = list(value.values()) if isinstance(value, dict) else value
        numbers = [number(part) for part in parts if part is None or isinstance(part, float)]
        if numbers:
            yield numbers[0], ", ".join(str(part) for part in parts if isinstance(part, str | int))


# Format bench rows for a terminal or as Markdown: a table and a summary.

# Graphs large and dense enough to reach the floor of compulsory traffic.
FLOOR_GRAPHS = ("carbon", "water")
TARGET = 1.05
TITLE = "median times (ratio to equitune: what a model here would load)"
# Number of columns before those of contenders.
FIXED = 4
# A default that is faster by more than this fraction is reported; both were measured in one run.
TOLERANCE = 0.01


def table_lines(rows: Sequence[Row]) -> list[str]:
    """One line per row: each contender's median, and its ratio to ours with the interval. No number is truncated."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    heads, body = _table(rows)
    table = Table(*heads[:FIXED], title=TITLE, box=box.SIMPLE_HEAD)
    for name in heads[FIXED:]:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in body:
        table.add_row(*cells)
    out = io.StringIO()
    Console(file=out, width=1000, markup=False, emoji=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def markdown_text(rows: Sequence[Row]) -> str:
    """The table and the summary as Markdown."""
    heads, body = _table(rows)
    rule = ["---"] * FIXED + ["---:"] * (len(heads) - FIXED)
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, rule, *body)]
    summary = "\n".join(summary_lines(rows)).strip("\n")
    return "\n".join([f"{TITLE[0].upper()}{TITLE[1:]}:", "", *lines, "", "```text", summary, "```", ""])


def seconds_text(seconds: Mapping[str, float]) -> str:
    """What the parts of a comparison took, the longest first; parts below a twentieth of a second are left out."""
    shown = sorted(((value, part) for part, value in seconds.items() if value >= 0.05), reverse=True)
    return f"{sum(seconds.values()):.1f} s: " + ", ".join(f"{part} {value:.1f}" for value, part in shown)


def _table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Column titles and cells; the first :data:`FIXED` columns identify the row."""
    shown = [SuiteRow(row) for row in rows]
    names = list(dict.fromkeys(name for row in shown for name in row.times))
    heads = ["problem", "graph", "kernel", "pass", *names]
    return heads, [
        [row.text("label"), row.graph, row.kernel_text, row.which, *(_cell(row, name) for name in names)]
        for row in shown
    ]


def _cell(row: SuiteRow, name: str) -> str:
    if name not in row.times:
        return "-"
    time_us = row.times[name]
    if math.isnan(time_us):
        return without_time(row.reason(name))
    if math.isnan(row.time_us) or name == TUNED:
        return time_text(time_us)
    interval = range_text(row.samples(TUNED), row.samples(name), paired=True)
    return f"{time_text(time_us)} ({time_us / row.time_us:.2f}x{interval and f', {interval}'})"


def summary_lines(rows: Sequence[Row]) -> list[str]:
    shown = [SuiteRow(row) for row in rows]
    return [*_reasons(shown), "", *_speed_ups(shown), *_other_figures(shown), *_doubts(shown)]


def _reasons(rows: Sequence[SuiteRow]) -> Iterator[str]:
    """Why contenders have no time: each reason once, whatever figures it has."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name in (name for name, time_us in row.times.items() if math.isnan(time_us)):
            text = re.sub(rf"^(PeerError: )?({re.escape(name)}: )?", "", row.reason(name))
            found.setdefault((name, re.sub(r"\d+", "", text)), []).append(textwrap.shorten(text, 200))
    for (name, _), texts in found.items():
        yield f"{without_time(texts[0])} in {counted(len(texts), 'row')}, {name}: {texts[0]}"


def _speed_ups(rows: Sequence[SuiteRow]) -> Iterator[str]:
    """Over the fastest peer: means, also with the ordering of a new graph in every call, and the rows that lose."""
    compared = sorted((row for row in rows if row.ratio > 0), key=lambda row: row.ratio)
    what = "speed-up over the fastest peer, geometric mean (worst row):" if compared else "no peer has a time"
    yield f"{counted(len(rows), 'row')}; {what}"
    for kernel in dict.fromkeys((row.kernel_text, row.which) for row in rows):
        if ratios := [row.ratio for row in compared if (row.kernel_text, row.which) == kernel]:
            mean = f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})"
            yield f"  {' '.join(kernel)}: {mean}, {counted(len(ratios), 'row')}"
    # What equitune is where it is not tuned on this device, by the origins of autotune.database.lookup.
    if untuned := [found for row in rows if (found := {*mapping(row.record.get("origins")).values()} - {"exact"})]:
        origins = ", ".join(sorted(set().union(*untuned)))
        yield f"equitune is not tuned in {len(untuned)} of {counted(len(rows), 'row')}: {origins}"
    if ordered := [row for row in rows if row.new_graph_ratio > 0]:
        ratios = [row.new_graph_ratio for row in ordered]
        mean = f"{geometric_mean(ratios):.2f} ({min(ratios):.2f}), {counted(len(ratios), 'row')}"
        share = statistics.median(row.order_us() / row.time_us for row in ordered)
        yield f"with ordering of a new graph in every call: {mean}; the ordering takes {share:.2f} of a call (median)"
    if compared:
        below, lost = [row for row in compared if row.ratio < TARGET], sum(row.ratio < 1 for row in compared)
        yield f"rows with a speed-up below 1.00: {lost}; below {TARGET}: {len(below)} of {len(compared)}"
        yield from (f"  {row.ratio:.3f} {row.name} ({row.peer})" for row in below)


def _other_figures(rows: Sequence[SuiteRow]) -> Iterator[str]:
    """How near to the traffic floor, on dense graphs together and on each graph whose degrees are skewed; memory and
    energy beside the fastest peer's; the gain over the default.
    """
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        where = " and ".join(FLOOR_GRAPHS) if row.graph in FLOOR_GRAPHS else row.graph
        shown = row.graph in FLOOR_GRAPHS or GraphClass.parse(row.text("graph_class")).log2_skew
        if shown and row.kernel_text == "conv float32" and row.over_floor > 0:
            groups.setdefault((where, row.which), []).append(row.over_floor)
    for (where, which), all_ in groups.items():
        mean = f"{geometric_mean(all_):.2f} (worst {max(all_):.2f})"
        yield f"equitune / traffic floor on {where} (float32), {which}: {mean}"
    if held := [row for row in rows if not math.isnan(row.memory(TUNED) + row.memory(row.peer))]:
        more = [row for row in held if row.exceeds_memory]
        yield f"rows that need more memory than their fastest peer: {len(more)} of {len(held)}"
        for row in more:
            ours, theirs = (row.memory(name) / 2**20 for name in (TUNED, row.peer))
            yield f"  {row.name}: {ours:.1f} MiB, {row.peer} {theirs:.1f} MiB"
    if joules := [
        (row, row.joules(TUNED), row.joules(row.peer)) for row in rows if row.joules(TUNED) + row.joules(row.peer) > 0
    ]:
        mean = f"{geometric_mean(theirs / ours for _, ours, theirs in joules):.2f} (geometric mean)"
        yield f"energy of a call, fastest peer / equitune: {mean}, {counted(len(joules), 'row')}"
        for row, ours, theirs in joules:
            yield f"  {row.name}: {1e3 * ours:.3g} mJ, {row.peer} {1e3 * theirs:.3g} mJ"
    if tuned := sorted((row for row in rows if row.default_ratio > 0), key=lambda row: row.default_ratio):
        lost = [row for row in tuned if row.default_ratio < 1 and _loses(row)]
        yield f"equitune-default / equitune: {geometric_mean(row.default_ratio for row in tuned):.2f} (geometric mean)"
        if lost:
            yield f"rows where the default is faster (tune them): {len(lost)} of {len(tuned)}"
        yield from (f"  {row.default_ratio:.3f} {row.name}" for row in lost)


def _loses(row: SuiteRow) -> bool:
    """Whether the default is faster beyond noise: it was tuned in another run or on another graph.

    Rows of a machine that was not at rest, and of one schedule under both names, say nothing of it.
    """
    schedules = mapping(row.record.get("schedules"))
    if row.noise or (schedules and schedules[TUNED] == schedules[DEFAULT]):
        return False
    mine, theirs = row.samples(TUNED), row.samples(DEFAULT)
    return bool(mine and theirs) and verdict(ratio_interval(mine, theirs, paired=True), TOLERANCE) == SLOWER


def _doubts(rows: Sequence[SuiteRow]) -> Iterator[str]:
    """Rows that lack a time, contenders that are not compared, and times that were taken on a busy machine."""
    yield from (f"no time of equitune: {row.name}" for row in rows if math.isnan(row.time_us))
    yield from (f"no time of any peer: {row.name}" for row in rows if row.peer is None)
    for name, times in sorted(Counter(name for row in rows for name in row.less_accurate).items()):
        yield f"timed, but less accurate than the row asks, so not compared: {name} in {counted(times, 'row')}"
    if noisy := [row.noise for row in rows if row.noise]:
        where = f"in {len(noisy)} of {counted(len(rows), 'row')}"
        yield f"not at rest {where}: {noisy[-1]}; compare again later, with --fresh"
