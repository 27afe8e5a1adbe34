"""The kind of convolutions of harmonics of edge vectors.

Vectors are operand ``y``. The schedule decides, for each direction, whether harmonics are formed inside the product's
kernel or in a separate one. The kernels use the schedules known for product and harmonics.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autotune.errors import ConfigError, unknown_name
from autotune.workload.kinds.base import FindSchedule, Problem
from autotune.workload.kinds.tensor_product import OfProductKind, ProductKind, bytes_of_product
from autotune.workload.toml_tables import check_table
from kernelgen.arithmetic.directions import DIRECTIONS, Direction
from kernelgen.device import DeviceFacts
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.harmonics.schedule import VECTOR_SCHEDULES, VectorSchedule
from kernelgen.kernels.knobs import read_schedule
from kernelgen.kernels.spec import Spec
from kernelgen.ops.vectors import FUSED
from kernelgen.problem.harmonics import SEPARATOR, HarmonicsProblem, VectorProblem
from kernelgen.problem.product import TensorProductProblem

OPERATION = "vectors"


@dataclass(frozen=True)
class VectorKernel:
    """Everything that determines the kernels of a direction except the schedules of product and harmonics."""

    problem: VectorProblem
    direction: Direction
    schedule: VectorSchedule
    dtype: str
    layout: str
    facts: DeviceFacts
    deterministic: bool = False
    operation: str = OPERATION


class VectorsKind(OfProductKind):
    """From edge vectors [edges, 3] to sums at nodes; and first gradients."""

    rank = 2
    problem_type = VectorProblem
    operations = convolutions = (OPERATION,)
    table = "vectors"
    groups = MappingProxyType({"convolutions of edge vectors": "vectors"})
    directions = MappingProxyType({name: DIRECTIONS[name] for name in ("forward", "backward", "edge_backward")})
    read = staticmethod(functools.partial(read_schedule, kinds=VECTOR_SCHEDULES))

    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> VectorProblem:
        """A product of harmonics from a table: names of the ``product`` and of the ``harmonics``, its second input."""
        keys = ("product", "harmonics")
        check_table(table, f"vectors {name!r}", keys, required=keys)
        for key, kind in (("product", TensorProductProblem), ("harmonics", HarmonicsProblem)):
            if not isinstance(others.get(str(table[key])), kind):
                known = [other for other, problem in others.items() if isinstance(problem, kind)]
                raise ConfigError(f"vectors {name!r}: " + unknown_name(key, str(table[key]), known))
        product, harmonics = (others[table[key]] for key in keys)
        assert isinstance(product, TensorProductProblem) and isinstance(harmonics, HarmonicsProblem)
        return VectorProblem(product, harmonics)

    def owns_key(self, key: str) -> bool:
        return SEPARATOR in key

    def check(self, workload: Any) -> None:
        super().check(workload)
        if not workload.problem.product.is_channelwise:
            raise ConfigError(
                f"{workload.label!r} has paths that cannot be fused with harmonics; tune its product and its harmonics "
                "separately"
            )

    def blank_spec(
        self, problem: Any, operation: str, asked: Any, dtype: str, layout: str, facts: DeviceFacts, deterministic: bool
    ) -> Any:
        return VectorKernel(problem, asked, VECTOR_SCHEDULES[facts.backend](), dtype, layout, facts, deterministic)

    def default(self, spec: Any, num_edges: int | None) -> Any:
        return VECTOR_SCHEDULES[spec.facts.backend]()

    def plan(self, spec: Any, find_schedule: FindSchedule) -> Any:
        """The plan of the product's kernel, with the schedule known for it."""
        kernel = (spec.dtype, spec.layout, spec.facts)
        place, name = spec.schedule.harmonics, spec.direction.name
        known = product_schedule(find_schedule, spec.problem, name, place, *kernel, None, spec.deterministic)
        harmonics = spec.problem.harmonics if place == "inside" else None
        asked = (spec.problem.product, spec.direction, known, "conv", spec.dtype, spec.layout, "int64", spec.facts)
        whole = Spec(*asked, deterministic=spec.deterministic, harmonics=harmonics)
        return make_plan(ProductKind.kernel_spec(self, whole, known))

    def describe(self, problem: Any) -> tuple[str, ...]:
        vectors = f"of harmonics of degrees {', '.join(map(str, problem.harmonics.degrees))} of edge vectors"
        return (*super().describe(problem), vectors)

    def irreps(self, problem: Any, layout: str) -> dict[str, str]:
        return super().irreps(problem, layout) | {"y": problem.irrep}

    def compulsory_bytes(self, work: Any, direction: str, num_edges: int, num_nodes: int) -> int:
        return bytes_of_product(work, work.problem.product, direction, num_edges, num_nodes, dim_y=3)


def product_schedule(
    find_schedule: FindSchedule,
    problem: VectorProblem,
    direction: str,
    place: str,
    dtype: str,
    layout: str,
    facts: DeviceFacts,
    graph_class: Any,
    deterministic: bool,
) -> Any:
    """The product's schedule in a direction: that of the convolution, or of the plain product if unfused.

    graph_class: a ``GraphClass`` of this kind, or None; that module needs the kinds, so this one cannot import it.
    """
    unfused = place == "unfused"
    where = graph_class
    if where is not None:
        other = {"operation": "plain", "log2_degree": 0} if unfused else {"operation": "conv"}
        where = dataclasses.replace(where, **other)
    kernel = (problem.product, "plain" if unfused else "conv", direction, dtype, layout, facts, where, False)
    schedule: Any = find_schedule(*kernel, deterministic=deterministic).schedule
    return dataclasses.replace(schedule, fuse=False) if unfused else schedule


assert set(VectorsKind.directions) <= set(FUSED)
