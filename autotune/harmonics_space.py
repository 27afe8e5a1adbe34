"""The search spaces of harmonics, and of harmonics inside a product or apart: as a product's, with other knobs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autotune.choices import threads_of
from autotune.families import family_of
from autotune.space import Space
from kernelgen.harmonics_schedule import HarmonicsCudaSchedule
from kernelgen.schedule import Knobs


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
