"""What a page shows of kernels: the bench's rows, their means, losses and details, and the roofline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from markupsafe import Markup

from autotune.bench.rows import SuiteRow, mapping
from autotune.report import charts
from autotune.report.devices import PASSES, DeviceData
from autotune.report.rows import GROUPS, knob_names, knobs
from autotune.report.sources import SourceLine, Sources
from autotune.text import DEFAULT, TUNED, bytes_text, direction_name, geometric_mean
from autotune.workload.known_kinds import RADIAL

Row = TypeVar("Row")


def by(rows: Iterable[Row], key: str, usual: Iterable[str]) -> dict[str, list[Row]]:
    """Rows by an attribute; its ``usual`` values come first, in their order."""
    met: dict[str, list[Row]] = {}
    for row in rows:
        met.setdefault(getattr(row, key), []).append(row)
    return {value: met[value] for value in dict.fromkeys((*usual, *sorted(met))) if value in met}


# Every bench row against its fastest peer: the whole section.


def kernels(rows: Sequence[SuiteRow], sources: Sources) -> dict[str, Any]:
    """What the section shows.

    benched: the rows with what opens below them. prices: normal row, deterministic row, cost. dots: a figure. losses:
    the worst first. columns: those that older files lack, and any row has a value for.
    """
    pairs = prices(rows)
    price_of = {id(row): price for _, row, price in pairs}
    columns = {
        "registers": any("registers" in report for row in rows for report in row.resources(TUNED).values()),
        "memory": any(row.memory(TUNED) >= 0 for row in rows),
        "host": any(TUNED in row.host_us for row in rows),
        "error": any(row.accuracy() is not None for row in rows),
        "new graph": any(row.new_graph_ratio > 0 for row in rows),
    }
    return {
        "rows": rows,
        "benched": [
            BenchedRow(row, sources.of(row.record, row.schedules(TUNED)), price_of.get(id(row), math.nan))
            for row in rows
        ],
        "means": list(_means(rows, price_of)),
        "dots": _dots(rows),
        "absent": _absent(rows),
        "prices": pairs,
        "losses": sorted(
            (row for row in rows if row.loses), key=lambda row: -1.0 if math.isnan(row.ratio) else row.ratio
        ),
        "compared": [row for row in rows if not math.isnan(row.ratio)],
        "radial": any(row.text("operation") == RADIAL for row in rows),
        "columns": {name for name, shown in columns.items() if shown},
    }


def prices(rows: Iterable[SuiteRow]) -> list[tuple[SuiteRow, SuiteRow, float]]:
    """(normal row, deterministic row of the same kernel, deterministic time / normal time), in the rows' order."""
    listed = list(rows)
    normal = {row.kernel: row for row in listed if not row.deterministic}
    pairs = [(normal[row.kernel], row) for row in listed if row.deterministic and row.kernel in normal]
    return [(plain, row, row.time_us / plain.time_us) for plain, row in pairs]


def _means(rows: Sequence[SuiteRow], price_of: Mapping[int, float]) -> Iterator[dict[str, Any]]:
    """By kind and pass. Deterministic rows are a kind of their own, whose price is the mean cost of determinism.

    more_memory: rows that need more than the fastest peer; None if none tells.
    """
    for group, of_group in by(rows, "group", GROUPS).items():
        for deterministic in (False, True):
            kind = group.capitalize() + (", deterministic" if deterministic else "")
            inside = [row for row in of_group if row.deterministic is deterministic]
            for which, chosen in by(inside, "which", PASSES).items():
                price = geometric_mean(price_of[id(row)] for row in chosen if id(row) in price_of)
                held = [row for row in chosen if not math.isnan(row.memory(TUNED) + row.memory(row.peer))]
                more = sum(row.exceeds_memory for row in held) if held else None
                yield {"kind": kind, "which": which, "rows": chosen, "price": price, "more_memory": more}


def _absent(rows: Sequence[SuiteRow]) -> list[tuple[str, str, int]]:
    """(peer without a time, why, in how many rows): ratios say nothing about it there."""
    kinds: dict[str, set[str]] = {}
    for row in rows:
        kinds.setdefault(row.form, set()).update(row.times)
    cases: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for name in kinds[row.form] - {TUNED, DEFAULT}:
            if name not in row.times:
                cases[name, "not measured there"] += 1
            elif math.isnan(row.times[name]):
                # The first sentence of its reason, without its name.
                reason = row.reason(name).replace(f"PeerError: {name}: ", "").replace("PeerError: ", "")
                cases[name, reason.split(". ")[0][:160]] += 1
    return [(*case, cases[case]) for case in sorted(cases)]


def _dots(rows: Sequence[SuiteRow]) -> Markup | None:
    """Each normal row as a dot, in lanes by group, then by pass, as in the table."""
    lanes: dict[str, list[float]] = {}
    normal = [row for row in rows if not row.deterministic and not math.isnan(row.ratio)]
    for group, inside in by(normal, "group", GROUPS).items():
        for which, chosen in by(inside, "which", PASSES).items():
            lanes[f"{direction_name(which)}, {GROUPS.get(group, group)}"] = [row.ratio for row in chosen]
    return charts.ratio_dots(lanes, "suite-ratios") if lanes else None


# A bench row with what opens below it: all contenders, raw samples, schedules, their source and resources.


