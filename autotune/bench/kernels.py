"""The main loop of ``equitune bench``: compare tuned, default and peers in one run; nothing is searched.

Rows are stored in ``results/bench/DEVICE.json`` after each workload (a newer row replaces the one of the same kernel,
graph class and pass), and printed as a table. Rows of the present kernels and software are not measured again, so the
same command continues an interrupted run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune.bench.rows import (
    Row,
    SuiteRow,
    identity_of,
    lost_peers,
    seconds_text,
    store_rows,
    stored_rows,
    summary_lines,
    table_lines,
    without_noise,
)
from autotune.compare.comparison import ComparisonResult, ComparisonSetting, run_comparison
from autotune.compare.peers import ADAPTERS, peer_names
from autotune.compare.precompile import (
    COMPILED_PEER,
    CompileAhead,
    IdleProcess,
    Kind,
    Product,
    kernels_of,
    kind_of,
    known_failures,
)
from autotune.database.lookup import Finder
from autotune.database.maintenance import hash_of_text, now_text, software_versions, source_text
from autotune.database.store import Database, database_path, writable_results_dir
from autotune.errors import ConfigError, WorkerError
from autotune.measure.kinds import measured_kind, new_graph, order_ms, space_of
from autotune.measure.timing import require_energy
from autotune.measure.worker import START_LIMIT_S, Worker, on_each
from autotune.text import DEFAULT, NOT_COMPARED, TUNED, counted
from autotune.workload.config import TuneConfig, by_problem, find_problem, load_config, load_graphs
from autotune.workload.graphs import GraphSpec, build_graph
from autotune.workload.known_kinds import CONVOLUTIONS, kernel_kind
from autotune.workload.workload import Workload, moved_bytes
from kernelgen.arithmetic.directions import DIRECTIONS, fixed_order_parts
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.errors import EquituneError
from kernelgen.kernels.knobs import Knobs
from kernelgen.version import GENERATOR_VERSION

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

    from rich.console import Console

Rows = dict[tuple[Any, ...], Row]
# Processes for comparisons on a GPU: one measures, the others are being set up.
PROCESSES = 4
# The peer whose contractions compile for minutes.
POLYNOMIAL_PEER = "cuequivariance"


def bench(
    config: TuneConfig | str | Path | datetime,
    device: str | None = None,
    results_dir: str | Path | None = None,
    *,
    peers: Sequence[str] | None = None,
    seconds_each: float = 2.0,
    fresh: bool = False,
    console: Console | None = None,
    verbose: bool = False,
    devices: Sequence[str] = (),
    budget: float | None = None,
    begin: float | None = None,
    energy: bool = False,
    watch: Callable[[str], object] = lambda line: None,
) -> list[Row]:
    """Compare every workload of a config; returns its rows, those of earlier runs included.

    config: a date for all stored rows of the device from before it, which are measured again.
    peers: by name, None for all of the device. seconds_each: approximate sampling time of a contender in a pass. fresh:
    also measure stored rows again. verbose: print every step with the time, even without a terminal. devices: several
    GPUs of one model, among which the problems are divided. budget: seconds, after which no workload begins; what is
    left goes on in the next run. begin: the moment of ``time.monotonic`` from which it counts, by default now.
    energy: measure the joules of a call too, also of stored rows that lack them; ToolMissingError where NVML does not
    count. watch: is told each line too, between measurements.
    """
    begin = time.monotonic() if begin is None else begin
    from rich.console import Console

    from autotune.compare.peers import chosen_peers

    device = device or next(iter(devices), "cuda" if torch.cuda.is_available() else "cpu")
    facts = device_facts(device)
    if others := sorted({other.name for other in map(device_facts, devices)} - {facts.name}):
        raise ConfigError(f"devices are {facts.name} and {', '.join(others)}; rows of one record need one model of GPU")
    if energy:
        require_energy(device)
    folder = Path(results_dir) if results_dir is not None else writable_results_dir()
    console = console or Console(stderr=True)
    span = begin, None if budget is None else begin + budget
    what = chosen_peers(peers, device), seconds_each, console, verbose, span
    run = _Run(device, facts, folder, *what, energy=energy, watch=watch)
    if isinstance(config, datetime):
        plans, fresh = plans_again(config, facts, folder, run.say), True
    else:
        loaded = config if isinstance(config, TuneConfig) else load_config(config, facts.backend)
        plans = plans_of(loaded, facts, folder)
    rows = run.measure(plans, fresh, tuple(devices))
    for line in [*table_lines(rows), *summary_lines(rows)]:
        run.say(line)
    return rows


@dataclass
class _Run:
    device: str
    facts: DeviceFacts
    folder: Path
    peers: tuple[str, ...]
    seconds_each: float
    console: Console | None = None
    verbose: bool = False
    # When the run began, and when it ends if it has a budget, as moments of ``time.monotonic``.
    span: tuple[float, float | None] = field(default_factory=lambda: (time.monotonic(), None))
    # Name to print before lines, among several processes.
    name: str = ""
    energy: bool = False
    watch: Callable[[str], object] | None = None

    def say(self, text: str) -> None:
        text = f"[{self.name}] {text}" if self.name else text
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        if self.watch is not None:
            self.watch(text)

    def measure(self, plans: Sequence[Plan], fresh: bool, devices: tuple[str, ...] = ()) -> list[Row]:
        """Rows of all plans, in their order. ``devices``: where to measure, if on several."""
        software = software_versions(self.facts)
        stored = self._stored()
        rows, todo = self._split(plans, {} if fresh else stored, software)
        if rows:
            known, all_ = counted(len(rows), "row"), counted(len(plans), "workload")
            self.say(f"already measured: {known} (--fresh measures them again); left: {len(todo)} of {all_}")
        failures = known_failures(stored.values(), [plan.workload for plan in plans], software)
        groups = [list(group) for _, group in itertools.groupby(todo, key=lambda plan: kind_of(plan.workload))]
        several, on_gpu = len(devices) > 1 and len(groups) > 1, self.facts.backend == "cuda"
        waits = several or not on_gpu
        cores = len(os.sched_getaffinity(0)) - (0 if waits else PROCESSES)
        with CompileAhead(self.device, cores, failures) as ahead:
            # Within a budget there is no time to compile everything before the first comparison.
            if len(todo) > 1 and not (waits and self.span[1]):
                self._compile_ahead(groups, ahead)
            if waits:
                # Processes of other devices know nothing of this one's, and on a CPU they would disturb each other.
                ahead.wait(self.say)
            if several:
                groups.sort(key=len, reverse=True)
                turns = multiprocessing.get_context("spawn").Value("i", 0)
                shared = dataclasses.replace(self, console=None, watch=None)
                on_each(devices, "bench", _compare_share, shared, groups, turns, ahead.failures, software)
                rows |= self._split(todo, self._stored(), software)[0]
            else:
                rows |= self.compare(ready_first(groups, ahead, self.span[1]), ahead.failures, software)
        left = [plan for plan in todo if all(self._identity(plan, which) not in rows for which in plan.passes)]
        done = counted(len(todo) - len(left), "workload")
        self.say(f"{done} compared; {time.monotonic() - self.span[0]:.0f} s since the start")
        if left and self.span[1]:
            self.say(f"the time is up; {len(left)} of {counted(len(todo), 'workload')} left out: run the same again")
        order = [self._identity(plan, which) for plan in plans for which in plan.passes]
        return [rows[identity] for identity in order if identity in rows]

    def compare(self, take: Take, failures: Mapping[Kind, str], software: dict[str, str]) -> Rows:
        """Measure and store the rows of groups of plans; a group has one kind.

        On a GPU the next processes are set up during the present comparisons. Within a budget no workload begins that
        would not end in time if it took as long as the longest so far.
        """
        rows, longest_s, (begin, end) = Rows(), 0.0, self.span
        limit = PROCESSES if self.facts.backend == "cuda" else 1
        for worker, group in with_processes(take, functools.partial(self._process, failures), limit):
            for number, plan in enumerate(group, 1):
                began = time.monotonic()
                if end is not None and began + longest_s >= end:
                    return rows
                left = "" if end is None else f", {end - began:.0f} s left"
                self.say(f"[{number}/{len(group)}, {began - begin:.0f} s{left}] {_name(plan.workload)}")
                rows |= {identity_of(row): row for row in self._rows(plan, worker, failures, software)}
                longest_s = max(longest_s, time.monotonic() - began)
        return rows

    def _stored(self) -> Rows:
        return {identity_of(row): row for row in stored_rows(self.folder, self.facts)}

    def _split(self, plans: Sequence[Plan], stored: Rows, software: dict[str, str]) -> tuple[Rows, list[Plan]]:
        """The rows that need not be measured again, and plans for the others."""
        rows, todo = Rows(), list[Plan]()
        for plan in plans:
            missing = []
            for which in plan.passes:
                row = stored.get(self._identity(plan, which))
                if row is not None and self._is_current(row, plan, which, software):
                    rows[self._identity(plan, which)] = row
                else:
                    missing.append(which)
            if missing:
                todo.append(Plan(plan.workload, tuple(missing), plan.schedules, plan.origins, plan.objectives))
        return rows, todo

    def _process(self, failures: Mapping[Kind, str], group: list[Plan]) -> Worker:
        """A kind's process, which on a GPU is set up for its first workload during earlier comparisons."""
        first = group[0].workload
        if self.facts.backend != "cuda" or first.operation == "harmonics":
            return Worker(IdleProcess(first.problem, self.device))
        peers = self._peers_of(first) - ({COMPILED_PEER} if kind_of(first) in failures else set())
        return Worker(IdleProcess(first.problem, self.device, first, tuple(sorted(peers)), group[0].passes))

    def _rows(self, plan: Plan, worker: Worker, failures: Mapping[Kind, str], software: dict[str, str]) -> list[Row]:
        """Measure and store the rows of one workload; none if the comparison itself cannot run."""
        reason = failures.get(kind_of(plan.workload))
        try:
            comparison = run_comparison(
                ComparisonSetting(plan.workload, self.device, self.peers),
                plan.passes,
                plan.schedules,
                seconds_each=self.seconds_each,
                on_step=functools.partial(self._step, plan),
                worker=worker,
                known_failures={} if reason is None else {COMPILED_PEER: reason},
                copies=True,
                deadline=self.span[1],
                energy=self.energy,
            )
        except WorkerError as error:
            worker.close()
            self.say(f"{_name(plan.workload)}: not compared, {error}")
            return []
        begin = time.monotonic()
        rows = self._store([row_of(plan, which, comparison, software, self.facts) for which in plan.passes])
        self._step(plan, seconds_text({**comparison.seconds, "store": time.monotonic() - begin}))
        return rows

    def _store(self, rows: Sequence[Row]) -> list[Row]:
        """Store rows; returns what the record has of them, and says why a row stays."""
        kept = store_rows(self.folder, self.facts, rows)
        for row, stored in zip(rows, kept, strict=True):
            for name, reason in lost_peers(stored, row).items():
                self.say(f"{SuiteRow(row).name}: {name} failed and has a time in the stored row, which stays: {reason}")
        return kept

    def _step(self, plan: Plan, text: str) -> None:
        if self.verbose or (self.console is not None and self.console.is_terminal):
            self.say(f"  {now_text()[11:19]} {plan.workload.label}: {text}")

    def _compile_ahead(self, groups: Sequence[list[Plan]], ahead: CompileAhead) -> None:
        """Begin to compile what comparisons need; kinds whose peers compile nothing come first."""
        products = {kind_of(group[0].workload): self._product(group) for group in groups}
        for group in sorted(groups, key=lambda group: products[kind_of(group[0].workload)] is not None):
            kind, specs = kind_of(group[0].workload), []
            for plan in group:
                directions = itertools.chain.from_iterable(plan.workload.kind.passes[which] for which in plan.passes)
                specs += kernels_of(plan.workload, plan.schedules.values(), dict.fromkeys(directions), self.device)
            ahead.add(kind, specs, products[kind])
        kernels, compiled = ahead.counts
        self.say(f"compiling {kernels} kernels and {compiled} products of peers in {ahead.workers} processes")

    def _product(self, group: Sequence[Plan]) -> Product | None:
        """What is worth compiling in advance: e3nn's product, and cuEquivariance's contractions, which take minutes."""
        first, passes = group[0].workload, tuple(dict.fromkeys(which for plan in group for which in plan.passes))
        if self.facts.backend != "cuda" or first.operation == "harmonics":
            return None
        if first.operation == "contraction":
            return Product(first, (POLYNOMIAL_PEER,), passes) if POLYNOMIAL_PEER in self._peers_of(first) else None
        return Product(first) if COMPILED_PEER in self._peers_of(first) else None

    def _identity(self, plan: Plan, which: str) -> tuple[Any, ...]:
        kernel = plan.workload.identity(which)
        names = ("problem", "operation", "pass", "dtype", "layout", "graph_class", "deterministic")
        return identity_of(dict(zip(names, kernel, strict=True)))

    def _peers_of(self, workload: Workload) -> set[str]:
        names = peer_names(self.device, workload.deterministic, workload.operation)
        return set(self.peers) & set(names)

    def _is_current(self, row: Row, plan: Plan, which: str, software: dict[str, str]) -> bool:
        """Whether measuring again would give the same row, except for noise. Older rows name no peer's code."""
        graph, peers = build_graph(plan.workload.graph), self._peers_of(plan.workload)
        times, codes, known = row["times"], codes_of(peers, plan.workload.operation), row.get("code", {})
        return (
            row.get("software") == software
            and row.get("schedules") == json.loads(json.dumps(plan.schedules_in(which)))
            and row.get("graph") == {"name": graph.name, "edges": graph.num_edges, "nodes": graph.num_nodes}
            and {TUNED, DEFAULT} | peers <= set(times)
            and all(known.get(name, code) == code for name, code in codes.items())
            and not any(times[name].get("error", "").startswith(NOT_COMPARED) for name in peers)
            and not any("error" in times[name] for name in (TUNED, DEFAULT))
            and (not self.energy or "joules" in row)
            # Another generator version may make the same kernels.
            and (row.get("generator") == GENERATOR_VERSION or row.get("sources") == sources_of(plan, which, self.facts))
        )


