"""The places where harmonics of edge vectors may be formed: inside a product or apart."""

from __future__ import annotations

from types import MappingProxyType

from autotune.search.space import PlainSpace, Space
from autotune.workload.kinds.edge_vectors import VectorsKind
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts


def _of_vectors(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    spec = workload.spec(direction, facts)
    return PlainSpace(spec, MappingProxyType({**spec.schedule.choices}))


SPACES = dict.fromkeys(VectorsKind.operations, _of_vectors)
