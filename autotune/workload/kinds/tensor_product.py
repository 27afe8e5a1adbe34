"""The kind of tensor products."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from autotune.errors import ConfigError
from autotune.workload.kinds.base import FindSchedule, KernelKind, Problem
from autotune.workload.toml_tables import check_table
from kernelgen.arithmetic.directions import DIRECTIONS, fixed_order_parts
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.plan import default_schedule
from kernelgen.kernels.product.schedule import SCHEDULES, Schedule, schedule_from_dict
from kernelgen.kernels.spec import BYTES, Spec
from kernelgen.problem.product import TensorProductProblem

INDEX_BYTES = 4
NORMALIZATION_KEYS = ("shared_weights", "irrep_normalization", "path_normalization")


class ProductKind(KernelKind):
    """Tensor products, as convolutions or edge by edge."""

    rank: ClassVar[int] = 0
    problem_type: ClassVar[type[Problem]] = TensorProductProblem
    operations: ClassVar[tuple[str, ...]] = ("conv", "plain")
    convolutions: ClassVar[tuple[str, ...]] = ("conv",)
    table: ClassVar[str] = "problems"
    groups: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "float32 convolutions": "float32",
            "float64 convolutions": "float64",
            "plain products": "plain",
            "fully connected products": "connected",
        }
    )
    directions: ClassVar[Mapping[str, Any]] = DIRECTIONS
    inputs = tangents = "xyw"
    read: ClassVar[staticmethod[[Mapping[str, Any]], Knobs]] = staticmethod(schedule_from_dict)

    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> Problem:
        """A problem from a table: in1, in2 and filter (channelwise), out (fully connected), or out and instructions."""
        if isinstance(table, Mapping) and "out" in table and "instructions" not in table:
            required: tuple[str, ...] = ("in1", "in2", "out")
            check_table(table, f"problem {name!r}", (*required, "shared_weights"), required)
            shared = table.get("shared_weights", False)
            return TensorProductProblem.fully_connected(*(table[key] for key in required), shared_weights=shared)
        if isinstance(table, Mapping) and "instructions" in table:
            required = ("in1", "in2", "out", "instructions")
            check_table(table, f"problem {name!r}", (*required, *NORMALIZATION_KEYS), required)
            options = {key: table[key] for key in NORMALIZATION_KEYS if key in table}
            return TensorProductProblem.from_instructions(*(table[key] for key in required), **options)
        required = ("in1", "in2", "filter")
        check_table(table, f"problem {name!r}", (*required, "shared_weights"), required)
        shared = table.get("shared_weights", False)
        return TensorProductProblem.channelwise(*(table[key] for key in required), shared_weights=shared)

    def owns_key(self, key: str) -> bool:
        return True  # that no other kind claims

    def check(self, workload: Any) -> None:
        if workload.operation == "conv" and not workload.graph.has_nodes:
            raise ConfigError(
                f"graph {workload.graph.name!r} has edges alone, and a convolution needs nodes; "
                "expected operation = 'plain', or another graph"
            )

    def blank_spec(
        self, problem: Any, operation: str, asked: Any, dtype: str, layout: str, facts: DeviceFacts, deterministic: bool
    ) -> Any:
        if deterministic and operation == "conv":
            # Several kernels share the work; this one uses the direction's schedule.
            asked = fixed_order_parts(asked)[-1]
        blank = SCHEDULES[facts.backend]()
        return Spec(problem, asked, blank, operation, dtype, layout, "int64", facts, deterministic)

    def default(self, spec: Spec, num_edges: int | None) -> Schedule:
        return default_schedule(spec, num_edges)

    def plan(self, spec: Any, find_schedule: FindSchedule) -> Any:
        plan = make_plan(spec)
        if plan.spec.schedule != spec.schedule:
            raise ScheduleError(f"{spec.schedule.key} makes the kernel of {plan.spec.schedule.key}")
        return plan

    def kernel_spec(self, spec: Spec, schedule: Knobs) -> Spec:
        """The spec of the compiled kernel: a plain one without fusion, as torch then gathers and sums around it."""
        assert isinstance(schedule, Schedule)
        return dataclasses.replace(spec, schedule=schedule, operation=spec.operation if schedule.fuse else "plain")

    def describe(self, problem: Any) -> tuple[str, ...]:
        return (
            f"{problem.irreps_in1} x {problem.irreps_in2} -> {problem.irreps_out}",
            f"{len(problem.paths)} paths, {problem.weight_numel:,} weights, {problem.dim_out:,} outputs",
        )

    def group(self, key: str, operation: str, dtype: str) -> str:
        if ":uvw" in key:
            return "fully connected products"
        return "plain products" if operation == "plain" else f"{dtype} convolutions"

    def irreps(self, problem: Any, layout: str) -> dict[str, str]:
        return {"x": problem.irreps_in1, "y": problem.irreps_in2, "g": problem.irreps_out}

    def compulsory_bytes(self, work: Any, direction: str, num_edges: int, num_nodes: int) -> int:
        return bytes_of_product(work, work.problem, direction, num_edges, num_nodes, work.problem.dim_in2)


class OfProductKind(ProductKind):
    """The base of kinds whose kernels are convolutions with a ``product``, and form one of its inputs themselves."""

    kernel_spec, group = KernelKind.kernel_spec, KernelKind.group

    def check(self, workload: Any) -> None:
        if not workload.graph.has_nodes:
            raise ConfigError(
                f"graph {workload.graph.name!r} has edges alone, and a convolution needs nodes; "
                "expected a graph with nodes"
            )

    def describe(self, problem: Any) -> tuple[str, ...]:
        return super().describe(problem.product)

    def irreps(self, problem: Any, layout: str) -> dict[str, str]:
        return super().irreps(problem.product, layout)


def bytes_of_product(
    work: Any, product: TensorProductProblem, direction: str, num_edges: int, num_nodes: int, dim_y: int
) -> int:
    """As :meth:`KernelKind.compulsory_bytes`; ``dim_y``: elements per row of y as the kernel reads it."""
    asked, conv = DIRECTIONS[direction], work.operation != "plain"
    rows = num_nodes if conv else num_edges
    elements = {
        "x": rows * product.dim_in1,
        "y": num_edges * dim_y,
        "w": (1 if product.shared_weights else num_edges) * product.weight_numel,
        "g": rows * product.dim_out,
    }
    moved = sum(elements[name[-1]] for name in asked.operands) + sum(elements[name] for name in asked.outputs)
    return moved * BYTES[work.dtype] + (2 * INDEX_BYTES * num_edges if conv else 0)
