"""The whole search space of one kernel on one device, for every kind of kernel."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autotune.choices import pair_knobs, product_knobs, threads_of
from autotune.families import family_of
from autotune.probes import probes_of, unfused
from autotune.space import Space
from kernelgen.device import DeviceFacts
from kernelgen.problem.tensor_product import TensorProductProblem
from kernelgen.schedule.knobs import Knobs
from kernelgen.schedule.spherical_harmonics import HarmonicsCudaSchedule
from kernelgen.terms.directions import Direction


@dataclass(frozen=True)
class HarmonicsSpace(Space):
    """Of harmonics."""

    def canonical(self, schedule: Knobs) -> Knobs:
        if isinstance(schedule, HarmonicsCudaSchedule) and schedule.staging != "ahead":
            return dataclasses.replace(schedule, stages=HarmonicsCudaSchedule().stages)
        return schedule


class VectorsSpace(Space):
    """Of harmonics inside a product or apart."""

    def canonical(self, schedule: Knobs) -> Knobs:
        return schedule


def harmonics_space(spec: Any) -> Space:
    """All choices of all knobs, but of threads those of any host kernel. On a GPU each way of staging is a probe."""
    default = family_of(spec.operation).default(spec, None)
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
    """The space of one kernel. The default schedule's values are always among the choices.

    num_edges: as for ``default_schedule``.
    """
    family = family_of(operation)
    spec = family.spec(problem, operation, direction, dtype, layout, facts, deterministic)
    spec = dataclasses.replace(spec, schedule=family.default(spec, num_edges))
    if not problem.is_channelwise:
        space = Space(spec, MappingProxyType(pair_knobs(spec)))
        return dataclasses.replace(space, probes=unfused(space))
    space = Space(spec, MappingProxyType(product_knobs(spec, num_edges)))
    space = dataclasses.replace(space, spec=dataclasses.replace(spec, schedule=space.canonical(spec.schedule)))
    return dataclasses.replace(space, probes=probes_of(space))
