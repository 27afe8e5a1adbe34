"""Compile in other processes while comparisons run: our kernels, and what peers compile for a kind of workload.

A comparison's process finds all of it on the disk. Each kind (problem, operation, dtype, layout) is ready when its jobs
have ended, well or not; reasons of peers that cannot compile are kept. What an earlier run noted as done is no job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from autotune.compare import precompile
from autotune.compare.precompile import Kind, Product
from autotune.compare.torch_cache import noted
from autotune.measure import worker as processes
from autotune.measure.worker import CONTEXT


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
            reason = noted(precompile.name_of(kind, product.names), self.device)
            if reason:
                self.failures[kind] = reason
            elif reason is None:
                self._products[kind] = self._submit(precompile.compile_peers, product, self.device)
                jobs.append(self._products[kind])
        for spec in specs:
            if spec not in self._kernels:
                self._kernels[spec] = self._submit(precompile.compile_kernel, spec)
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

    def wait_for_one(self, kinds: Sequence[Kind | None]) -> None:
        """Wait until one of these kinds is ready."""
        while not any([self.is_ready(kind) for kind in kinds]):
            wait([job for kind in kinds for job in self.jobs[kind] if not job.done()], return_when=FIRST_COMPLETED)

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
            self._pool = ProcessPoolExecutor(self.workers, CONTEXT, initializer=precompile.begin_process)
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
