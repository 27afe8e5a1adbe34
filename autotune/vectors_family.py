"""Convolutions of harmonics of edge vectors as the tuner sees them: the third :class:`autotune.families.Family`.

Vectors are operand ``y``. What is decided, by direction, is whether harmonics are formed inside the product's kernel or
apart (``kernelgen.problem.edge_vectors``); the kernels themselves run the schedules that are known for product and
harmonics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError
from autotune.families import Products, Run
from autotune.graphs import GraphClass
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.ops.edge_vectors import FUSED
from kernelgen.plan.planner import make_plan
from kernelgen.problem.edge_vectors import VectorProblem
from kernelgen.schedule.edge_vectors import VECTOR_SCHEDULES, VectorSchedule, vector_schedule_from_dict
from kernelgen.schedule.kernel_spec import Spec
from kernelgen.schedule.knobs import Knobs
from kernelgen.terms.directions import DIRECTIONS, Direction

if TYPE_CHECKING:
    from autotune.space import Space
    from autotune.verify import Reference
    from autotune.workload import Tensors, Workload
    from kernelgen.ops.edge_vectors import HarmonicProduct
    from kernelgen.runtime.graph import EdgeOrder

OPERATION = "vectors"


@dataclass(frozen=True)
class VectorKernel:
    """All that determines the kernels of a direction, but for the schedules of product and harmonics."""

    problem: VectorProblem
    direction: Direction
    schedule: VectorSchedule
    dtype: str
    layout: str
    facts: DeviceFacts
    deterministic: bool = False
    operation: str = OPERATION


class Vectors(Products):
    """Edge vectors [edges, 3] to sums at nodes, and first gradients."""

    operations = (OPERATION,)
    directions = MappingProxyType({name: DIRECTIONS[name] for name in ("forward", "backward", "edge_backward")})

    def check(self, workload: Workload) -> None:
        if not workload.graph.has_nodes:
            raise ConfigError(f"graph {workload.graph.name!r} has edges alone, and a convolution needs nodes")
        if not workload.product.is_channelwise:
            raise ConfigError(f"{workload.label!r} has paths whose kernels harmonics are not formed in; tune its parts")

    def read(self, data: Mapping[str, Any]) -> Any:
        return vector_schedule_from_dict(data)

    def spec(
        self,
        problem: Any,
        operation: str,
        direction: str | Direction,
        dtype: str,
        layout: str,
        facts: DeviceFacts,
        deterministic: bool = False,
    ) -> Any:
        asked = DIRECTIONS[direction] if isinstance(direction, str) else direction
        return VectorKernel(problem, asked, VECTOR_SCHEDULES[facts.backend](), dtype, layout, facts, deterministic)

    def default(self, spec: Any, num_edges: int | None) -> Any:
        return VECTOR_SCHEDULES[spec.facts.backend]()

    def kernel_spec(self, spec: Any, schedule: Knobs) -> Any:
        return dataclasses.replace(spec, schedule=schedule)

    def plan(self, spec: Any) -> Any:
        """Of the product's kernel, with the schedule that is known for it."""
        kernel = (spec.dtype, spec.layout, spec.facts)
        known = product_schedule(
            spec.problem, spec.direction.name, spec.schedule.harmonics, *kernel, None, spec.deterministic
        )
        harmonics = spec.problem.harmonics if spec.schedule.harmonics == "inside" else None
        asked = (spec.problem.product, spec.direction, known, "conv", spec.dtype, spec.layout, "int64", spec.facts)
        whole = Spec(*asked, deterministic=spec.deterministic, harmonics=harmonics)
        return make_plan(super().kernel_spec(whole, known))

    def describe(self, problem: Any) -> tuple[str, ...]:
        vectors = f"of harmonics of degrees {', '.join(map(str, problem.harmonics.degrees))} of edge vectors"
        return (*super().describe(problem.product), vectors)

    def space(self, workload: Workload, direction: str, facts: DeviceFacts) -> Space:
        from autotune.spaces import VectorsSpace

        kernel = (workload.problem, OPERATION, direction, workload.dtype, workload.layout)
        spec = self.spec(*kernel, facts, workload.deterministic)
        return VectorsSpace(spec, MappingProxyType({**spec.schedule.choices}))

    def irreps(self, workload: Workload) -> dict[str, str]:
        return super().irreps(workload) | {"y": "1o"}

    def reference(self, workload: Workload, device: Any, tensors: Tensors | None = None) -> Reference:
        from autotune.verify_vectors import VectorsReference

        return VectorsReference(workload, device, tensors)

    def tensors(self, workload: Workload, device: Any) -> Tensors:
        from autotune.verify_vectors import make_vector_tensors

        return make_vector_tensors(workload, device)

    def build(self, workload: Workload, schedules: Mapping[str, Any], device: str) -> HarmonicProduct:
        problem = workload.problem
        assert isinstance(problem, VectorProblem)
        places = {name: schedule.harmonics for name, schedule in schedules.items()}
        kernel = (workload.dtype, workload.layout, device_facts(device))
        return build_vectors(problem, places, *kernel, device, workload.graph_class(), workload.deterministic)

    def run(
        self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool = False
    ) -> Run:
        t = tensors
        operands = (t.x, None, t.y, None, t.w, None, None if direction == "forward" else t.g, None)
        edges = (t.sender, t.receiver, t.num_nodes, order)
        return lambda: operator.run_on(operator.graph(t.x, t.y, *edges), DIRECTIONS[direction], operands, poison)


