"""Compile before a comparison, on all cores: our kernels and e3nn's products.

Fills the compile caches on the disk, where the measuring process finds everything. Returns the reason for each e3nn
product that torch.compile cannot compile.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from autotune.compare.comparison_worker import Schedules
from autotune.measure.runs.registry import runs_of
from autotune.workload.graphs import GraphSpec, Points
from autotune.workload.kinds.base import Problem
from autotune.workload.workload import Workload

COMPILED_PEER = "e3nn-compiled"
# e3nn is compiled with dynamic sizes, so any graph works; a small one leaves memory for every process.
SMALL_GRAPH = GraphSpec("small", Points(100, 0.1), 4.0)
# What a compilation depends on.
Kind = tuple[Problem, str, str, str]


def kind_of(workload: Workload) -> Kind:
    return workload.problem, workload.operation, workload.dtype, workload.layout


def known_failures(rows: Iterable[Mapping[str, Any]], workloads: Iterable[Workload]) -> dict[Kind, str]:
    """The e3nn products for which torch.compile ran into its time limit, from the rows of earlier comparisons."""
    from autotune.compare.peers.e3nn import OUT_OF_TIME

    kinds = {(kind[0].key, *kind[1:]): kind for kind in map(kind_of, workloads)}
    failures = {}
    for row in rows:
        reason = row["times"].get(COMPILED_PEER, {}).get("error", "")
        kind = kinds.get((row["problem"], row["operation"], row["dtype"], row["layout"]))
        if kind is not None and OUT_OF_TIME in reason:
            failures[kind] = reason
    return failures


def kernels_of(
    workload: Workload, contenders: Iterable[Schedules], directions: Iterable[str], device: str
) -> list[Any]:
    """Specs of our kernels in these directions, for :func:`compile_ahead`; each contender has schedules for them."""
    runs, names = runs_of(workload.operation), tuple(directions)
    return [spec for chosen in contenders for spec in runs.specs(runs.build(workload, chosen, device), names)]


def compile_ahead(
    specs: Iterable[Any],
    products: Iterable[Workload],
    device: str,
    say: Callable[[str], None] = lambda text: None,
) -> dict[Kind, str]:
    """Fill the caches; returns the reasons of failures. ``products``: compile their e3nn products, once per kind.

    Failures of our kernels are not reported here, because the comparison reports them.
    """
    specs = list(dict.fromkeys(specs))
    by_kind = {kind_of(workload): workload for workload in products}
    workers = min(len(os.sched_getaffinity(0)), len(specs) + len(by_kind))
    if not workers:
        return {}
    say(f"compiling {len(specs)} kernels and {len(by_kind)} products of e3nn in {workers} processes")
    failures: dict[Kind, str] = {}
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        # The longest compilations first.
        kinds = {pool.submit(_compile_peer, workload, device): kind for kind, workload in by_kind.items()}
        jobs: list[Future[str]] = [*kinds, *(pool.submit(_compile_kernel, spec) for spec in specs)]
        try:
            for job in as_completed(jobs):
                if job in kinds and job.result():
                    failures[kinds[job]] = job.result()
                job.result()
        except BrokenProcessPool as error:
            say(f"precompilation ended early ({error}); the remaining kernels are compiled when needed")
    return failures


def _compile_kernel(spec: Any) -> str:
    from kernelgen.errors import EquituneError
    from kernelgen.runtime.kernel import load_kernel

    try:
        load_kernel(spec)
    except EquituneError as error:
        return str(error)
    return ""


def _compile_peer(workload: Workload, device: str) -> str:
    import torch
    import torch._inductor.config

    # Every core already runs a process.
    torch._inductor.config.compile_threads = 1
    torch.set_num_threads(1)
    return build_peers(workload, device, (COMPILED_PEER,)).get(COMPILED_PEER, "")


def build_peers(
    workload: Workload, device: str, names: Collection[str], passes: Collection[str] = ()
) -> dict[str, str]:
    """Build peers in this process for a small graph, and run their ``passes`` once: some compile at the first call.

    Other graphs of the problem reuse what they build. Returns the reasons of failures, which the comparison reports
    again.
    """
    import torch

    from autotune.compare.peers import peers_for

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
