"""The text of ``equitune show``: the schedule that a model would load here for each direction, why, and its figures.

It looks up schedules exactly as the modules do, and builds, measures and writes nothing.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autotune.database.entry import Entry
from autotune.database.lookup import Tuning, find_schedule
from autotune.database.store import database_dirs, database_path, load_table
from autotune.errors import ConfigError
from autotune.extras import typed
from autotune.text import time_text
from autotune.workload.config import find_problem, load_all, load_config
from autotune.workload.kinds.base import Problem
from autotune.workload.kinds.registry import kernel_kind, operations_of
from autotune.workload.toml_tables import known_configs
from autotune.workload.workload import GraphClass, Workload
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.kernels.knobs import Knobs
from kernelgen.problem.product import TensorProductProblem
from kernelgen.version import GENERATOR_VERSION


def problem_given(words: Sequence[str], fully_connected: bool = False) -> str | Problem:
    """One word is a name or a key, three are irreps of a tensor product: in1, in2, and out (or the filter)."""
    if len(words) == 1 and not fully_connected:
        return words[0]
    if len(words) != 3:
        raise ConfigError(
            f"{len(words)} texts name the problem; expected a name, a key, or the irreps of in1, in2 and out, each in "
            'quotes: "8x0e+8x1o" "0e+1o" "0e+1o"'
        )
    make = TensorProductProblem.fully_connected if fully_connected else TensorProductProblem.channelwise
    return make(*words)


def show_command(workload: Workload, device: str | None, results: Path) -> str:
    """The command that shows what was just tuned. device: as given, None if not."""
    name = workload.label if load_all().get(workload.label) == workload.problem else workload.problem.key
    words = ["show", name]
    defaults = (("operation", "conv"), ("dtype", "float32"), ("layout", "mul_ir"))
    for option, default in defaults:
        if option == "dtype" or workload.operation in ("conv", "plain"):
            value = getattr(workload, option)
            words += [f"--{option}", value] if value != default else []
    words += ["--device", device] if device else []
    seen = any(results.resolve() == folder.resolve() for folder in database_dirs())
    return ("" if seen else f"EQUITUNE_DATABASE={shlex.quote(str(results))} ") + typed(shlex.join(words))


def show(
    given: str | Problem,
    *,
    operation: str = "conv",
    dtype: str = "float32",
    layout: str = "mul_ir",
    device: torch.device | str = "cpu",
    graph_class: GraphClass | str | None = None,
) -> str:
    """The whole text. Raises ConfigError or ProblemError for an unknown problem.

    given: a problem, its name or its key. operation, layout: for products; harmonics have only one of each.
    """
    problem, facts = find_problem(given) if isinstance(given, str) else given, device_facts(device)
    if operation not in operations_of(problem):
        operation, layout = operations_of(problem)[0], "mul_ir"
    kind = kernel_kind(operation)
    if isinstance(graph_class, str):
        graph_class = GraphClass.parse(graph_class)
    wanted = graph_class.text if graph_class else "of any size"
    lines = [
        _row("problem", given if isinstance(given, str) and given != problem.key else ""),
        *(_row("", line) for line in kind.describe(problem)),
        _row("device", f"{facts.name} ({facts.arch})"),
        _row("wanted", f"{operation}, {dtype}, {layout}, graph {wanted}"),
        *_databases(facts),
    ]
    origins = {}
    for direction in kind.directions:
        tuning = find_schedule(problem, operation, direction, dtype, layout, facts, graph_class, strict=False)
        lines += ["", f"{direction.replace('_', ' ')}: {tuning.origin}", *_tuning(tuning)]
        origins[direction] = tuning.origin
    tuned = origins["forward"] in ("exact", "nearest")
    lines += ["", f"next: {_next_step(problem, operation, facts.backend, tuned)}"]
    return "\n".join(line.rstrip() for line in lines)


def _next_step(problem: Problem, operation: str, backend: str, tuned: bool) -> str:
    """The next command: compare if tuned, else tune, with the smallest shipped config that has the problem."""
    found = []
    for name in known_configs():
        workloads = load_config(name, backend).workloads
        if any((workload.problem, workload.operation) == (problem, operation) for workload in workloads):
            found.append((len(workloads), name))
    if not found:
        return "write a config with this problem as its table [problems.NAME], then type " + typed("tune FILE")
    return typed(f"{'bench' if tuned else 'tune'} {min(found)[1]}")


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
        yield _row("  figures", "none, this schedule was not measured")
        return
    yield from _figures(tuning.entry)


def _knobs(schedule: Knobs) -> str:
    return ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(schedule).items())


def _figures(entry: Entry) -> Iterator[str]:
    graph = entry.graph
    size = kernel_kind(entry.operation).size_text(graph["edges"], graph["nodes"])
    yield _row("  graph", f"{graph['name']}, {size}")
    quartiles = f"quartiles {time_text(entry.q1_us)} to {time_text(entry.q3_us)}"
    yield _row("  time", f"{time_text(entry.time_us)} ({quartiles})")
    yield _row("  default", f"{time_text(entry.default['time_us'])}, {_ratio(entry.default, entry)}")
    for index, (name, peer) in enumerate(sorted(entry.peers.items())):
        figure = f"{time_text(peer['time_us'])}, {_ratio(peer, entry)}" if "time_us" in peer else str(peer["error"])
        yield _row("  peers" if index == 0 else "", f"{name}: {figure}")
    share = f"{entry.floor_us / entry.time_us:.0%} of the time"
    yield _row("  floor", f"{time_text(entry.floor_us)} for the memory traffic ({share})")
    errors = ", ".join(f"{slot} {value:.1e}" for slot, value in entry.errors.items())
    yield _row("  errors", f"{errors} relative to float64 (tolerance {entry.tolerance:.0e})")
    if entry.resources:
        yield _row("  resources", ", ".join(f"{name} {value}" for name, value in entry.resources.items()))
    trials = entry.trials
    yield _row("  trials", f"{trials.get('count', '?')} ({trials.get('ok', '?')} ok), {trials.get('file', '')}")
    same = "" if entry.generator == GENERATOR_VERSION else f" (this one is {GENERATOR_VERSION})"
    yield _row("  tuned", f"{entry.date}, generator {entry.generator}{same}")


def _ratio(other: Mapping[str, Any], entry: Entry) -> str:
    return f"{other['time_us'] / entry.time_us:.2f} times the tuned time"
