"""The kernels that form edge weights in registers, with the schedules tuned for a device and a graph's size."""

from __future__ import annotations

import functools
import math
from collections import defaultdict

from autotune.database.candidates.other_devices import is_of_architecture
from autotune.database.lookup import Tuning, find_schedule
from autotune.workload.graph_class import GraphClass
from autotune.workload.kinds.radial_convolution import OPERATION, STREAMED, WHOLE, RadialKind
from kernelgen.device import device_facts
from kernelgen.ops.product import Operator
from kernelgen.ops.radial_convolution import ACCURACY, FusedRadial, fused_of
from kernelgen.problem.product import RadialProblem
from kernelgen.problem.sizes import size_class

OURS = "fused"


def tuned_fused(
    operator: Operator, hidden: int, product: str, num_edges: int, num_nodes: int, strict: bool | None = None
) -> FusedRadial | None:
    """The kernels of an operator's convolution for graphs of about this size; None if there are none on its device.

    product: as for ``fused_of``. Without a tuned schedule the default is used; if strict (None: ``$EQUITUNE_STRICT``),
    that raises TuningMissError.
    """
    return _of_size(operator, hidden, product, size_class(num_edges, num_nodes), strict)


def is_fused_fastest(
    operator: Operator,
    hidden: int,
    product: str,
    num_edges: int,
    num_nodes: int,
    *,
    beside_whole: bool,
    times: float = 1.0,
) -> bool:
    """Whether these kernels took the least time for a value and its gradients on graphs of about this size.

    By the tuned database: the kernels, and the other forms beside them, were measured in one comparison, on this device
    or on another one of its architecture. False if they were not. beside_whole: whether all weights fit into memory;
    if not, what is compared with takes as little memory. times: how many times the least time is enough.
    """
    return _is_fastest(operator, hidden, product, size_class(num_edges, num_nodes), beside_whole, times)


@functools.lru_cache(maxsize=256)
def _is_fastest(
    operator: Operator, hidden: int, product: str, size: tuple[int, int], beside_whole: bool, times: float
) -> bool:
    if fused_of(operator, hidden, product) is None:
        return False
    totals: defaultdict[str, float] = defaultdict(float)
    for tuning in _tunings(operator, hidden, product, size, strict=False).values():
        entry, facts = tuning.entry, device_facts(operator.device)
        if entry is None or (tuning.origin == "other-device" and not is_of_architecture(entry, facts)):
            return False
        totals[OURS] += entry.time_us
        for name in WHOLE if beside_whole else STREAMED:
            totals[name] += entry.peers.get(name, {}).get("time_us", math.inf)
    others = [time_us for name, time_us in totals.items() if name != OURS and time_us < math.inf]
    return bool(others) and totals[OURS] <= times * min(others)


def _tunings(
    operator: Operator, hidden: int, product: str, size: tuple[int, int], strict: bool | None
) -> dict[str, Tuning]:
    problem = RadialProblem(operator.problem, hidden, ACCURACY[product])
    facts, where = device_facts(operator.device), GraphClass(OPERATION, *size)
    return {
        name: find_schedule(problem, OPERATION, name, "float32", operator.layout, facts, where, strict)
        for name in RadialKind.directions
    }


@functools.lru_cache(maxsize=256)
def _of_size(
    operator: Operator, hidden: int, product: str, size: tuple[int, int], strict: bool | None
) -> FusedRadial | None:
    if fused_of(operator, hidden, product) is None:
        return None
    found = _tunings(operator, hidden, product, size, strict)
    return fused_of(operator, hidden, product, tuple((name, tuning.schedule) for name, tuning in found.items()))
