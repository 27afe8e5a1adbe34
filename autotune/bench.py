"""The comparison of ``equitune bench``: tuned against default against peers, in one run; nothing is searched.

A config and a device enter; rows leave, stored in ``results/bench/DEVICE.json`` (a newer row replaces the one of the
same kernel, graph class and pass), and a table for people.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from autotune.config import TuneConfig, load_config
from autotune.contest import DIRECTIONS_OF, PASSES, ContestResult, hold_contest
from autotune.contest_session import ContestSetting
from autotune.database import Database, database_path, device_record, replace_file, writable_results_dir
from autotune.graphs import build_graph
from autotune.lookup import find_schedule
from autotune.progress import time_text
from autotune.publish import driver_version, now_text, software_versions
from autotune.space import search_space
from autotune.workload import Workload, compulsory_bytes
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.schedule import Schedule
from kernelgen.version import GENERATOR_VERSION

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
OURS, DEFAULT = "equitune", "equitune-default"
IDENTITY = ("problem", "operation", "dtype", "layout", "graph_class", "pass")
Row = dict[str, Any]


def bench(
    config: TuneConfig | str | Path,
    device: str | None = None,
    results_dir: str | Path | None = None,
    *,
    with_peers: bool = True,
    seconds_each: float = 2.0,
    console: Console | None = None,
) -> list[Row]:
    """Compare every workload of a config in the passes that its directions allow; returns the rows it stored."""
    import torch
    from rich.console import Console

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    facts = device_facts(device)
    loaded = config if isinstance(config, TuneConfig) else load_config(config, facts.backend)
    folder = Path(results_dir) if results_dir is not None else writable_results_dir()
    console = console or Console(stderr=True)
    rows: list[Row] = []
    for workload in loaded.workloads:
        passes = tuple(which for which in PASSES if set(DIRECTIONS_OF[which]) <= set(workload.directions))
        contest = hold_contest(
            ContestSetting(workload, device, with_peers),
            passes,
            schedules_of(workload, facts, folder),
            seconds_each=seconds_each,
            on_step=functools.partial(_say, console, workload.label),
        )
        new = [row_of(workload, which, contest, facts) for which in passes]
        store_rows(folder, facts, new)
        rows += new
    for line in table_text(rows):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return rows


def _say(console: Console, label: str, text: str) -> None:
    console.print(f"{label}: {text}", markup=False, highlight=False, soft_wrap=True)


def schedules_of(workload: Workload, facts: DeviceFacts, folder: Path) -> dict[str, dict[str, Schedule]]:
    """What the runtime would load (an exact entry in ``folder`` first) and the default, by direction."""
    database = Database.load(database_path(folder, facts.slug))
    graph_class = workload.graph_class()
    tuned, default = {}, {}
    for direction in workload.directions:
        kernel = (workload.problem, workload.operation, direction, workload.dtype)
        identity = (workload.problem.key, *kernel[1:], workload.layout, graph_class.text)
        entry = database.get(identity)
        if entry is not None:
            tuned[direction] = entry.tuned_schedule
        else:
            tuned[direction] = find_schedule(*kernel, workload.layout, facts, graph_class, strict=False).schedule
        default[direction] = search_space(*kernel, facts, workload.layout).default
    return {OURS: tuned, DEFAULT: default}


def row_of(workload: Workload, which: str, contest: ContestResult, facts: DeviceFacts) -> Row:
    graph = build_graph(workload.graph)
    size = (graph.num_edges, graph.num_nodes)
    moved = sum(compulsory_bytes(workload, direction, *size) for direction in DIRECTIONS_OF[which])
    return {
        "label": workload.label,
        "problem": workload.problem.key,
        "operation": workload.operation,
        "graph": {"name": graph.name, "edges": graph.num_edges, "nodes": graph.num_nodes},
        "graph_class": workload.graph_class().text,
        "dtype": workload.dtype,
        "layout": workload.layout,
        "pass": which,
        "bytes": moved,
        "floor_us": moved / contest.copy_bandwidth * 1e6,
        "times": {name: row[which].to_dict() for name, row in contest.results.items()},
        "date": now_text(),
        "software": software_versions(facts),
        "generator": GENERATOR_VERSION,
    }


def store_rows(folder: Path, facts: DeviceFacts, rows: list[Row]) -> Path:
    """Merge rows into the device's file; atomic, and a file that is not understood is kept aside."""
    path = folder / "bench" / f"{facts.slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = folder / "studies" / f"{facts.slug}-bench.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(lock, timeout=60):
        merged = {tuple(row[name] for name in IDENTITY): row for row in [*_stored_rows(path), *rows]}
        data = {
            "schema": SCHEMA,
            "device": device_record(facts, driver_version(facts)),
            "rows": [merged[identity] for identity in sorted(merged)],
        }
        replace_file(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def _stored_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_bytes())["rows"]
        for row in rows:
            _ = [row[name] for name in IDENTITY]
        return rows
    except (ValueError, KeyError, TypeError):
        path.rename(path.with_name(f"{path.stem}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"))
        return []


def table_text(rows: list[Row]) -> list[str]:
    """One line a row: each contender's median and, beside it, how many times ours it takes; no number is cut short."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    table = Table("problem", "graph", "pass", title="median time (x: times the tuned)", box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [_cell(row["times"].get(name, {"error": "-"}), row["times"][OURS]) for name in names]
        table.add_row(row["label"], row["graph"]["name"], row["pass"], *cells)
    out = io.StringIO()
    Console(file=out, width=1000).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _cell(result: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    if "error" in result:
        return "error" if result["error"] != "-" else "-"
    text = time_text(result["time_us"])
    if "error" in ours or result is ours:
        return text
    return f"{text} ({result['time_us'] / ours['time_us']:.2f}x)"
