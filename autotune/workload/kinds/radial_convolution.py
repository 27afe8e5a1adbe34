"""The kind of convolutions that form their edge weights ``h @ matrix`` in registers.

Operand ``w`` is h [edges, hidden], ``tw`` the matrix [hidden, weights]; the gradient of ``w`` is that of h.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autotune.errors import ConfigError, unknown_name
from autotune.workload.kinds.base import FindSchedule, Problem
from autotune.workload.kinds.tensor_product import INDEX_BYTES, OfProductKind
from autotune.workload.toml_tables import check_table
from kernelgen.arithmetic.directions import DIRECTIONS, Direction
from kernelgen.device import DeviceFacts
from kernelgen.kernels.knobs import read_schedule
from kernelgen.kernels.radial.plan import RadialPlan, RadialSchedule, RadialSpec, default_radial_schedule, radial_plan
from kernelgen.kernels.spec import BYTES
from kernelgen.problem.product import PRODUCTS, RadialProblem, TensorProductProblem

OPERATION = "radial"
# Largest relative error against float64 that a kernel may have, by accuracy class.
LARGEST_ERROR = {"ieee": 1e-5, "tf32": 2e-3}
assert set(LARGEST_ERROR) == set(PRODUCTS)
# Other forms with float32's accuracy: with all weights in memory, and with some at a time.
WHOLE, STREAMED = ("product-ieee", "product-fp16x3"), ("streamed",)


@dataclass(frozen=True)
class RadialKernel:
    """A spec with the values by which every kernel is stored and looked up."""

    problem: RadialProblem
    direction: Direction
    schedule: RadialSchedule
    dtype: str
    layout: str
    facts: DeviceFacts
    deterministic: bool = False
    operation: str = OPERATION

    @property
    def of_kernel(self) -> RadialSpec:
        """The spec of the kernel that is compiled."""
        problem = self.problem
        kernel = (problem.product, problem.hidden, self.direction, self.schedule, problem.accuracy, self.layout)
        return RadialSpec(*kernel, "int64", self.facts, self.dtype)


class RadialKind(OfProductKind):
    """From h [edges, hidden] to sums at nodes; and first gradients of all but the matrix."""

    rank = 4
    problem_type = RadialProblem
    operations = convolutions = (OPERATION,)
    table = "radial"
    groups = MappingProxyType({"radial convolutions": "radial"})
    directions = MappingProxyType({name: DIRECTIONS[name] for name in ("forward", "backward")})
    read = staticmethod(functools.partial(read_schedule, kinds={RadialSchedule.backend: RadialSchedule}))

    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> RadialProblem:
        """From a table with the name of the ``product``, ``hidden`` and perhaps an ``accuracy``."""
        required = ("product", "hidden")
        check_table(table, f"radial {name!r}", (*required, "accuracy"), required=required)
        product = others.get(str(table["product"]))
        if not isinstance(product, TensorProductProblem):
            known = [other for other, problem in others.items() if isinstance(problem, TensorProductProblem)]
            raise ConfigError(f"radial {name!r}: " + unknown_name("product", str(table["product"]), known))
        return RadialProblem(product, table["hidden"], table.get("accuracy", "ieee"))

    def owns_key(self, key: str) -> bool:
        return RadialProblem.owns_key(key)

    def tolerance(self, problem: Any, dtype: str) -> float:
        return LARGEST_ERROR[problem.accuracy]

    def check(self, workload: Any) -> None:
        if workload.deterministic:
            raise ConfigError(
                f"radial {workload.label!r} has deterministic = true; leave it out: "
                "its kernels add in the order of arrival"
            )
        super().check(workload)

    def blank_spec(
        self, problem: Any, operation: str, asked: Any, dtype: str, layout: str, facts: DeviceFacts, deterministic: bool
    ) -> Any:
        return RadialKernel(problem, asked, RadialSchedule(), dtype, layout, facts)

    def default(self, spec: Any, num_edges: int | None) -> Any:
        return default_radial_schedule(spec.of_kernel).schedule

    def plan(self, spec: Any, find_schedule: FindSchedule) -> RadialPlan:
        return radial_plan(spec.of_kernel)

    def describe(self, problem: Any) -> tuple[str, ...]:
        weights = f"weights from {problem.hidden} hidden features, accuracy of {problem.accuracy}"
        return (*super().describe(problem), weights)

    def compulsory_bytes(self, work: Any, direction: str, num_edges: int, num_nodes: int) -> int:
        asked, hidden, product = DIRECTIONS[direction], work.problem.hidden, work.problem.product
        elements = {
            "x": num_nodes * product.dim_in1,
            "y": num_edges * product.dim_in2,
            "w": num_edges * hidden,
            "g": num_nodes * product.dim_out,
        }
        moved = sum(elements[slot] for slot in (*asked.operands, *asked.outputs))
        return (moved + hidden * product.weight_numel) * BYTES[work.dtype] + 2 * INDEX_BYTES * num_edges
