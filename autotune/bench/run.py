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
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.bench.again import plans_again
from autotune.bench.plans import Plan, plans_of, row_of, sources_of
from autotune.bench.rows import DEFAULT, OURS, Row, identity_of, lost_peers, store_rows, stored_rows
from autotune.bench.text import row_name, seconds_text, summary_lines, table_lines
from autotune.bench.turns import Take, in_turn, ready_first, with_processes
from autotune.compare.ahead import CompileAhead
from autotune.compare.comparison import run_comparison
from autotune.compare.comparison_worker import ComparisonSetting
from autotune.compare.idle_process import IdleProcess
from autotune.compare.precompile import COMPILED_PEER, Kind, Product, kernels_of, kind_of, known_failures
from autotune.database.maintenance import now_text, software_versions
from autotune.database.store import writable_results_dir
from autotune.errors import ConfigError, WorkerError, unknown_name
from autotune.measure.worker import Worker, on_each
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
        failures = known_failures(stored.values(), [plan.workload for plan in plans], software)
        groups = [list(group) for _, group in itertools.groupby(todo, key=lambda plan: kind_of(plan.workload))]
        several, on_gpu = len(devices) > 1 and len(groups) > 1, self.facts.backend == "cuda"
        with CompileAhead(self.device, cores_free(PROCESSES if on_gpu and not several else 0), failures) as ahead:
            if len(todo) > 1:
                self._compile_ahead(groups, ahead)
            if several or not on_gpu:
                # Processes of other devices know nothing of this one's, and on a CPU they would disturb each other.
                ahead.wait(self.say)
            if several:
                groups.sort(key=len, reverse=True)
                turns = multiprocessing.get_context("spawn").Value("i", 0)
                shared = (self.facts, self.folder, self.peers, self.seconds_each, self.verbose)
                on_each(devices, "bench", _compare_share, shared, groups, turns, ahead.failures, software)
                rows |= self._split(todo, self._stored(), software)[0]
            else:
                rows |= self.compare(ready_first(groups, ahead), ahead.failures, software)
        self.say(f"{len(todo)} workloads compared in {time.monotonic() - begin:.0f} s")
        order = [self._identity(plan, which) for plan in plans for which in plan.passes]
        return [rows[identity] for identity in order if identity in rows]

    def compare(self, take: Take, failures: Mapping[Kind, str], software: dict[str, str]) -> Rows:
        """Measure and store the rows of groups of plans; a group has one kind.

        On a GPU the next processes are set up during the present comparisons.
        """
        begin, rows = time.monotonic(), Rows()
        limit = PROCESSES if self.facts.backend == "cuda" else 1
        for worker, group in with_processes(take, functools.partial(self._process, failures), limit):
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

    def _process(self, failures: Mapping[Kind, str], group: list[Plan]) -> Worker:
        return Worker(self._idle(group[0], failures))

    def _idle(self, plan: Plan, failures: Mapping[Kind, str]) -> IdleProcess:
        """A kind's process, which on a GPU is set up for its first workload during earlier comparisons."""
        first = plan.workload
        if self.facts.backend != "cuda" or first.operation == "harmonics":
            return IdleProcess(first.problem, self.device)
        lost = {COMPILED_PEER} if kind_of(first) in failures else set()
        return IdleProcess(first.problem, self.device, first, tuple(sorted(self._peers_of(first) - lost)), plan.passes)

    def _rows(self, plan: Plan, worker: Worker, failures: Mapping[Kind, str], software: dict[str, str]) -> list[Row]:
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
        begin = time.monotonic()
        rows = self._store([row_of(plan, which, comparison, software, self.facts) for which in plan.passes])
        self._step(plan, seconds_text({**comparison.seconds, "store": time.monotonic() - begin}))
        return rows

    def _store(self, rows: Sequence[Row]) -> list[Row]:
        """Store rows; returns what the record has of them, and says why a row stays."""
        kept = store_rows(self.folder, self.facts, rows)
        for row, stored in zip(rows, kept, strict=True):
            for name, reason in lost_peers(stored, row).items():
                self.say(f"{row_name(row)}: {name} failed and has a time in the stored row, which stays: {reason}")
        return kept

    def _step(self, plan: Plan, text: str) -> None:
        if self.console.is_terminal or self.verbose:
            self.say(f"  {now_text()[11:19]} {plan.workload.label}: {text}")

    def _setting(self, plan: Plan) -> ComparisonSetting:
        return ComparisonSetting(plan.workload, self.device, self.peers)

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
    run.compare(in_turn(groups, turns), failures, software)


def cores_free(used: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) - used)


def _name(workload: Workload) -> str:
    kind = " deterministic" if workload.deterministic else ""
    return f"{workload.label} on {workload.graph.name}, {workload.operation} {workload.dtype}{kind}"
