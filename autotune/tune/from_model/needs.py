"""What of a model's kernels is tuned here, and what is not: requests to rows of a table and to workloads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autotune.database.lookup import Tuning
from autotune.database.misses import Request
from autotune.workload.config import load_all
from autotune.workload.graphs import GivenEdges, GraphSpec
from autotune.workload.kinds.base import Problem, SourceOfSize
from autotune.workload.kinds.registry import CONVOLUTIONS, kernel_kind, problem_from_key
from autotune.workload.kinds.symmetric_contraction import OPERATION as CONTRACTION
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts

Source = GivenEdges | SourceOfSize
TUNED = "exact"


@dataclass(frozen=True)
class Need:
    """One request, the graph to tune it on, and what a model would load for it now."""

    request: Request
    source: Source
    found: Tuning

    @property
    def is_tuned(self) -> bool:
        """Whether the database of this device has an entry for exactly this."""
        return self.found.origin == TUNED


def needs_of(requests: Mapping[Request, Source], facts: DeviceFacts) -> tuple[Need, ...]:
    """Look every request up; of those that one entry answers, only the first counts. Problems stay together."""
    first: dict[Any, Need] = {}
    for request, source in requests.items():
        if request.identity not in first:
            first[request.identity] = Need(request, source, request.look_up(facts))
    problems = list(dict.fromkeys(need.request.problem for need in first.values()))
    return tuple(sorted(first.values(), key=lambda need: problems.index(need.request.problem)))


def sources_of(requests: Iterable[Request]) -> dict[Request, Source]:
    """Graphs for requests of which only the size is known."""
    found: dict[Request, Source] = {}
    for request in requests:
        nodes = max(1, request.num_nodes) if request.operation in CONVOLUTIONS else 0
        found[request] = kernel_kind(request.operation).graph_of_size(request.num_edges, nodes)
    return found


def workloads_for(needs: Iterable[Need], graph: str) -> tuple[Workload, ...]:
    """Workloads of what is not tuned: those that differ in direction only are one. ``graph``: a name for the graphs.

    Convolutions and contractions come first: they take most of a model's time, and a run may end before the last
    workload.
    """
    grouped: dict[tuple, list[Need]] = {}
    for need in needs:
        if not need.is_tuned:
            asked = need.request
            kind = (asked.problem, asked.operation, asked.dtype, asked.layout, asked.deterministic)
            grouped.setdefault((*kind, asked.graph_class.text), []).append(need)
    names = {problem: name for name, problem in load_all().items()}
    found = []
    for same in grouped.values():
        asked, problem = same[0].request, problem_from_key(same[0].request.problem)
        spec = GraphSpec(graph, same[0].source)
        kernel = (label_of(problem, asked.operation, names), problem, asked.operation, spec, asked.dtype, asked.layout)
        directions = {need.request.direction for need in same}
        workload = Workload(*kernel, deterministic=asked.deterministic)
        # In the order of a whole search, where earlier directions give later ones their first schedules.
        ordered = tuple(name for name in workload.directions if name in directions)
        found.append(Workload(*kernel, directions=ordered, deterministic=asked.deterministic))
    return tuple(sorted(found, key=lambda workload: workload.operation not in (*CONVOLUTIONS, CONTRACTION)))


def label_of(problem: Problem, operation: str, names: Mapping[Problem, str]) -> str:
    """The problem's name in ``problems.toml``, else one from its key: trials are kept by it, whatever the model."""
    return names.get(problem) or f"{operation}-{hashlib.sha256(problem.key.encode()).hexdigest()[:8]}"


def places_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """By a problem's key, the names of the modules of a model that have it."""
    found: dict[str, list[str]] = {}
    for name, module in every_module(model):
        key = getattr(getattr(module, "problem", None), "key", None)
        if isinstance(key, str) and name not in found.setdefault(key, []):
            found[key].append(name)
    return found


def every_module(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """A model's modules with their names, also those that another keeps without registering them."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in found:
            continue
        found[id(module)] = (name, module)
        children = {key: child for key, child in module._modules.items() if child is not None}
        waiting += [(f"{name}.{key}".lstrip("."), child) for key, child in reversed(children.items())]
        # A hidden one has its owner's name, by which a user knows it.
        waiting += [(name, value) for value in vars(module).values() if isinstance(value, torch.nn.Module)]
    return list(found.values())
