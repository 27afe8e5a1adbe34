"""The kind of symmetric contractions.

Features of nodes are operand ``x``, weights ``w`` [elements, weights, channels], values (and their cotangents) ``g``.
Rows of a graph are nodes: see :class:`autotune.workload.graphs.NodesAlone`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from autotune.errors import ConfigError
from autotune.workload.graphs import NodesAlone
from autotune.workload.kinds.base import FindSchedule, KernelKind, Problem, SourceOfSize
from autotune.workload.toml_tables import check_table
from kernelgen.arithmetic.contraction import CONTRACTION_DIRECTIONS
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.device import DeviceFacts
from kernelgen.kernels.spec import BYTES
from kernelgen.kernels.symmetric_contraction import (
    ContractionPlan,
    ContractionSchedule,
    ContractionSpec,
    contraction_plan,
    contraction_schedule_from_dict,
    default_contraction_schedule,
)
from kernelgen.problem.other_kinds import ContractionProblem

OPERATION = ContractionSpec.operation
# A node's element, in 32 bits.
INDEX_BYTES = 4


class ContractionKind(KernelKind):
    """From features [nodes, dim_in * channels] to values [nodes, dim_out * channels]."""

    rank = 3
    problem_type = ContractionProblem
    operations = (OPERATION,)
    directions = CONTRACTION_DIRECTIONS
    inputs = "xw"
    forces = tangents = "x"
    # A loss on values and on forces: their gradients are one kernel each.
    combined = MappingProxyType(
        {
            "forward+backward": ("forward", "backward"),
            "force_step": ("forward", "feature_backward", "double_backward", "backward"),
        }
    )
    table = "contractions"
    groups = MappingProxyType({"symmetric contractions": "contractions"})
    rows = ("nodes", "elements")
    read = staticmethod(contraction_schedule_from_dict)

    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> ContractionProblem:
        """From a table with irreps_in and irreps_out (of one channel), correlation and channels."""
        keys = ("irreps_in", "irreps_out", "correlation", "channels")
        check_table(table, f"contraction {name!r}", keys, required=keys)
        return ContractionProblem(*(table[key] for key in keys))

    def owns_key(self, key: str) -> bool:
        return key.startswith("sc|")

    def check(self, workload: Any) -> None:
        graph, label = workload.graph, workload.label
        if workload.deterministic:
            raise ConfigError(
                f"contraction {label!r} has deterministic = true; leave it out, and use "
                "torch.use_deterministic_algorithms(True) where a model runs: it has no schedules of its own"
            )
        if not isinstance(graph.source, NodesAlone):
            raise ConfigError(
                f"graph {graph.name!r} has edges, and contraction {label!r} needs nodes alone; expected a graph with "
                "nodes = a number, such as 'thousand-nodes'"
            )

    def graph_of_size(self, num_edges: int, num_nodes: int) -> SourceOfSize:
        return NodesAlone(num_edges, occurring=num_nodes) if num_nodes else NodesAlone(num_edges)

    def blank_spec(
        self, problem: Any, operation: str, asked: Any, dtype: str, layout: str, facts: DeviceFacts, deterministic: bool
    ) -> Any:
        blank = default_contraction_schedule(problem, asked, dtype, facts)
        return ContractionSpec(problem, asked, blank, dtype, layout, "int64", facts)

    def default(self, spec: ContractionSpec, num_edges: int | None) -> ContractionSchedule:
        return default_contraction_schedule(spec.problem, spec.direction, spec.dtype, spec.facts)

    def plan(self, spec: ContractionSpec, find_schedule: FindSchedule) -> ContractionPlan:
        return contraction_plan(spec)

    def describe(self, problem: ContractionProblem) -> tuple[str, ...]:
        weights = len(polynomials(problem))
        return (
            f"symmetric contraction of {problem.irreps_in} to {problem.irreps_out}, correlation {problem.correlation}",
            f"{problem.channels} channels, {weights} weights a channel, {problem.channels * problem.dim_out:,} outputs",
        )

    def irreps(self, problem: ContractionProblem, layout: str) -> dict[str, str]:
        inside, out = problem.irreps_in.split("+"), problem.irreps_out.split("+")
        channels = [f"{problem.channels}x{irrep}" for irrep in inside]
        # In mul_ir the features of a channel are together, and the values of an irrep.
        given = inside * problem.channels if layout == "mul_ir" else channels
        return {"x": "+".join(given), "g": "+".join(f"{problem.channels}x{irrep}" for irrep in out)}

    def compulsory_bytes(self, work: Any, direction: str, num_edges: int, num_nodes: int) -> int:
        problem, asked = work.problem, CONTRACTION_DIRECTIONS[direction]
        numbers = {
            "x": num_edges * problem.dim_in,
            "w": num_nodes * len(polynomials(problem)),
            "g": num_edges * problem.dim_out,
        }
        moved = sum(numbers[name[-1]] for name in (*asked.operands, *asked.outputs))
        return moved * problem.channels * BYTES[work.dtype] + INDEX_BYTES * num_edges