def _compare_share(
    device: str,
    name: str,
    run: _Run,
    groups: list[list[Plan]],
    turns: Synchronized[int],
    failures: dict[Kind, str],
    software: dict[str, str],
) -> None:
    """Run on one of several devices: compare the next of ``groups`` whenever this device is idle."""
    from rich.console import Console

    console = Console(stderr=True, force_terminal=False)
    here = dataclasses.replace(run, device=device, name=name, console=console)
    here.compare(in_turn(groups, turns), failures, software)


def _name(workload: Workload) -> str:
    kind = " deterministic" if workload.deterministic else ""
    return f"{workload.label} on {workload.graph.name}, {workload.operation} {workload.dtype}{kind}"


# Plan what to compare for each workload of a config, and turn results into rows (plain data per workload and pass).

# Default passes of a config: inference, training on values, training on forces.
MODEL_PASSES = ("forward", "backward", "force_step")


@dataclass(frozen=True)
class Plan:
    """What to measure for one workload; ``schedules`` by contender and direction, ``origins`` of the tuned ones.

    objectives: by direction, of those that were not tuned by time.
    """

    workload: Workload
    passes: tuple[str, ...]
    schedules: dict[str, dict[str, Knobs]]
    origins: dict[str, str]
    objectives: dict[str, str] = field(default_factory=dict)

    def kernels_in(self, which: str) -> tuple[str, ...]:
        """Directions whose schedules a pass uses; a deterministic convolution computes gradients of x separately."""
        names = self.workload.kind.passes[which]
        if self.workload.deterministic and self.workload.operation == "conv":
            names = tuple(part.name for name in names for part in fixed_order_parts(DIRECTIONS[name]))
        return tuple(name for name in dict.fromkeys(names) if name in self.origins)

    def schedules_in(self, which: str) -> dict[str, dict[str, Any]]:
        """Schedules as JSON data, by contender and direction of a pass."""
        return {
            name: {direction: chosen[direction].to_dict() for direction in self.kernels_in(which)}
            for name, chosen in self.schedules.items()
        }


