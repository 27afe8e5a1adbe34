"""The search space of a made-up kind."""

from __future__ import annotations

from autotune.search.space import Space
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts
from kernelgen.kernels.knobs import Knobs


class DoublingSpace(Space):
    def canonical(self, schedule: Knobs) -> Knobs:
        return schedule


def _of_doubling(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    spec = workload.kind.spec(workload.problem, workload.operation, direction, workload.dtype, workload.layout, facts)
    return DoublingSpace(spec, spec.schedule.choices)


SPACES = {"doubling": _of_doubling}
