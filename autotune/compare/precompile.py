"""What is compiled for a comparison, and how one process does it: our kernels and what peers compile.

It fills the caches on the disk, where the measuring process finds everything. :mod:`autotune.compare.precompile` runs
many.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch

from autotune.compare.comparison import Schedules
from autotune.compare.peers import peers_for
from autotune.compare.peers.e3nn import OUT_OF_TIME, noted, take_note
from autotune.measure import worker as processes
from autotune.measure.kinds import measured_kind
from autotune.measure.trial import free_memory
from autotune.measure.worker import CONTEXT
from autotune.workload.graphs import GraphSpec, Points
from autotune.workload.kind import Problem
from autotune.workload.workload import Workload
from kernelgen.errors import EquituneError
from kernelgen.runtime.kernel import load_kernel

COMPILED_PEER = "e3nn-compiled"
# e3nn is compiled with dynamic sizes, so any graph works; a small one leaves memory for every process.
SMALL_GRAPH = GraphSpec("small", Points(100, 0.1), 4.0)
# What a compilation depends on.
Kind = tuple[Problem, str, str, str]


@dataclass(frozen=True)
class Product:
    """``names``: peers to build for a small graph of the workload, with these passes, so that they compile."""

    workload: Workload
    names: tuple[str, ...] = (COMPILED_PEER,)
    passes: tuple[str, ...] = ()


def kind_of(workload: Workload) -> Kind:
    return workload.problem, workload.operation, workload.dtype, workload.layout


def known_failures(
    rows: Iterable[Mapping[str, Any]], workloads: Iterable[Workload], software: Mapping[str, str]
) -> dict[Kind, str]:
    """The e3nn products for which torch.compile ran into its time limit, from rows of the same torch and e3nn."""
    kinds = {(kind[0].key, *kind[1:]): kind for kind in map(kind_of, workloads)}
    failures = {}
    for row in rows:
        if any(row.get("software", {}).get(name) != software.get(name) for name in ("torch", "e3nn")):
            continue
        reason = row["times"].get(COMPILED_PEER, {}).get("error", "")
        kind = kinds.get((row["problem"], row["operation"], row["dtype"], row["layout"]))
        if kind is not None and OUT_OF_TIME in reason:
            failures[kind] = reason
    return failures


def kernels_of(
    workload: Workload, contenders: Iterable[Schedules], directions: Iterable[str], device: str
) -> list[Any]:
    """Specs of our kernels in these directions; each contender has schedules for them."""
    kind, names = measured_kind(workload.operation), tuple(directions)
    return [spec for chosen in contenders for spec in kind.specs(kind.build(workload, chosen, device), names)]


def name_of(kind: Kind, names: Iterable[str]) -> tuple[str, ...]:
    """The name under which it is noted that peers have compiled a kind."""
    return (kind[0].key, *kind[1:], *names)


def begin_process() -> None:
    """What a process that compiles does first: it ends with its parent, which alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.end_with_parent()


def compile_kernel(spec: Any) -> str:
    try:
        load_kernel(spec)
    except EquituneError as error:
        return str(error)
    return ""


def compile_peers(product: Product, device: str) -> str:
    """Have the peers of a product compile; why e3nn's has no code, if so.

    A success is noted, and so is running out of time; any other failure may be of this moment.
    """
    import torch._inductor.config

    # Every core already runs a process.
    torch._inductor.config.compile_threads = 1
    torch.set_num_threads(1)
    reasons = build_peers(product.workload, device, product.names, product.passes)
    reason = reasons.get(COMPILED_PEER, "")
    if not reasons or OUT_OF_TIME in reason:
        take_note(name_of(kind_of(product.workload), product.names), device, reason)
    return reason


def build_peers(
    workload: Workload, device: str, names: Collection[str], passes: Collection[str] = ()
) -> dict[str, str]:
    """Build peers in this process for a small graph, and run their ``passes`` once: some compile at the first call.

    Other graphs of the problem reuse what they build. Returns the reasons of failures, which the comparison reports
    again.
    """
    reasons = {}
    # Nodes or edges alone stay what they are.
    small = SMALL_GRAPH if workload.graph.has_nodes else GraphSpec("small", workload.kind.graph_of_size(100, 0))
    for peer in peers_for(dataclasses.replace(workload, graph=small), device):
        if peer.name in names:
            try:
                built = peer.prepare() if passes else peer.build()
                for which in passes:
                    getattr(built, which.replace("+", "_"))()
            except Exception as error:
                reasons[peer.name] = f"{type(error).__name__}: {error}"[:1000]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return reasons


# Compile in other processes while comparisons run: our kernels, and what peers compile for a kind of workload.
#
# A comparison's process finds all of it on the disk. Each kind (problem, operation, dtype, layout) is ready when its
# jobs have ended, well or not; reasons of peers that cannot compile are kept. What an earlier run noted as done is no
# job.


