"""The kernels that form edge weights in registers, with the schedules tuned for a device and a graph's size."""

from __future__ import annotations

import functools

from autotune.database.lookup import find_schedule
from autotune.workload.graph_class import GraphClass
from autotune.workload.kinds.radial_convolution import OPERATION, RadialKind
from kernelgen.device import device_facts
from kernelgen.ops.operator import Operator
from kernelgen.ops.radial.fused import FusedRadial, fused_of
from kernelgen.ops.radial.products import ACCURACY
from kernelgen.plan.size_class import size_class
from kernelgen.problem.radial_convolution import RadialProblem


def tuned_fused(
    operator: Operator, hidden: int, product: str, num_edges: int, num_nodes: int, strict: bool | None = None
) -> FusedRadial | None:
    """The kernels of an operator's convolution for graphs of about this size; None if there are none on its device.

    product: as for ``fused_of``. Without a tuned schedule the default is used; if strict (None: ``$EQUITUNE_STRICT``),
    that raises TuningMissError.
    """
    return _of_size(operator, hidden, product, size_class(num_edges, num_nodes), strict)


@functools.lru_cache(maxsize=256)
def _of_size(
    operator: Operator, hidden: int, product: str, size: tuple[int, int], strict: bool | None
) -> FusedRadial | None:
    if fused_of(operator, hidden, product) is None:
        return None
    problem = RadialProblem(operator.problem, hidden, ACCURACY[product])
    where = operator.layout, device_facts(operator.device), GraphClass(OPERATION, *size)
    found = (
        (name, find_schedule(problem, OPERATION, name, "float32", *where, strict).schedule)
        for name in RadialKind.directions
    )
    return fused_of(operator, hidden, product, tuple(found))
