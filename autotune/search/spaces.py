"""The search spaces of all kinds of kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autotune.search.knob_choices import pair_knobs, product_knobs, threads_of
from autotune.search.probes import probes_of, unfused
from autotune.search.space import Space
from autotune.workload.kinds.registry import kernel_kind
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts
from kernelgen.problem.edge_vectors import VectorProblem
from kernelgen.problem.spherical_harmonics import HarmonicsProblem
from kernelgen.problem.tensor_product import TensorProductProblem
from kernelgen.schedule.knobs import Knobs
from kernelgen.schedule.spherical_harmonics import HarmonicsCudaSchedule
from kernelgen.terms.directions import Direction


def space_of(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    """The whole search space of one direction of a workload."""
    return _SPACES[workload.kind.problem_type](workload, direction, facts)


@dataclass(frozen=True)
class HarmonicsSpace(Space):
    """The space of a kernel of spherical harmonics."""

    def canonical(self, schedule: Knobs) -> Knobs:
        if isinstance(schedule, HarmonicsCudaSchedule) and schedule.staging != "ahead":
            return dataclasses.replace(schedule, stages=HarmonicsCudaSchedule().stages)
        return schedule


class VectorsSpace(Space):
    """The choice between harmonics inside the product's kernel and in a separate one."""

    def canonical(self, schedule: Knobs) -> Knobs:
        return schedule


def harmonics_space(spec: Any) -> Space:
    """All choices of all knobs; threads as for every host kernel. On a GPU each way of staging is a probe."""
    default = kernel_kind(spec.operation).default(spec, None)
    knobs = {**default.choices} | ({"threads": threads_of(spec.facts)} if "threads" in default.choices else {})
    space = HarmonicsSpace(dataclasses.replace(spec, schedule=default), MappingProxyType(knobs))
    staged = (space.schedule({"staging": staging}) for staging in knobs.get("staging", ()))
    return dataclasses.replace(space, probes=tuple(s for s in staged if s != default and not space.broken_limit(s)))


def search_space(
    problem: TensorProductProblem,
    operation: str,
    direction: str | Direction,
    dtype: str,
    facts: DeviceFacts,
    layout: str = "mul_ir",
    deterministic: bool = False,
    num_edges: int | None = None,
) -> Space:
    """The space of one kernel. The choices always include the default schedule's values.

    num_edges: as for ``default_schedule``.
    """
    kind = kernel_kind(operation)
    spec = kind.spec(problem, operation, direction, dtype, layout, facts, deterministic)
    spec = dataclasses.replace(spec, schedule=kind.default(spec, num_edges))
    if not problem.is_channelwise:
        space = Space(spec, MappingProxyType(pair_knobs(spec)))
        return dataclasses.replace(space, probes=unfused(space))
    space = Space(spec, MappingProxyType(product_knobs(spec, num_edges)))
    space = dataclasses.replace(space, spec=dataclasses.replace(spec, schedule=space.canonical(spec.schedule)))
    return dataclasses.replace(space, probes=probes_of(space))


def _of_product(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    kernel = (workload.product, workload.operation, direction, workload.dtype)
    return search_space(*kernel, facts, workload.layout, workload.deterministic, workload.num_edges)


def _of_harmonics(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    kernel = (workload.harmonics, workload.operation, direction, workload.dtype, workload.layout)
    return harmonics_space(workload.kind.spec(*kernel, facts))


def _of_vectors(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    kernel = (workload.problem, workload.operation, direction, workload.dtype, workload.layout)
    spec = workload.kind.spec(*kernel, facts, workload.deterministic)
    return VectorsSpace(spec, MappingProxyType({**spec.schedule.choices}))


_SPACES: Mapping[type, Callable[[Workload, str, DeviceFacts], Space]] = {
    TensorProductProblem: _of_product,
    HarmonicsProblem: _of_harmonics,
    VectorProblem: _of_vectors,
}
