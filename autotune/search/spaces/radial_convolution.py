"""The search space of one kernel of a radial convolution on one device."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from autotune.search.space import PlainSpace, Space
from autotune.workload.kinds.radial_convolution import RadialKind
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.radial.schedule import WITH_WGMMA, RadialSchedule

# Knobs of gradients alone: a value's kernel keeps sums of a receiver in registers.
OF_GRADIENTS = ("order", "slices", "coupled")
# Knobs of devices with products of four warps.
OF_WARPGROUPS = ("products", "paths_at_once")


class RadialSpace(PlainSpace):
    """A space in which one knob has no effect without another."""

    def canonical(self, schedule: Knobs) -> Knobs:
        if isinstance(schedule, RadialSchedule) and schedule.products == "mma":
            return dataclasses.replace(schedule, paths_at_once=RadialSchedule.paths_at_once)
        return schedule


def _of_radial(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    spec = workload.spec(direction, facts)
    spec = dataclasses.replace(spec, schedule=workload.kind.default(spec, None))
    knobs = dict(spec.schedule.choices)
    knobs["path_groups"] = knobs["path_groups"][: len(spec.problem.product.paths)]
    without: tuple[str, ...] = OF_GRADIENTS if direction == "forward" else ()
    if facts.arch not in WITH_WGMMA:
        without += OF_WARPGROUPS
    return RadialSpace(spec, MappingProxyType({name: knobs[name] for name in knobs if name not in without}))


SPACES = dict.fromkeys(RadialKind.operations, _of_radial)
