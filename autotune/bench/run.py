"""The main loop of ``equitune bench``: compare tuned, default and peers in one run; nothing is searched.

Rows are stored in ``results/bench/DEVICE.json`` after each workload (a newer row replaces the one of the same kernel,
graph class and pass), and printed as a table. Rows of the present kernels and software are not measured again, so the
same command continues an interrupted run.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.bench.again import plans_again
from autotune.bench.plans import Plan, plans_of, row_of, sources_of
from autotune.bench.rows import DEFAULT, OURS, Row, identity_of, store_rows, stored_rows
from autotune.bench.text import summary_lines, table_lines
from autotune.compare.comparison import run_comparison
from autotune.compare.comparison_worker import ComparisonSetting
from autotune.compare.idle_process import IdleProcess
from autotune.compare.precompile import COMPILED_PEER, Kind, compile_ahead, kernels_of, kind_of, known_failures
from autotune.database.provenance import now_text, software_versions
from autotune.database.store import writable_results_dir
from autotune.errors import ConfigError, WorkerError, unknown_name
from autotune.measure.devices import on_each
from autotune.measure.worker import Worker
from autotune.workload.config import TuneConfig, load_config
from autotune.workload.graphs import build_graph
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.version import GENERATOR_VERSION

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

    from rich.console import Console

Rows = dict[tuple[Any, ...], Row]
# Processes for comparisons on a GPU: one measures, the others are being set up.
PROCESSES = 3


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
) -> list[Row]:
    """Compare every workload of a config; returns its rows, those of earlier runs included.

    config: a date for all stored rows of the device from before it, which are measured again.
    peers: by name, None for all of the device. seconds_each: approximate sampling time of a contender in a pass. fresh:
    also measure stored rows again. verbose: print every step with the time, even without a terminal. devices: several
    GPUs of one model, among which the problems are divided.
    """
    import torch
    from rich.console import Console

    device = device or next(iter(devices), "cuda" if torch.cuda.is_available() else "cpu")
    facts = device_facts(device)
    if others := sorted({other.name for other in map(device_facts, devices)} - {facts.name}):
        raise ConfigError(f"devices are {facts.name} and {', '.join(others)}; rows of one record need one model of GPU")
    folder = Path(results_dir) if results_dir is not None else writable_results_dir()
    console = console or Console(stderr=True)
    run = _Run(device, facts, folder, _chosen_peers(peers, device), seconds_each, console, verbose)
    if isinstance(config, datetime):
        plans, fresh = plans_again(config, facts, folder, run.say), True
    else:
        loaded = config if isinstance(config, TuneConfig) else load_config(config, facts.backend)
        plans = plans_of(loaded, facts, folder)
    rows = run.measure(plans, fresh, tuple(devices))
    for line in [*table_lines(rows), *summary_lines(rows)]:
        run.say(line)
    return rows


def _chosen_peers(names: Sequence[str] | None, device: str) -> tuple[str, ...]:
    from autotune.compare.peers import peer_names

    known = peer_names(device)
    for name in names or ():
        if name not in known:
            raise ConfigError(unknown_name("peer", name, known))
    return known if names is None else tuple(name for name in known if name in names)


@dataclass
class _Run:
    device: str
    facts: DeviceFacts
    folder: Path
    peers: tuple[str, ...]
    seconds_each: float
    console: Console
    verbose: bool = False
    # Name to print before lines, among several processes.
    name: str = ""

    def say(self, text: str) -> None:
        text = f"[{self.name}] {text}" if self.name else text
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def measure(self, plans: Sequence[Plan], fresh: bool, devices: tuple[str, ...] = ()) -> list[Row]:
        """Rows of all plans, in their order. ``devices``: where to measure, if on several."""
        begin, software = time.monotonic(), software_versions(self.facts)
        stored = self._stored()
        rows, todo = self._split(plans, {} if fresh else stored, software)
        if rows:
            self.say(f"{len(rows)} rows are already measured; {len(todo)} of {len(plans)} workloads remain")
        # Failures depend on e3nn and torch only, so they stay valid if our kernels change.
        told = [row for row in stored.values() if row.get("software") == software]
        failures = known_failures(told, [plan.workload for plan in plans])
        if len(todo) > 1:
            failures |= self._compile_ahead(todo, failures)
        groups = [list(group) for _, group in itertools.groupby(todo, key=lambda plan: kind_of(plan.workload))]
        if len(devices) > 1 and len(groups) > 1:
            groups.sort(key=len, reverse=True)
            turns = multiprocessing.get_context("spawn").Value("i", 0)
            shared = (self.facts, self.folder, self.peers, self.seconds_each, self.verbose)
            on_each(devices, "bench", _compare_share, shared, groups, turns, failures, software)
            rows |= self._split(todo, self._stored(), software)[0]
        else:
            rows |= self.compare(iter(groups), failures, software)
        self.say(f"{len(todo)} workloads compared in {time.monotonic() - begin:.0f} s")
        order = [self._identity(plan, which) for plan in plans for which in plan.passes]
        return [rows[identity] for identity in order if identity in rows]

    def compare(self, groups: Iterator[list[Plan]], failures: dict[Kind, str], software: dict[str, str]) -> Rows:
        """Measure and store the rows of groups of plans; a group has one kind."""
        begin, rows = time.monotonic(), Rows()
        for worker, group in self._by_kind(groups, failures):
            for number, plan in enumerate(group, 1):
                self.say(f"[{number}/{len(group)}, {time.monotonic() - begin:.0f} s] {_name(plan.workload)}")
                rows |= {identity_of(row): row for row in self._rows(plan, worker, failures, software)}
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
                todo.append(Plan(plan.workload, tuple(missing), plan.schedules, plan.origins))
        return rows, todo

    def _by_kind(
        self, groups: Iterator[list[Plan]], failures: Mapping[Kind, str]
    ) -> Iterator[tuple[Worker, list[Plan]]]:
        """Groups of plans by kind, each with a process: what peers build for a kind serves all its graphs.

        On a GPU the next processes are set up during the present comparisons.
        """
        waiting: deque[tuple[Worker, list[Plan]]] = deque()
        with ExitStack() as stack:
            while True:
                for group in itertools.islice(
                    groups, (PROCESSES if self.facts.backend == "cuda" else 1) - len(waiting)
                ):
                    worker = stack.enter_context(Worker(self._idle(group[0], failures)))
                    worker.launch()
                    waiting.append((worker, group))
                if not waiting:
                    return
                yield waiting[0]
                waiting.popleft()[0].close()

    def _idle(self, plan: Plan, failures: Mapping[Kind, str]) -> IdleProcess:
        """A kind's process, which on a GPU is set up for its first workload during earlier comparisons."""
        first = plan.workload
        if self.facts.backend != "cuda" or first.operation == "harmonics":
            return IdleProcess(first.problem, self.device)
        lost = {COMPILED_PEER} if kind_of(first) in failures else set()
        return IdleProcess(first.problem, self.device, first, tuple(sorted(self._peers_of(first) - lost)), plan.passes)

    def _takes_compiled(self, workload: Workload) -> bool:
        """Whether its e3nn product is worth compiling in advance; harmonics compile quickly."""
        compiled = self.facts.backend == "cuda" and COMPILED_PEER in self._peers_of(workload)
        return compiled and workload.operation != "harmonics"

    def _rows(self, plan: Plan, worker: Worker, failures: dict[Kind, str], software: dict[str, str]) -> list[Row]:
        """Measure and store the rows of one workload; none if the comparison itself cannot run."""
        reason = failures.get(kind_of(plan.workload))
        try:
            comparison = run_comparison(
                self._setting(plan),
                plan.passes,
                plan.schedules,
                seconds_each=self.seconds_each,
                on_step=functools.partial(self._step, plan),
                worker=worker,
                known_failures={} if reason is None else {COMPILED_PEER: reason},
                copies=True,
            )
        except WorkerError as error:
            worker.close()
            self.say(f"{_name(plan.workload)}: not compared, {error}")
            return []
        rows = [row_of(plan, which, comparison, software, self.facts) for which in plan.passes]
        store_rows(self.folder, self.facts, rows)
        return rows

    def _step(self, plan: Plan, text: str) -> None:
        if self.console.is_terminal or self.verbose:
            self.say(f"  {now_text()[11:19]} {plan.workload.label}: {text}")

    def _setting(self, plan: Plan) -> ComparisonSetting:
        return ComparisonSetting(plan.workload, self.device, self.peers)

    def _compile_ahead(self, todo: Sequence[Plan], failures: Mapping[Kind, str]) -> dict[Kind, str]:
        """Reasons of the e3nn products that torch.compile cannot compile; ``failures``: those already known."""
        specs = []
        for plan in todo:
            directions = dict.fromkeys(
                itertools.chain.from_iterable(plan.workload.kind.passes[which] for which in plan.passes)
            )
            specs += kernels_of(plan.workload, plan.schedules.values(), directions, self.device)
        products = [plan.workload for plan in todo if self._takes_compiled(plan.workload)]
        products = [workload for workload in products if kind_of(workload) not in failures]
        begin = time.monotonic()
        found = compile_ahead(specs, products, self.device, self.say)
        self.say(f"compiled in {time.monotonic() - begin:.0f} s")
        return found

    def _identity(self, plan: Plan, which: str) -> tuple[Any, ...]:
        kernel = plan.workload.identity(which)
        names = ("problem", "operation", "pass", "dtype", "layout", "graph_class", "deterministic")
        return identity_of(dict(zip(names, kernel, strict=True)))

    def _peers_of(self, workload: Workload) -> set[str]:
        from autotune.compare.peers import peer_names

        names = peer_names(self.device, workload.deterministic, workload.operation)
        return set(self.peers) & set(names)

    def _is_current(self, row: Row, plan: Plan, which: str, software: dict[str, str]) -> bool:
        """Whether measuring again would give the same row, except for noise."""
        graph = build_graph(plan.workload.graph)
        times = row["times"]
        return (
            row.get("software") == software
            and row.get("schedules") == json.loads(json.dumps(plan.schedules_in(which)))
            and row.get("graph") == {"name": graph.name, "edges": graph.num_edges, "nodes": graph.num_nodes}
            and {OURS, DEFAULT} | self._peers_of(plan.workload) <= set(times)
            and not any("error" in times[name] for name in (OURS, DEFAULT))
            # Another generator version may make the same kernels.
            and (row.get("generator") == GENERATOR_VERSION or row.get("sources") == sources_of(plan, which, self.facts))
        )


def _compare_share(
    device: str,
    name: str,
    shared: tuple,
    groups: list[list[Plan]],
    turns: Synchronized[int],
    failures: dict[Kind, str],
    software: dict[str, str],
) -> None:
    """Run on one of several devices: compare the next of ``groups`` whenever this device is idle."""
    from rich.console import Console

    facts, folder, peers, seconds_each, verbose = shared
    console = Console(stderr=True, force_terminal=False)
    run = _Run(device, facts, folder, peers, seconds_each, console, verbose, name)
    run.compare(_in_turn(groups, turns), failures, software)


def _in_turn(groups: list[list[Plan]], turns: Synchronized[int]) -> Iterator[list[Plan]]:
    while True:
        with turns.get_lock():
            turn = turns.value
            turns.value += 1
        if turn >= len(groups):
            return
        yield groups[turn]


def _name(workload: Workload) -> str:
    kind = " deterministic" if workload.deterministic else ""
    return f"{workload.label} on {workload.graph.name}, {workload.operation} {workload.dtype}{kind}"
