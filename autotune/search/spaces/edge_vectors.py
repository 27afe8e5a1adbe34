"""The places where harmonics of edge vectors may be formed: inside a product or apart."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from autotune.search.space import Space
from autotune.workload.kinds.edge_vectors import VectorsKind
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts
from kernelgen.schedule.knobs import Knobs


@dataclass(frozen=True)
class VectorsSpace(Space):
    """The choice between harmonics inside the product's kernel and in a separate one."""

    def canonical(self, schedule: Knobs) -> Knobs:
        return schedule


def _of_vectors(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    kernel = (workload.problem, workload.operation, direction, workload.dtype, workload.layout)
    spec = workload.kind.spec(*kernel, facts, workload.deterministic)
    return VectorsSpace(spec, MappingProxyType({**spec.schedule.choices}))


SPACES = dict.fromkeys(VectorsKind.operations, _of_vectors)
