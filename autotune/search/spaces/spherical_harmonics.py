"""The whole search space of one kernel of spherical harmonics on one device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autotune.database.knobs import threads_of
from autotune.search.space import Space
from autotune.workload.kinds.registry import kernel_kind
from autotune.workload.kinds.spherical_harmonics import HarmonicsKind
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts
from kernelgen.kernels.harmonics.schedule import HarmonicsCudaSchedule
from kernelgen.kernels.knobs import Knobs


@dataclass(frozen=True)
class HarmonicsSpace(Space):
    """The space of a kernel of spherical harmonics."""

    def canonical(self, schedule: Knobs) -> Knobs:
        if isinstance(schedule, HarmonicsCudaSchedule) and schedule.staging != "ahead":
            return dataclasses.replace(schedule, stages=HarmonicsCudaSchedule().stages)
        return schedule


def harmonics_space(spec: Any) -> Space:
    """All choices of all knobs; threads as for every host kernel. On a GPU each way of staging is a probe."""
    default = kernel_kind(spec.operation).default(spec, None)
    knobs = {**default.choices} | ({"threads": threads_of(spec.facts)} if "threads" in default.choices else {})
    space = HarmonicsSpace(dataclasses.replace(spec, schedule=default), MappingProxyType(knobs))
    staged = (space.schedule({"staging": staging}) for staging in knobs.get("staging", ()))
    return dataclasses.replace(space, probes=tuple(s for s in staged if s != default and not space.broken_limit(s)))


def _of_harmonics(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    return harmonics_space(workload.spec(direction, facts))


SPACES = dict.fromkeys(HarmonicsKind.operations, _of_harmonics)
