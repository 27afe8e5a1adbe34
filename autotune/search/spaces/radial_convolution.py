"""The search space of one kernel of a radial convolution on one device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType

from autotune.search.space import Space
from autotune.workload.kinds.radial_convolution import RadialKind
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts
from kernelgen.schedule.knobs import Knobs

# Knobs of gradients alone: a value's kernel keeps sums of a receiver in registers.
OF_GRADIENTS = ("order", "pieces", "slices", "rows", "node_rows")


@dataclass(frozen=True)
class RadialSpace(Space):
    """The space of a kernel of a radial convolution."""

    def canonical(self, schedule: Knobs) -> Knobs:
        return schedule


def _of_radial(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    kernel = (workload.problem, workload.operation, direction, workload.dtype, workload.layout)
    spec = workload.kind.spec(*kernel, facts)
    spec = dataclasses.replace(spec, schedule=workload.kind.default(spec, None))
    knobs = dict(spec.schedule.choices)
    knobs["path_groups"] = knobs["path_groups"][: len(spec.problem.product.paths)]
    for knob in OF_GRADIENTS if direction == "forward" else ():
        del knobs[knob]
    return RadialSpace(spec, MappingProxyType(knobs))


SPACES = dict.fromkeys(RadialKind.operations, _of_radial)
