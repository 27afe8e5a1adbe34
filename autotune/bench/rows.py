"""Stored rows of comparisons: ``results/bench/DEVICE.json``, one row per workload and pass.

Rows are plain data. A newer row replaces the one with its identity, and the file is replaced whole.
"""

from __future__ import annotations

import functools
import io
import math
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import filelock

from autotune.database.maintenance import driver_version
from autotune.database.store import device_record, replace_file, text_of_lines
from autotune.measure.timing import SLOWER, range_text, ratio_interval, verdict
from autotune.text import counted, time_text, without_time
from autotune.workload.config import find_problem
from autotune.workload.known_kinds import kernel_kind
from autotune.workload.workload import GraphClass
from kernelgen.device import DeviceFacts
from kernelgen.errors import EquituneError
from kernelgen.files import parse_json

SCHEMA = 1
OURS, DEFAULT = "equitune", "equitune-default"
# Fields whose figures vary by more than their fourth digit from run to run.
ROUNDED, DIGITS = ("errors", "certificates", "order_ms", "joules"), 4
IDENTITY = ("problem", "operation", "dtype", "layout", "graph_class", "pass")
Row = dict[str, Any]


def identity_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key of a row. Rows older than the deterministic mode lack that field."""
    return (*(row[name] for name in IDENTITY), row.get("deterministic", False))


def less_accurate(row: Mapping[str, Any]) -> frozenset[str]:
    """Contenders whose errors are larger than our kernels of the problem may have, such as TF32 products for ``ieee``.

    They are timed, but no speed-up is over them. None for a problem that is not known here. An entry of the database
    keeps no peer's errors: there the peer's name tells.
    """
    operation, problem, dtype = (str(row.get(name)) for name in ("operation", "problem", "dtype"))
    limit, errors = _largest_allowed(operation, problem, dtype), row.get("errors")
    given = errors if isinstance(errors, dict) else {}
    named = {name for name in row.get("peers") or () if name.endswith("-tf32") and "|ieee|" in problem}
    return frozenset(name for name, found in given.items() if largest_error(found) > limit) | named


@functools.lru_cache(maxsize=4096)
def _largest_allowed(operation: str, problem: str, dtype: str) -> float:
    try:
        return kernel_kind(operation).tolerance(find_problem(problem), dtype)
    except (EquituneError, KeyError):
        return math.inf


def largest_error(found: Any) -> float:
    """The largest number among the errors of a contender, by direction, output and perhaps block; 0 without any."""
    if isinstance(found, dict | list):
        return max(map(largest_error, found.values() if isinstance(found, dict) else found), default=0.0)
    return float(found) if isinstance(found, float) and math.isfinite(found) else 0.0


def lost_peers(stored: Row | None, row: Row) -> dict[str, str]:
    """Peers that failed, with the reason, which have a time in the stored row of the same kernels, software and code.

    What failed is then this machine, not the peer: a library that it lacks, or a compiler that was disturbed.
    """
    if stored is None or any(stored.get(name) != row.get(name) for name in ("sources", "schedules", "software")):
        return {}
    failed = {name: str(result["error"]) for name, result in row["times"].items() if "error" in result}
    timed = {name for name, result in stored["times"].items() if "error" not in result} - {OURS, DEFAULT}
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
        kept = [_kept(merged.get(identity_of(row)), row) for row in rows]
        merged |= {identity_of(row): row for row in kept}
        replace_file(path, record_text(facts, [merged[identity] for identity in sorted(merged)]))
    return kept


def _kept(stored: Row | None, row: Row) -> Row:
    return stored | {"tried": row["date"]} if stored is not None and lost_peers(stored, row) else row


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


# Format bench rows for a terminal or as Markdown: a table and a summary.
#
# A ratio is the fastest peer's time over ours: above 1 we are faster.

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
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    body = []
    for row in rows:
        kind = f"{row['operation']} {row['dtype']}{' deterministic' if row.get('deterministic') else ''}"
        cells = [_cell(row["times"].get(name, {"error": "-"}), row["times"][OURS]) for name in names]
        body.append([row["label"], row["graph"]["name"], kind, row["pass"], *cells])
    return ["problem", "graph", "kernel", "pass", *names], body


def _cell(result: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    if "error" in result:
        return without_time(result["error"]) if result["error"] != "-" else "-"
    text = time_text(result["time_us"])
    if "error" in ours or result is ours:
        return text
    interval = range_text(ours.get("samples_us", ()), result.get("samples_us", ()), paired=True)
    ratio = f"{result['time_us'] / ours['time_us']:.2f}x"
    return f"{text} ({ratio}, {interval})" if interval else f"{text} ({ratio})"


def row_name(row: Row) -> str:
    kind = " deterministic" if row.get("deterministic") else ""
    place = f"{row['graph']['name']}, {row['operation']} {row['dtype']}{kind}"
    return f"{row['label']} on {place}, {row['pass']}"


def peer_times(row: Row) -> dict[str, float]:
    """Medians of the peers that have a time, and no larger errors than ours may be."""
    others = {OURS, DEFAULT} | less_accurate(row)
    return {
        name: result["time_us"] for name, result in row["times"].items() if name not in others and "error" not in result
    }


def fastest_peer(row: Row) -> str | None:
    times = peer_times(row)
    return min(times, key=lambda name: (times[name], name)) if times else None


def ratio(row: Row) -> float | None:
    """Fastest peer's time over ours; None if either has no time."""
    peer, ours = fastest_peer(row), _our_time(row, OURS)
    return None if peer is None or ours is None else peer_times(row)[peer] / ours


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def summary_lines(rows: Sequence[Row]) -> list[str]:
    compared = any(ratio(row) is not None for row in rows)
    what = "speed-up over the fastest peer, geometric mean (worst row):" if compared else "no peer has a time"
    lines = [*_reasons(rows), "", f"{counted(len(rows), 'row')}; {what}"]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kind = "deterministic" if row.get("deterministic") else ""
        groups.setdefault((row["operation"], row["dtype"], kind, row["pass"]), []).append(row)
    for key, group in groups.items():
        ratios = [value for value in map(ratio, group) if value is not None]
        if ratios:
            found = f"{geometric_mean(ratios):.2f} ({min(ratios):.2f}), {counted(len(ratios), 'row')}"
            lines.append(f"  {' '.join(filter(None, key))}: {found}")
    return [
        *lines,
        *_untuned(rows),
        *_with_orders(rows),
        *_below(rows),
        *_floors(rows),
        *_memory(rows),
        *_energy(rows),
        *_defaults(rows),
        *_without(rows),
        *_restless(rows),
    ]


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Why contenders have no time: each reason once, whatever figures it has."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, result in row["times"].items():
            if "error" in result:
                text = re.sub(rf"^(PeerError: )?({re.escape(name)}: )?", "", result["error"])
                found.setdefault((name, re.sub(r"\d+", "", text)), []).append(textwrap.shorten(text, 200))
    return [
        f"{without_time(texts[0])} in {counted(len(texts), 'row')}, {name}: {texts[0]}"
        for (name, _), texts in found.items()
    ]


