"""The text of ``equitune show``: the schedule that a model would load for each direction, why, and its figures.

It looks up schedules exactly as the modules do, and builds, measures and writes nothing. Of a device that is not here
it shows all entries of its database.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autotune.cli.options import resolve_device
from autotune.database.entry import Entry
from autotune.database.lookup import Tuning, find_schedule
from autotune.database.maintenance import facts_of_record, stale_entries
from autotune.database.store import Table, database_dirs, database_path, device_files, device_record, load_table
from autotune.errors import ConfigError
from autotune.measure.counters import COUNTERS
from autotune.paths import typed
from autotune.text import contender_name, counters_text, direction_name, figures_text, interval_text, time_text
from autotune.tune.publish import verdict_of
from autotune.workload.config import find_problem, load_all, load_config
from autotune.workload.kind import Problem
from autotune.workload.known_kinds import kernel_kind, operations_of
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


def device_named(text: str | None) -> str | DeviceFacts:
    """The facts of a device that has a database, from its name (``nvidia-h200``, ``h200``); others as they are."""
    if text is None or re.fullmatch(r"(cpu|cuda)(:\d+)?", text):
        return resolve_device(text)
    slugs = sorted({file.stem for folder in database_dirs() for file in device_files(folder)})
    found = [slug for slug in slugs if slug == text.lower()] or [slug for slug in slugs if text.lower() in slug]
    if len(found) != 1:
        raise ConfigError(
            f"device {text!r} is not known; expected cpu, cuda, cuda:N, or one with a database: "
            + (", ".join(found or slugs) or "there is none here")
        )
    return facts_of_record(_table(found[0]).device)


def _table(slug: str) -> Table:
    return load_table(*(database_path(folder, slug) for folder in database_dirs()))


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
    layout: str | None = None,
    device: torch.device | str | DeviceFacts = "cpu",
    graph_class: GraphClass | str | None = None,
) -> str:
    """The whole text. Raises ConfigError or ProblemError for an unknown problem.

    given: a problem, its name or its key. operation, layout: for products; harmonics have only one of each. device:
    facts show what a database has, of all layouts and graph classes unless one is named.
    """
    problem, is_here = find_problem(given) if isinstance(given, str) else given, not isinstance(device, DeviceFacts)
    facts = device if isinstance(device, DeviceFacts) else device_facts(device)
    if operation not in operations_of(problem):
        operation = operations_of(problem)[0]
    kind = kernel_kind(operation)
    layout = None if operation == "harmonics" else layout
    if isinstance(graph_class, str):
        graph_class = GraphClass.parse(graph_class)
    if graph_class and graph_class.operation != operation:
        like = dataclasses.replace(graph_class, operation=operation).text
        raise ConfigError(
            f"graph class {graph_class.text} is of another kind; expected one of {operation}, such as {like}"
        )
    kernel = (problem.key, operation, dtype)
    known = [e for e in _table(facts.slug).by_identity.values() if (e.problem, e.operation, e.dtype) == kernel]
    size = graph_class.text if graph_class else "of any size"
    wanted = f"{layout or ('mul_ir' if is_here else 'any layout')}, graph {size}"
    lines = [
        _row("problem", given if isinstance(given, str) and given != problem.key else ""),
        *(_row("", line) for line in kind.describe(problem)),
        _row("device", f"{facts.name} ({facts.arch})"),
        _row("wanted", f"{operation}, {dtype}, {wanted}"),
        *_databases(facts),
        _row("tuned for", "; ".join(sorted({f"{e.layout} {e.graph_class}" for e in known})) or "nothing of this"),
    ]
    origins = {}
    for direction in kind.directions:
        entries = [e for e in known if e.direction == direction and layout in (None, e.layout)]
        entries = [e for e in entries if graph_class in (None, e.parsed_graph_class)]
        name = direction_name(direction)
        if not is_here and entries:
            for entry in sorted(entries, key=lambda entry: entry.identity):
                kind_text = ", deterministic" if entry.deterministic else ""
                lines += ["", f"{name}: tuned, {entry.layout}, {entry.graph_class}{kind_text}"]
                rows = [("schedule", _knobs(entry.tuned_schedule)), *_figures(entry, facts)]
                lines += [_row(f"  {row}", value) for row, value in rows]
            continue
        form = (dtype, layout or "mul_ir", facts, graph_class)
        tuning = find_schedule(problem, operation, direction, *form, strict=False)
        lines += ["", f"{name}: {tuning.origin}{'' if is_here else f', {form[1]}'}"]
        lines += [_row(f"  {row}", value) for row, value in _tuning(tuning, facts)]
        origins[direction] = tuning.origin
    if is_here:
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
        model = f"{typed('tune model MODEL --structure FILE')} for the model that runs it"
        table = kernel_kind(operation).table
        return f"{model}, or {typed('tune FILE')} for a config with this problem as its table [{table}.NAME]"
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


def _tuning(tuning: Tuning, facts: DeviceFacts) -> Iterator[tuple[str, str]]:
    yield "why", tuning.reason
    yield "schedule", _knobs(tuning.schedule)
    if tuning.entry is None:
        yield "figures", "none, this schedule was not measured"
        return
    if tuning.schedule != tuning.entry.tuned_schedule:
        other = _changes(tuning.schedule, tuning.entry.tuned_schedule)
        yield "but", f"the figures are of the entry's own schedule: {other}"
    yield from _figures(tuning.entry, facts)


def _knobs(schedule: Knobs) -> str:
    return ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(schedule).items())


def _changes(schedule: Knobs, other: Knobs) -> str:
    """The knobs in which they differ, with the values of ``other``."""
    ours, theirs = dataclasses.asdict(schedule), dataclasses.asdict(other)
    return ", ".join(f"{name}={value}" for name, value in theirs.items() if ours.get(name) != value) or "the same"


def _figures(entry: Entry, facts: DeviceFacts) -> Iterator[tuple[str, str]]:
    graph = entry.graph
    size = kernel_kind(entry.operation).size_text(graph["edges"], graph["nodes"])
    yield "graph", f"{graph['name']}, {size}"
    quartiles = f"quartiles {time_text(entry.q1_us)} to {time_text(entry.q3_us)}"
    yield "time", f"{time_text(entry.time_us)} ({quartiles})"
    if entry.by:
        figures = f"{figures_text(entry.to_dict())}; the default {figures_text(entry.default)}"
        yield "objective", f"{entry.objective}: {figures}"
    for name, one in entry.front.items():
        knobs = _changes(entry.tuned_schedule, kernel_kind(entry.operation).read(one["schedule"]))
        yield "front", f"{name}: {figures_text(one)}; its knobs: {knobs}"
    gain = {} if entry.by else entry.gain
    knobs = _changes(entry.tuned_schedule, kernel_kind(entry.operation).read(entry.default["schedule"]))
    default = f"{time_text(entry.default['time_us'])}, {_ratio(entry.default, entry, gain)}"
    yield "default", f"{default}; its knobs: {knobs}"
    yield "verdict", _verdict(entry)
    if not entry.peers:
        yield "peers", "none were timed beside it"
    for index, (name, peer) in enumerate(sorted(entry.peers.items())):
        figure = f"{time_text(peer['time_us'])}, {_ratio(peer, entry, peer)}" if "time_us" in peer else peer["error"]
        yield "peers" if index == 0 else "", f"{contender_name(name)}: {figure}"
    share = f"{entry.floor_us / entry.time_us:.0%} of the time"
    yield "floor", f"{time_text(entry.floor_us)} for the memory traffic ({share})"
    errors = ", ".join(f"{slot} {value:.1e}" for slot, value in entry.errors.items())
    yield "errors", f"{errors} relative to float64 (tolerance {entry.tolerance:.0e})"
    proof = entry.certificate
    if "equivariance" in proof:
        bits = "the same bits" if proof.get("bitwise") else "other bits"
        checked = f"two runs gave {bits}, {proof.get('edges', '?')} edges checked"
        yield "proof", f"{proof['equivariance']:.1e} under a rotation; {checked}"
    else:
        yield "proof", f"none under a rotation; {typed('db verify')} measures it on that device"
    if entry.resources:
        compiled = {name: value for name, value in entry.resources.items() if name not in COUNTERS}
        yield "resources", ", ".join(f"{name} {value}" for name, value in compiled.items())
    if counted := counters_text(entry.resources, entry.bytes, entry.time_us):
        yield "counters", counted
    trials = entry.trials
    yield "trials", f"{trials.get('count', '?')} ({trials.get('ok', '?')} ok), {trials.get('file', '')}"
    conditions = entry.conditions.get("noise") or ("at rest" if entry.conditions else "not recorded")
    yield "machine", str(conditions)
    yield "tuned", f"{entry.date}, generator {entry.generator}{_same_kernel(entry, facts)}"


def _verdict(entry: Entry) -> str:
    if entry.gain:
        return f"{verdict_of(entry)}, {interval_text(entry.gain)}"
    what = "as good" if entry.by else "as fast"
    second = f"; the runner-up {interval_text(entry.runner_up)} {what}" if entry.runner_up else ""
    return verdict_of(entry) + second


def _same_kernel(entry: Entry, facts: DeviceFacts) -> str:
    """Whether another generator than the entry's makes the same kernel, so that the figures hold."""
    if entry.generator == GENERATOR_VERSION:
        return ""
    stale = stale_entries(Table.of(device_record(facts), [entry]), {})
    if not stale:
        return f"; this one, {GENERATOR_VERSION}, makes the same kernel"
    return (
        f"; {'; '.join(stale[0].reasons)}: the figures may not hold, {typed('db retune')} on that device measures anew"
    )


def _ratio(other: Mapping[str, Any], entry: Entry, interval: Mapping[str, Any]) -> str:
    found = f" ({interval['low']:.2f} to {interval['high']:.2f})" if "low" in interval else ""
    return f"{other['time_us'] / entry.time_us:.2f} times the tuned time{found}"
