"""The search space of one kernel of a radial convolution on one device."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from autotune.search.space import PlainSpace, Space
from autotune.workload.kinds.radial_convolution import RadialKind
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts

# Knobs of gradients alone: a value's kernel keeps sums of a receiver in registers.
OF_GRADIENTS = ("order", "slices", "coupled")


def _of_radial(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    spec = workload.spec(direction, facts)
    spec = dataclasses.replace(spec, schedule=workload.kind.default(spec, None))
    knobs = dict(spec.schedule.choices)
    knobs["path_groups"] = knobs["path_groups"][: len(spec.problem.product.paths)]
    for knob in OF_GRADIENTS if direction == "forward" else ():
        del knobs[knob]
    return PlainSpace(spec, MappingProxyType(knobs))


SPACES = dict.fromkeys(RadialKind.operations, _of_radial)