class BenchedRow:
    """price: of determinism, NaN for a normal row."""

    def __init__(self, row: SuiteRow, sources: Sequence[SourceLine], price: float = math.nan) -> None:
        self.row, self.sources, self.price = row, sources, price
        # Ours first, then the peers by time, then those that failed.
        last = {TUNED: -2.0, DEFAULT: -1.0}
        rank = {name: math.inf if math.isnan(time_us) else time_us for name, time_us in row.times.items()} | last
        self.contenders = sorted(row.times, key=rank.__getitem__)
        self.ordered = any(not math.isnan(row.order_us(name)) for name in row.times)
        self.strips = charts.strips({name: row.samples(name) for name in self.contenders}, row.what)
        # (direction, origin, knobs) of the tuned schedules.
        tuned, default, origins = row.schedules(TUNED), row.schedules(DEFAULT), mapping(row.record.get("origins"))
        self.knob_names = knob_names(tuned.values())
        self.schedules = [
            (direction, str(origins.get(direction) or ""), knobs(self.knob_names, chosen, default.get(direction, {})))
            for direction, chosen in tuned.items()
        ]
        # (direction, contender, the compiler's report).
        self.resources = [(direction, name, report) for name in (TUNED, DEFAULT)
                          for direction, report in row.resources(name).items()]  # fmt: skip
        # What opens, in a line.
        failed = sum(math.isnan(time_us) for time_us in row.times.values())
        parts = {
            f"{len(row.times)} contenders" + (f" ({failed} failed)" if failed else ""): True,
            "schedules": tuned,
            "resources": row.resources(TUNED),
            "raw samples": self.strips,
            "source": any(not isinstance(source, str) for _, source, _ in sources),
        }
        self.summary = ", ".join(part for part, there in parts.items() if there)


# Each kernel's traffic against what the device's memory gives.


def roofline(data: DeviceData) -> dict[str, Any] | None:
    """None if no row has a time and its bytes. Rows: those of the bench, and entries beside them with counted traffic.

    lines: (kind, rows, mean and highest share of the rate of a copy of as many bytes, mean share of the peers).
    counted: (kind, rows whose traffic ``ncu`` counted, mean of that over the compulsory traffic, its mean share of a
    large copy's rate); such a row's dot is at that traffic, not at the compulsory one.
    """
    benched = {row.kernel for row in data.suite}
    every = (*data.suite, *(row for row in data.tuned if row.dram_bytes > 0 and row.kernel not in benched))
    rows = [row for row in every if not row.deterministic and row.bytes / row.time_us > 0]
    if not rows:
        return None
    dram = counted_traffic(data, rows)
    points: dict[str, list[tuple[float, float]]] = {}
    lines = []
    for group, inside in by(rows, "group", GROUPS).items():
        moved = [(dram.get(id(row), row.bytes), row.time_us) for row in inside]
        points[GROUPS.get(group, group)] = [(size, 1e6 * size / time_us) for size, time_us in moved]
        if known := [row for row in inside if row.least_us > 0]:
            shares = [row.least_us / row.time_us for row in known]
            peers = geometric_mean(row.least_us / row.peer_us for row in known)
            lines.append((group.capitalize(), len(known), geometric_mean(shares), max(shares), peers))
    # The traffic floor is the time at the rate of a large copy.
    peak = max((1e6 * row.bytes / row.floor_us for row in rows if row.floor_us > 0), default=math.nan)
    told = "; ".join(f"{name} {len(dots)} rows up to {bytes_text(max(rate for _, rate in dots))}/s"
                     for name, dots in points.items())  # fmt: skip
    told += "." if math.isnan(peak) else f"; a large copy {bytes_text(peak)}/s."
    rates: dict[float, list[float]] = {}
    for row in rows:
        if row.copy_us > 0:
            rates.setdefault(row.bytes, []).append(1e6 * row.bytes / row.copy_us)
    copies = sorted((size, median(of_size)) for size, of_size in rates.items())
    counted = []
    for group, inside in by([row for row in rows if id(row) in dram], "group", GROUPS).items():
        more = geometric_mean(dram[id(row)] / row.bytes for row in inside)
        share = geometric_mean(1e6 * dram[id(row)] / row.time_us / peak for row in inside)
        counted.append((group.capitalize(), len(inside), more, share))
    return {"figure": charts.roofline(points, copies, peak, told), "lines": lines, "counted": counted}


def counted_traffic(data: DeviceData, rows: Iterable[SuiteRow]) -> dict[int, float]:
    """Bytes of DRAM that ``ncu`` counted, by ``id`` of a row: an entry's, or of a pass whose schedules have entries."""
    entries = {(row.kernel, row.deterministic): row for row in data.tuned if row.dram_bytes > 0}

    def of_direction(row: SuiteRow, direction: str, schedule: dict[str, Any]) -> float:
        kernel = (*row.kernel[:-2], direction, row.graph)  # the same in another pass
        entry = entries.get((kernel, row.deterministic))
        return entry.dram_bytes if entry is not None and entry.record.get("schedule") == schedule else math.nan

    found = {}
    for row in rows:
        parts = [of_direction(row, *each) for each in row.schedules(TUNED).items()]
        found[id(row)] = row.dram_bytes if row.dram_bytes > 0 else sum(parts) if parts else math.nan
    return {key: size for key, size in found.items() if size > 0}
