"""Build convolutions of edge vectors: schedules of their parts, and whether harmonics are fused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from autotune.database.lookup import find_schedule
from autotune.workload.graph_class import GraphClass
from autotune.workload.kinds.edge_vectors import OPERATION, VectorsKind, product_schedule
from kernelgen.arithmetic.directions import DIRECTIONS, HARMONICS_DIRECTIONS
from kernelgen.device import DeviceFacts
from kernelgen.kernels.harmonics.schedule import VectorSchedule
from kernelgen.ops.harmonics import build_harmonics
from kernelgen.ops.product import build
from kernelgen.ops.vectors import HarmonicProduct
from kernelgen.problem.harmonics import VectorProblem


def build_vectors(
    problem: VectorProblem,
    places: Mapping[str, str],
    dtype: str,
    layout: str,
    facts: DeviceFacts,
    device: Any,
    graph_class: GraphClass | None,
    deterministic: bool = False,
) -> HarmonicProduct:
    """Build product and harmonics with the known schedules; ``places``: where harmonics are formed, by direction."""
    number = None if graph_class is None else GraphClass("harmonics", graph_class.log2_edges)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
    harmonics: dict[str, Any] = {
        name: find_schedule(problem.harmonics, "harmonics", name, dtype, "mul_ir", facts, number, False).schedule
        for name in HARMONICS_DIRECTIONS
    }
    kernel = (dtype, layout, facts, graph_class, deterministic)
    product = {
        name: product_schedule(find_schedule, problem, name, places.get(name, "apart"), *kernel) for name in DIRECTIONS
    }
    return HarmonicProduct(
        build(problem.product, product, layout=layout, deterministic=deterministic, **options),
        build_harmonics(problem.harmonics, harmonics, **options),
        [name for name, place in places.items() if place == "inside"],
    )


def directions_inside(
    problem: VectorProblem,
    dtype: str,
    layout: str,
    facts: DeviceFacts,
    graph_class: GraphClass | None,
    strict: bool | None,
) -> list[str]:
    """The directions whose kernels are faster with the harmonics inside, as measured or by default.

    For the others the product's own schedule decides whether its kernel includes gather and sum.
    """
    graph_class = None if graph_class is None else dataclasses.replace(graph_class, operation=OPERATION)
    found = []
    for name in VectorsKind.directions:
        tuning = find_schedule(problem, OPERATION, name, dtype, layout, facts, graph_class, strict)
        assert isinstance(tuning.schedule, VectorSchedule)
        found += [name] if tuning.schedule.harmonics == "inside" else []
    # The gradient of x alone reads the same data as the value, and is not tuned separately.
    return [*found, *(("source_backward",) if "forward" in found else ())]
