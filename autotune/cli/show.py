"""The text of ``equitune show PROBLEM``: what the runtime would load here for each direction, why, and its figures.

A problem (by name or key) and a device enter, lines for a terminal leave. It looks up exactly as the modules do, and
neither builds, measures nor writes anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from autotune.database.entry import Entry
from autotune.database.lookup import Tuning, find_schedule
from autotune.database.store import database_dirs, database_path, load_table
from autotune.workload.config_tables import find_problem
from autotune.workload.graphs import GraphClass
from autotune.workload.kinds.registry import kernel_kind, operations_of
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.schedule.knobs import Knobs
from kernelgen.version import GENERATOR_VERSION


def show(
    problem_text: str,
    *,
    operation: str = "conv",
    dtype: str = "float32",
    layout: str = "mul_ir",
    device: torch.device | str = "cpu",
    graph_class: GraphClass | str | None = None,
) -> str:
    """The whole text, lines joined. Raises ConfigError or ProblemError for a problem it does not know.

    operation, layout: of a product; harmonics have but one of either.
    """
    problem, facts = find_problem(problem_text), device_facts(device)
    if operation not in operations_of(problem):
        operation, layout = operations_of(problem)[0], "mul_ir"
    kind = kernel_kind(operation)
    if isinstance(graph_class, str):
        graph_class = GraphClass.parse(graph_class)
    wanted = graph_class.text if graph_class else "of any size"
    lines = [
        _row("problem", problem_text if problem_text != problem.key else ""),
        *(_row("", line) for line in kind.describe(problem)),
        _row("device", f"{facts.name} ({facts.arch})"),
        _row("wanted", f"{operation}, {dtype}, {layout}, graph {wanted}"),
        *_databases(facts),
    ]
    for direction in kind.directions:
        tuning = find_schedule(problem, operation, direction, dtype, layout, facts, graph_class, strict=False)
        lines += ["", f"{direction.replace('_', ' ')}: {tuning.origin}", *_tuning(tuning)]
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str, value: str) -> str:
    return f"{name:<10} {value}"


def _databases(facts: DeviceFacts) -> Iterator[str]:
    for index, directory in enumerate(database_dirs()):
        path = database_path(directory, facts.slug)
        table = load_table(path)
        count = f"{len(table.by_identity)} entries" if path.exists() else "no file"
        flaws = f"; {len(table.flaws)} problems, first: {table.flaws[0]}" if table.flaws else ""
        yield _row("databases" if index == 0 else "", f"{path}: {count}{flaws}")


def _tuning(tuning: Tuning) -> Iterator[str]:
    yield _row("  why", tuning.reason)
    yield _row("  schedule", _knobs(tuning.schedule))
    if tuning.entry is None:
        yield _row("  figures", "none: this schedule was not measured")
        return
    yield from _figures(tuning.entry)


def _knobs(schedule: Knobs) -> str:
    return ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(schedule).items())


def _figures(entry: Entry) -> Iterator[str]:
    graph = entry.graph
    yield _row("  graph", f"{graph['name']}, {graph['edges']:,} edges, {graph['nodes']:,} nodes")
    quartiles = f"quartiles {_time(entry.q1_us)} to {_time(entry.q3_us)}"
    yield _row("  time", f"{_time(entry.time_us)} ({quartiles})")
    yield _row("  default", f"{_time(entry.default['time_us'])}, {_ratio(entry.default, entry)}")
    for index, (name, peer) in enumerate(sorted(entry.peers.items())):
        figure = f"{_time(peer['time_us'])}, {_ratio(peer, entry)}" if "time_us" in peer else str(peer["error"])
        yield _row("  peers" if index == 0 else "", f"{name}: {figure}")
    yield _row("  floor", f"{_time(entry.floor_us)} of traffic ({entry.floor_us / entry.time_us:.0%} of the time)")
    errors = ", ".join(f"{slot} {value:.1e}" for slot, value in entry.errors.items())
    yield _row("  errors", f"{errors} relative to float64 (tolerance {entry.tolerance:.0e})")
    if entry.resources:
        yield _row("  resources", ", ".join(f"{name} {value}" for name, value in entry.resources.items()))
    trials = entry.trials
    yield _row("  trials", f"{trials.get('count', '?')} ({trials.get('ok', '?')} ok), {trials.get('file', '')}")
    same = "" if entry.generator == GENERATOR_VERSION else f" (this one is {GENERATOR_VERSION})"
    yield _row("  tuned", f"{entry.date}, generator {entry.generator}{same}")


def _time(microseconds: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{microseconds:.3g} us"


def _ratio(other: Mapping[str, Any], entry: Entry) -> str:
    return f"{other['time_us'] / entry.time_us:.2f} times the tuned one's"
