"""``equitune bench --older-than``: what to compare so that stored rows are measured again, all by one set of code."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from autotune.bench.plans import Plan, plan_of
from autotune.bench.rows import Row, stored_rows
from autotune.database.store import Database, database_path
from autotune.errors import ConfigError
from autotune.workload.config import find_problem, load_graphs
from autotune.workload.graphs import GraphSpec, build_graph
from autotune.workload.kinds.registry import kernel_kind
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts
from kernelgen.errors import EquituneError

# How many parts of a workload's key say of which kind it is.
KIND = 4


def parse_date(text: str) -> datetime:
    """A date, or a date with a time, in ISO 8601; UTC unless it names another zone. ConfigError for anything else."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no date; expected one such as 2026-11-26 or 2026-11-26T08:30") from None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def plans_again(older_than: datetime, facts: DeviceFacts, folder: Path, say: Callable[[str], None]) -> list[Plan]:
    """Plans for the device's stored rows from before a date; a graph that is unknown here is left out, with a line."""
    database, graphs = Database.load(database_path(folder, facts.slug)), load_graphs()
    rows = [row for row in stored_rows(folder, facts) if parse_date(row.get("tried") or row["date"]) < older_than]
    plans = []
    for workload, passes in workloads_of(rows, graphs, say):
        needed = {kernel for which in passes for kernel in workload.kind.passes[which]}
        directions = tuple(name for name in workload.kind.directions if name in needed)
        asked = dataclasses.replace(workload, directions=directions)
        plans.append(plan_of(asked, passes, facts, database))
    return plans


def workloads_of(
    rows: Iterable[Row], graphs: Mapping[str, GraphSpec], say: Callable[[str], None]
) -> Iterable[tuple[Workload, tuple[str, ...]]]:
    """The workloads of rows, each with its rows' passes in the order of its kind.

    Those of a problem, operation, dtype and layout are together, since they share a process; the oldest come first.
    """
    rows = list(rows)
    for _, group in itertools.groupby(sorted(rows, key=by_age(rows)), key=workload_key):
        found = list(group)
        try:
            workload = workload_of(found, graphs)
        except EquituneError as error:
            say(f"{found[0]['label']} on {found[0]['graph']['name']}: left out, {error}")
            continue
        passes = {row["pass"] for row in found}
        yield workload, tuple(which for which in kernel_kind(workload.operation).passes if which in passes)


def by_age(rows: Iterable[Row]) -> Callable[[Row], tuple[Any, ...]]:
    """Sorts rows: by the oldest row of their kind, then the rows of a kind by workload."""
    oldest: dict[tuple[Any, ...], datetime] = {}
    for row in rows:
        kind, date = workload_key(row)[:KIND], parse_date(row["date"])
        oldest[kind] = min(oldest.get(kind, date), date)

    def place(row: Row) -> tuple[Any, ...]:
        key = workload_key(row)
        return oldest[key[:KIND]], key

    return place


def workload_key(row: Row) -> tuple[Any, ...]:
    """Equal for the rows of one workload."""
    names = ("problem", "operation", "dtype", "layout", "graph_class")
    return (*(row[name] for name in names), row["graph"]["name"], row.get("deterministic", False))


def workload_of(rows: Iterable[Row], graphs: Mapping[str, GraphSpec]) -> Workload:
    """ConfigError if the graph is unknown here, or another one by now."""
    row = next(iter(rows))
    name, size = row["graph"]["name"], (row["graph"]["edges"], row["graph"]["nodes"])
    if name not in graphs:
        raise ConfigError(f"graph {name!r} is not known here; expected it in configs/graphs.toml")
    built = build_graph(graphs[name])
    if (built.num_edges, built.num_nodes) != size:
        raise ConfigError(f"graph {name!r} has {built.num_edges} edges here and had {size[0]}")
    kernel = (find_problem(row["problem"]), row["operation"], graphs[name], row["dtype"], row["layout"])
    return Workload(row["label"], *kernel, deterministic=row.get("deterministic", False))