class CompileAhead:
    """A pool of processes, started by the first job and ended by the last; use it in a ``with``."""

    def __init__(self, device: str, workers: int, failures: dict[Kind, str] | None = None) -> None:
        self.device, self.workers = device, max(1, workers)
        # Reasons why torch.compile has no code for e3nn's product, by kind; grows while products are compiled.
        self.failures = {} if failures is None else failures
        self.jobs: dict[Kind | None, list[Future[str]]] = {}
        self._kernels: dict[Any, Future[str]] = {}
        self._products: dict[Kind, Future[str]] = {}
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, kind: Kind | None, specs: Iterable[Any], product: Product | None = None) -> None:
        """Begin with the kernels of ``specs``, and with a product unless an earlier run has noted it."""
        jobs = self.jobs.setdefault(kind, [])
        if product is not None and kind is not None and kind not in self.failures | self._products:
            reason = noted(name_of(kind, product.names), self.device)
            if reason:
                self.failures[kind] = reason
            elif reason is None:
                self._products[kind] = self._submit(compile_peers, product, self.device)
                jobs.append(self._products[kind])
        for spec in specs:
            if spec not in self._kernels:
                self._kernels[spec] = self._submit(compile_kernel, spec)
            jobs.append(self._kernels[spec])

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of kernels and of products that are or were compiled."""
        return len(self._kernels), len(self._products)

    def is_ready(self, kind: Kind | None) -> bool:
        """Whether nothing of a kind is still compiled; then its failure, if any, is known."""
        if not all(job.done() for job in self.jobs.get(kind, ())):
            return False
        if kind in self._products and (reason := _result(self._products[kind])):
            self.failures[kind] = reason
        if self._pool is not None and all(job.done() for jobs in self.jobs.values() for job in jobs):
            self.close()  # idle processes hold memory of the device
        return True

    def wait_for_one(self, kinds: Sequence[Kind | None], end: float | None = None) -> None:
        """Wait until one of these kinds is ready, or until ``end``, a moment of ``time.monotonic``."""
        while not any([self.is_ready(kind) for kind in kinds]) and (end is None or monotonic() < end):
            jobs = [job for kind in kinds for job in self.jobs[kind] if not job.done()]
            wait(jobs, None if end is None else max(0.0, end - monotonic()), return_when=FIRST_COMPLETED)

    def wait(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Wait for all jobs."""
        jobs = [job for jobs in self.jobs.values() for job in jobs]
        wait(jobs)
        for job in jobs:
            if isinstance(job.exception(), BrokenProcessPool):
                say(f"precompilation ended early ({job.exception()}); the remaining kernels are compiled when needed")
                break
        for kind in self.jobs:
            self.is_ready(kind)

    def close(self) -> None:
        """End all processes, those that compile too."""
        if self._pool is None:
            return
        started = list((getattr(self._pool, "_processes", None) or {}).keys())
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not all(job.done() for jobs in self.jobs.values() for job in jobs):
            processes.end([pid for parent in started for pid in (*processes.descendants(parent), parent)])
        self._pool = None

    def _submit(self, work: Callable[..., str], *arguments: Any) -> Future[str]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.workers, CONTEXT, initializer=begin_process)
        try:
            return self._pool.submit(work, *arguments)
        except BrokenProcessPool as error:
            failed: Future[str] = Future()
            failed.set_exception(error)
            return failed


def _result(job: Future[str]) -> str:
    """Why a job's product has no code; empty for a job that did not end, whose product is compiled when needed."""
    return "" if job.cancelled() or job.exception() is not None else job.result()


def compile_ahead(specs: Iterable[Any], device: str, say: Callable[[str], None] = lambda text: None) -> None:
    """Compile kernels on all cores, and wait. Failures are not reported, because the comparison reports them."""
    specs = list(dict.fromkeys(specs))
    workers = min(len(os.sched_getaffinity(0)), len(specs))
    if not workers:
        return
    say(f"compiling {len(specs)} kernels in {workers} processes")
    with CompileAhead(device, workers) as ahead:
        ahead.add(None, specs)
        ahead.wait(say)


# An idle worker process: slow imports are done, and nothing is on the device.


@dataclass(frozen=True)
class IdleProcess:
    """An idle process: modules are imported and e3nn's product is built on the host; nothing is on the device.

    first: a workload to prepare: ``peers`` are built for it too, and run ``passes`` on a small graph.
    """

    problem: Problem
    device: str
    first: Workload | None = None
    peers: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()

    def open(self) -> Any:
        from autotune.measure import timing  # noqa: F401
        from autotune.measure.references import build_ahead

        build_ahead(self.problem)
        if self.first is not None:
            build_peers(self.first, self.device, self.peers, self.passes)
        free_memory(self.device)
        gc.freeze()  # later collections need not scan what stays
        return None