def sources_of(plan: Plan, which: str, facts: DeviceFacts) -> dict[str, dict[str, str]]:
    """Source hashes of our kernels in a pass, by contender and direction."""
    specs = {direction: plan.workload.spec(direction, facts) for direction in plan.kernels_in(which)}
    return {
        name: {direction: hash_of_text(source_text(spec, chosen[direction])) for direction, spec in specs.items()}
        for name, chosen in plan.schedules.items()
    }


def codes_of(peers: Collection[str], operation: str) -> dict[str, str]:
    """Hashes of the peers' own code, by name."""
    return {each.name: each.code for each in ADAPTERS if each.name in peers and operation in each.operations}


def plans_of(loaded: TuneConfig, facts: DeviceFacts, folder: Path) -> list[Plan]:
    """Plans for all workloads, grouped by problem; errors in any workload are raised before measuring."""
    database = Database.load(database_path(folder, facts.slug))
    workloads = by_problem(loaded.workloads)
    return [plan_of(workload, loaded.passes, facts, database) for workload in workloads]


def plan_of(workload: Workload, passes: tuple[str, ...] | None, facts: DeviceFacts, database: Database) -> Plan:
    """The plan with the default and the schedules that the runtime would load (exact entries of ``database`` first)."""
    if passes is None:
        allowed, known = set(workload.directions), workload.kind.passes
        possible = (which for which in MODEL_PASSES if which in known and allowed.issuperset(known[which]))
        passes = tuple(possible) or workload.directions
    graph_class = workload.graph_class()
    default = {direction: space_of(workload, direction, facts).default for direction in workload.directions}
    tuned, origins = {}, {}
    objectives: dict[str, str] = {}
    for direction in workload.directions:
        entry = database.get(workload.identity(direction))
        if entry is not None:
            tuned[direction], origins[direction] = entry.tuned_schedule, "exact"
        else:
            found = Finder(workload.spec(direction, facts), strict=False).find(graph_class)
            tuned[direction], origins[direction], entry = found.schedule, found.origin, found.entry
        objectives |= {direction: entry.objective} if entry is not None and entry.by else {}
    return Plan(workload, passes, {TUNED: tuned, DEFAULT: default}, origins, objectives)