def _untuned(rows: Sequence[Row]) -> list[str]:
    """What equitune is where it is not tuned on this device, by the origins of :mod:`autotune.database.lookup`."""
    others = [found for row in rows if (found := set(row.get("origins", {}).values()) - {"exact"})]
    origins = ", ".join(sorted(set().union(*others)))
    return [f"equitune is not tuned in {len(others)} of {counted(len(rows), 'row')}: {origins}"] if others else []


def _restless(rows: Sequence[Row]) -> list[str]:
    noisy = [text for row in rows if (text := _noise(row))]
    where = f"in {len(noisy)} of {counted(len(rows), 'row')}"
    return [f"not at rest {where}: {noisy[-1]}; compare again later, with --fresh"] if noisy else []


def _noise(row: Row) -> str:
    """Why not to trust the times of a row, by any of its contenders; empty if they may be trusted."""
    return next(filter(None, (result.get("conditions", {}).get("noise") for result in row["times"].values())), "")


def _our_time(row: Row, name: str) -> float | None:
    result = row["times"].get(name, {"error": "not measured"})
    return None if "error" in result else result["time_us"]


def _below(rows: Sequence[Row]) -> list[str]:
    slow = sorted(((value, row) for row in rows if (value := ratio(row)) is not None), key=lambda item: item[0])
    if not slow:
        return []
    below = [(value, row) for value, row in slow if value < TARGET]
    lost = sum(value < 1.0 for value, _ in below)
    lines = [f"rows with a speed-up below 1.00: {lost}; below {TARGET}: {len(below)} of {len(slow)}"]
    return lines + [f"  {value:.3f} {row_name(row)} ({fastest_peer(row)})" for value, row in below]


