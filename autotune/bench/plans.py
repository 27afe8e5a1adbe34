"""Plan what to compare for each workload of a config, and turn results into rows (plain data per workload and pass)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.bench.rows import DEFAULT, OURS, Row, without_noise
from autotune.compare.comparison import ComparisonResult
from autotune.database.lookup import find_schedule
from autotune.database.maintenance import hash_of_text, now_text, source_text
from autotune.database.store import Database, database_path
from autotune.search.spaces.registry import space_of
from autotune.workload.config import TuneConfig, by_problem
from autotune.workload.graphs import build_graph
from autotune.workload.workload import Workload, moved_bytes
from kernelgen.arithmetic.directions import DIRECTIONS, fixed_order_parts
from kernelgen.device import DeviceFacts
from kernelgen.kernels.knobs import Knobs
from kernelgen.version import GENERATOR_VERSION

# Default passes of a config: inference, training on values, training on forces.
MODEL_PASSES = ("forward", "backward", "force_step")


@dataclass(frozen=True)
class Plan:
    """What to measure for one workload; ``schedules`` by contender and direction, ``origins`` of the tuned ones."""

    workload: Workload
    passes: tuple[str, ...]
    schedules: dict[str, dict[str, Knobs]]
    origins: dict[str, str]

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
    work, directions = plan.workload, plan.kernels_in(which)

    def source(direction: str, schedule: Knobs) -> str:
        kernel = (work.problem, work.operation, direction, work.dtype, work.layout, work.deterministic)
        return hash_of_text(source_text(*kernel, schedule, facts))

    return {name: {d: source(d, chosen[d]) for d in directions} for name, chosen in plan.schedules.items()}


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
    for direction in workload.directions:
        entry = database.get(workload.identity(direction))
        if entry is not None:
            tuned[direction], origins[direction] = entry.tuned_schedule, "exact"
            continue
        kernel = (workload.problem, workload.operation, direction, workload.dtype, workload.layout)
        found = find_schedule(*kernel, facts, graph_class, strict=False, deterministic=workload.deterministic)
        tuned[direction], origins[direction] = found.schedule, found.origin
    return Plan(workload, passes, {OURS: tuned, DEFAULT: default}, origins)


def row_of(plan: Plan, which: str, comparison: ComparisonResult, software: dict[str, str], facts: DeviceFacts) -> Row:
    workload, graph = plan.workload, build_graph(plan.workload.graph)
    kernels, moved = plan.kernels_in(which), moved_bytes(workload, which)
    results = {name: row[which] for name, row in comparison.results.items() if which in row}

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
        **({"order_ms": comparison.order_ms} if comparison.order_ms else {}),
        "schedules": plan.schedules_in(which),
        "sources": sources_of(plan, which, facts),
        "origins": {kernel: plan.origins[kernel] for kernel in kernels},
        "resources": of_pass(comparison.resources),
        "errors": of_pass(comparison.errors),
        "certificates": of_pass(comparison.certificates),
        "date": now_text(),
        "software": software,
        "generator": GENERATOR_VERSION,
    }
    return without_noise(row)


def _known(results: dict[str, Any], figure: Callable[[Any], float | None]) -> dict[str, float]:
    return {name: value for name, result in results.items() if (value := figure(result)) is not None}
