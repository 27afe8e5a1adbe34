"""The whole search space of one kernel of a tensor product on one device."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from autotune.database.knobs import pair_knobs, product_knobs
from autotune.search.probes import probes_of, unfused
from autotune.search.space import Space
from autotune.workload.kinds.registry import kernel_kind
from autotune.workload.kinds.tensor_product import ProductKind
from autotune.workload.workload import Workload
from kernelgen.arithmetic.directions import Direction
from kernelgen.device import DeviceFacts
from kernelgen.problem.product import TensorProductProblem


def search_space(
    problem: TensorProductProblem,
    operation: str,
    direction: str | Direction,
    dtype: str,
    facts: DeviceFacts,
    layout: str = "mul_ir",
    deterministic: bool = False,
    num_edges: int | None = None,
    skewed: bool = False,
) -> Space:
    """The space of one kernel. The choices always include the default schedule's values.

    num_edges: as for ``default_schedule``. skewed: as for ``product_knobs``.
    """
    kind = kernel_kind(operation)
    spec = kind.spec(problem, operation, direction, dtype, layout, facts, deterministic)
    spec = dataclasses.replace(spec, schedule=kind.default(spec, num_edges))
    if not problem.is_channelwise:
        space = Space(spec, MappingProxyType(pair_knobs(spec)))
        return dataclasses.replace(space, probes=unfused(space))
    space = Space(spec, MappingProxyType(product_knobs(spec, num_edges, skewed)))
    space = dataclasses.replace(space, spec=dataclasses.replace(spec, schedule=space.canonical(spec.schedule)))
    return dataclasses.replace(space, probes=probes_of(space))


def _of_product(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    kernel = (workload.product, workload.operation, direction, workload.dtype)
    skewed = workload.graph_class().waits_for_longest(facts)
    return search_space(*kernel, facts, workload.layout, workload.deterministic, workload.num_edges, skewed)


SPACES = dict.fromkeys(ProductKind.operations, _of_product)