def build_vectors(
    problem: VectorProblem,
    places: Mapping[str, str],
    dtype: str,
    layout: str,
    facts: DeviceFacts,
    device: Any,
    graph_class: GraphClass | None,
    deterministic: bool = False,
) -> HarmonicProduct:
    """Product and harmonics with the schedules known for each; ``places``: of the harmonics, by direction."""
    import torch

    from autotune.lookup import find_schedule
    from kernelgen.ops.edge_vectors import HarmonicProduct
    from kernelgen.ops.harmonics_operator import build_harmonics
    from kernelgen.ops.operator import build
    from kernelgen.terms.directions import HARMONICS_DIRECTIONS

    number = None if graph_class is None else GraphClass("harmonics", graph_class.log2_edges)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
    harmonics: dict[str, Any] = {
        name: find_schedule(problem.harmonics, "harmonics", name, dtype, "mul_ir", facts, number, False).schedule
        for name in HARMONICS_DIRECTIONS
    }
    kernel = (dtype, layout, facts, graph_class, deterministic)
    product = {name: product_schedule(problem, name, places.get(name, "apart"), *kernel) for name in DIRECTIONS}
    return HarmonicProduct(
        build(problem.product, product, layout=layout, deterministic=deterministic, **options),
        build_harmonics(problem.harmonics, harmonics, **options),
        [name for name, place in places.items() if place == "inside"],
    )


def directions_inside(
    problem: VectorProblem,
    dtype: str,
    layout: str,
    facts: DeviceFacts,
    graph_class: GraphClass | None,
    strict: bool | None,
) -> list[str]:
    """The directions whose kernels are known, or by default believed, to be best with the harmonics inside.

    For the others the product's own schedule says whether gather and sum are in its kernel.
    """
    from autotune.lookup import find_schedule

    graph_class = None if graph_class is None else dataclasses.replace(graph_class, operation=OPERATION)
    found = []
    for name in Vectors.directions:
        tuning = find_schedule(problem, OPERATION, name, dtype, layout, facts, graph_class, strict)
        assert isinstance(tuning.schedule, VectorSchedule)
        found += [name] if tuning.schedule.harmonics == "inside" else []
    # The gradient of x alone reads what the value reads; it is not tuned on its own.
    return [*found, *(("source_backward",) if "forward" in found else ())]


def product_schedule(
    problem: VectorProblem,
    direction: str,
    place: str,
    dtype: str,
    layout: str,
    facts: DeviceFacts,
    graph_class: GraphClass | None,
    deterministic: bool,
) -> Any:
    """The product's schedule in a direction: of the convolution without vectors or, unfused, of the plain product."""
    from autotune.lookup import find_schedule

    unfused = place == "unfused"
    where = graph_class
    if where is not None:
        where = GraphClass("plain", where.log2_edges) if unfused else dataclasses.replace(where, operation="conv")
    kernel = (problem.product, "plain" if unfused else "conv", direction, dtype, layout, facts, where, False)
    schedule: Any = find_schedule(*kernel, deterministic=deterministic).schedule
    return dataclasses.replace(schedule, fuse=False) if unfused else schedule


assert set(Vectors.directions) <= set(FUSED)