def row_of(plan: Plan, which: str, comparison: ComparisonResult, software: dict[str, str], facts: DeviceFacts) -> Row:
    workload, graph = plan.workload, build_graph(plan.workload.graph)
    kernels, moved = plan.kernels_in(which), moved_bytes(workload, which)
    results = {name: row[which] for name, row in comparison.results.items() if which in row}
    joules = _known(results, lambda result: result.joules)
    objectives = {kernel: plan.objectives[kernel] for kernel in kernels if kernel in plan.objectives}

    def of_pass(by_contender: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        picked = {
            name: {kernel: by_kernel[kernel] for kernel in kernels if kernel in by_kernel}
            for name, by_kernel in by_contender.items()
        }
        return {name: found for name, found in picked.items() if found}

    row = {
        "label": workload.label,
        "problem": workload.problem.key,
        "operation": workload.operation,
        "graph": {"name": graph.name, "edges": graph.num_edges, "nodes": graph.num_nodes},
        "graph_class": workload.graph_class().text,
        "dtype": workload.dtype,
        "layout": workload.layout,
        "deterministic": workload.deterministic,
        "pass": which,
        "bytes": moved,
        "floor_us": moved / comparison.copy_bandwidth * 1e6,
        "copy_us": comparison.copies.get(which),
        "times": {name: result.to_dict() for name, result in results.items()},
        "memory": _known(results, lambda result: result.memory_bytes),
        "host_us": _known(results, lambda result: result.host_us),
        **({"joules": joules} if joules else {}),
        **({"order_ms": comparison.order_ms} if comparison.order_ms else {}),
        "schedules": plan.schedules_in(which),
        "sources": sources_of(plan, which, facts),
        "origins": {kernel: plan.origins[kernel] for kernel in kernels},
        **({"objectives": objectives} if objectives else {}),
        "resources": of_pass(comparison.resources),
        "errors": of_pass(comparison.errors),
        "certificates": of_pass(comparison.certificates),
        "date": now_text(),
        "software": software,
        "code": codes_of(results, workload.operation),
        "generator": GENERATOR_VERSION,
    }
    return without_noise(row)


def _known(results: dict[str, Any], figure: Callable[[Any], float | None]) -> dict[str, float]:
    return {name: value for name, result in results.items() if (value := figure(result)) is not None}


# The order of a bench: which group of workloads is next, and its process, set up while others are measured.
#
# A group has one kind: what peers build for it serves all its graphs.

Group = list[Plan]
# The next group; None if none is left or, unless it must be given, if none is ready.
Take = Callable[[bool], "Group | None"]


def ready_first(groups: Sequence[Group], ahead: CompileAhead, end: float | None = None) -> Take:
    """Groups in their order, those first that wait for no compilation; none that is not ready by ``end``."""
    left = list(groups)

    def take(must: bool) -> Group | None:
        kinds = [kind_of(group[0].workload) for group in left]
        if left and must:
            ahead.wait_for_one(kinds, end)
        for place, kind in enumerate(kinds):
            if ahead.is_ready(kind):
                return left.pop(place)
        return None

    return take


def in_turn(groups: Sequence[Group], turns: Synchronized[int]) -> Take:
    """Groups in their order, shared among processes that count ``turns``."""

    def take(must: bool) -> Group | None:
        with turns.get_lock():
            turn = turns.value
            turns.value += 1
        return groups[turn] if turn < len(groups) else None

    return take


def with_processes(take: Take, start: Callable[[Group], Worker], limit: int) -> Iterator[tuple[Worker, Group]]:
    """Each group with its process, the one that is set up first; ``limit``: how many processes live at a time."""
    waiting: list[tuple[Worker, Group]] = []
    with ExitStack() as stack:
        while True:
            while len(waiting) < limit and (group := take(not waiting)) is not None:
                worker = stack.enter_context(start(group))
                worker.launch()
                waiting.append((worker, group))
            if not waiting:
                return
            chosen = waiting.pop(_first_set_up([worker for worker, _ in waiting]))
            yield chosen
            chosen[0].close()


def _first_set_up(workers: Sequence[Worker]) -> int:
    """The place of the first process that has answered, after waiting for one; the first if none does in time."""
    if len(workers) == 1:
        return 0
    connections = [worker.launch() for worker in workers]
    ready = multiprocessing.connection.wait(connections, START_LIMIT_S)
    return next((place for place, connection in enumerate(connections) if connection in ready), 0)


# ``equitune bench again``: what to compare so that stored rows are measured again, all by one set of code.

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

    return lambda row: (oldest[workload_key(row)[:KIND]], workload_key(row))


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


# ``equitune bench orders``: time the ordering of the graphs of stored rows, without measuring the rows again.
#
# Every comparison measures what each contender does once for a new graph. Rows from before it did lack that figure; it
# depends on the graph and on what the schedules need alone, so it is measured here once for all rows that share both.


def add_orders(device: str, folder: Path, say: Callable[[str], None]) -> list[Row]:
    """Add ``order_ms`` and its date to the device's rows of convolutions that lack it; returns these rows."""
    facts = device_facts(device)
    lacking = [row for row in stored_rows(folder, facts) if row["operation"] in CONVOLUTIONS and "order_ms" not in row]
    timing, graphs, done = _Orders(device), load_graphs(), []
    for _, group in itertools.groupby(sorted(lacking, key=workload_key), key=workload_key):
        rows = list(group)
        try:
            found = timing.of(rows, workload_of(rows, graphs))
        except EquituneError as error:
            say(f"{rows[0]['label']} on {rows[0]['graph']['name']}: left out, {error}")
            continue
        done += [row | {"order_ms": found, "order_date": now_text()} for row in rows]
    store_rows(folder, facts, done)
    say(f"{len(done)} of {len(lacking)} rows without the time of ordering their graph have it now")
    return done


@dataclass
class _Orders:
    """Times of ordering, milliseconds, by graph and by what is done."""

    device: str
    known: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def of(self, rows: Iterable[Row], workload: Workload) -> dict[str, float]:
        """By contender that has a time in one of the rows of a workload."""
        rows = list(rows)
        timed = {name for row in rows for name, result in row["times"].items() if "error" not in result}
        peers = {adapter.name: adapter.order for adapter in ADAPTERS if workload.operation in adapter.operations}
        found = {name: self._time(workload, name, order) for name, order in peers.items() if name in timed}
        for name in timed & {TUNED, DEFAULT}:
            read = workload.kind.read
            schedules = {key: read(knobs) for row in rows for key, knobs in row["schedules"][name].items()}
            operator = measured_kind(workload.operation).build(workload, schedules, self.device)
            product = getattr(operator, "product", operator)
            order = new_graph(operator, build_graph(workload.graph).num_nodes)
            found[name] = self._time(workload, (product.by_receiver, product.by_sender), order)
        return found

    def _time(self, workload: Workload, what: Any, order: Any) -> float:
        key = (workload.graph.name, what)
        if key not in self.known:
            graph = build_graph(workload.graph)
            self.known[key] = order_ms(order, graph.sender.to(self.device), graph.receiver.to(self.device))
        return self.known[key]