def _with_orders(rows: Sequence[Row]) -> list[str]:
    """Speed-ups if every call met a new graph: each contender's call and what it then does once for the graph."""
    ratios, shares = [], []
    for row in rows:
        order_us = {name: 1e3 * time_ms for name, time_ms in row.get("order_ms", {}).items()}
        ours = _our_time(row, OURS)
        peers = [time_us + order_us[name] for name, time_us in peer_times(row).items() if name in order_us]
        if ours is not None and peers and OURS in order_us:
            ratios.append(min(peers) / (ours + order_us[OURS]))
            shares.append(order_us[OURS] / ours)
    if not ratios:
        return []
    return [
        f"with ordering of a new graph in every call: {geometric_mean(ratios):.2f} ({min(ratios):.2f}), "
        f"{counted(len(ratios), 'row')}; the ordering takes {statistics.median(shares):.2f} of a call (median)"
    ]


def _floors(rows: Sequence[Row]) -> list[str]:
    """How near to the floor: on dense graphs together, and on each graph whose degrees are skewed."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        ours, name = _our_time(row, OURS), row["graph"]["name"]
        where = " and ".join(FLOOR_GRAPHS) if name in FLOOR_GRAPHS else name
        shown = name in FLOOR_GRAPHS or GraphClass.parse(row["graph_class"]).log2_skew
        of_convolutions = row["operation"] == "conv" and row["dtype"] == "float32" and not row.get("deterministic")
        if shown and of_convolutions and ours is not None:
            groups.setdefault((where, row["pass"]), []).append(ours / row["floor_us"])
    return [
        f"equitune / traffic floor on {where} (float32), {which}: {geometric_mean(all_):.2f} (worst {max(all_):.2f})"
        for (where, which), all_ in groups.items()
    ]


def _memory(rows: Sequence[Row]) -> list[str]:
    known = [(row, row.get("memory", {}), fastest_peer(row)) for row in rows]
    both = [(row, memory, peer) for row, memory, peer in known if OURS in memory and peer in memory]
    more = [(row, memory, peer) for row, memory, peer in both if memory[OURS] > memory[peer]]
    if not both:
        return []
    lines = [f"rows that need more memory than their fastest peer: {len(more)} of {len(both)}"]
    return lines + [
        f"  {row_name(row)}: {memory[OURS] / 2**20:.1f} MiB, {peer} {memory[peer] / 2**20:.1f} MiB"
        for row, memory, peer in more
    ]


def _energy(rows: Sequence[Row]) -> list[str]:
    """Joules of a call beside the fastest peer's, of rows that have both."""
    both = [
        (joules[OURS], joules[peer], row, peer)
        for row in rows
        if (joules := row.get("joules", {})) and OURS in joules and (peer := fastest_peer(row)) in joules
    ]
    if not both:
        return []
    mean = geometric_mean(theirs / ours for ours, theirs, _, _ in both)
    lines = [f"energy of a call, fastest peer / equitune: {mean:.2f} (geometric mean), {counted(len(both), 'row')}"]
    return lines + [
        f"  {row_name(row)}: {1e3 * ours:.3g} mJ, {peer} {1e3 * theirs:.3g} mJ" for ours, theirs, row, peer in both
    ]


def _defaults(rows: Sequence[Row]) -> list[str]:
    """Gain from tuning, and rows where the default is faster beyond noise: tuned in another run or on another graph.

    Rows of a machine that was not at rest, and of one schedule under both names, say nothing of it.
    """
    pairs = [(row, _our_time(row, DEFAULT), _our_time(row, OURS)) for row in rows]
    known = [(default / ours, row) for row, default, ours in pairs if default is not None and ours is not None]
    if not known:
        return []
    lost = [(value, row) for value, row in known if value < 1 and _loses(row)]
    lines = [f"equitune-default / equitune: {geometric_mean(value for value, _ in known):.2f} (geometric mean)"]
    if lost:
        lines.append(f"rows where the default is faster (tune them): {len(lost)} of {len(known)}")
    return lines + [f"  {value:.3f} {row_name(row)}" for value, row in sorted(lost, key=lambda item: item[0])]


def _loses(row: Row) -> bool:
    schedules = row.get("schedules", {})
    if _noise(row) or (schedules and schedules[OURS] == schedules[DEFAULT]):
        return False
    mine, theirs = (row["times"][name].get("samples_us", ()) for name in (OURS, DEFAULT))
    return bool(mine and theirs) and verdict(ratio_interval(mine, theirs, paired=True), TOLERANCE) == SLOWER


def _without(rows: Sequence[Row]) -> list[str]:
    lines = [f"no time of equitune: {row_name(row)}" for row in rows if _our_time(row, OURS) is None]
    lines += [f"no time of any peer: {row_name(row)}" for row in rows if fastest_peer(row) is None]
    others = Counter(name for row in rows for name in less_accurate(row))
    return lines + [
        f"timed, but less accurate than the row asks, so not compared: {name} in {counted(number, 'row')}"
        for name, number in sorted(others.items())
    ]
