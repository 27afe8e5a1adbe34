"""What is compiled for a comparison, and how one process does it: our kernels and what peers compile.

It fills the caches on the disk, where the measuring process finds everything. :mod:`autotune.compare.ahead` runs many.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.compare.comparison_worker import Schedules
from autotune.compare.torch_cache import take_note
from autotune.measure import worker as processes
from autotune.measure.operations import runs_of
from autotune.workload.graphs import GraphSpec, Points
from autotune.workload.kinds.base import Problem
from autotune.workload.workload import Workload

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
    from autotune.compare.peers.e3nn import OUT_OF_TIME

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
    runs, names = runs_of(workload.operation), tuple(directions)
    return [spec for chosen in contenders for spec in runs.specs(runs.build(workload, chosen, device), names)]


def name_of(kind: Kind, names: Iterable[str]) -> tuple[str, ...]:
    """The name under which it is noted that peers have compiled a kind."""
    return (kind[0].key, *kind[1:], *names)


def begin_process() -> None:
    """What a process that compiles does first: it ends with its parent, which alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.end_with_parent()


def compile_kernel(spec: Any) -> str:
    from kernelgen.errors import EquituneError
    from kernelgen.runtime.kernel import load_kernel

    try:
        load_kernel(spec)
    except EquituneError as error:
        return str(error)
    return ""


def compile_peers(product: Product, device: str) -> str:
    """Have the peers of a product compile; why e3nn's has no code, if so.

    A success is noted, and so is running out of time; any other failure may be of this moment.
    """
    import torch
    import torch._inductor.config

    from autotune.compare.peers.e3nn import OUT_OF_TIME

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
