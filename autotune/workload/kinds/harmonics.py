"""The kind of spherical harmonics.

Vectors are operand ``x``, their tangents ``tx``, harmonics (and their cotangents) ``g``. Directions are named as for
products, and both layouts have the same rows.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autotune.errors import ConfigError, unknown_name
from autotune.workload.kinds.base import FindSchedule, KernelKind, Problem
from autotune.workload.kinds.tensor_product import OfProductKind, ProductKind, bytes_of_product
from autotune.workload.toml_tables import check_table
from kernelgen.arithmetic.directions import DIRECTIONS, HARMONICS_DIRECTIONS, Direction
from kernelgen.device import DeviceFacts
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.knobs import read_schedule
from kernelgen.kernels.spec import BYTES, Spec
from kernelgen.kernels.spherical_harmonics import (
    HARMONICS_SCHEDULES,
    VECTOR_SCHEDULES,
    HarmonicsPlan,
    HarmonicsSchedule,
    HarmonicsSpec,
    VectorSchedule,
    default_harmonics_schedule,
    harmonics_plan,
    harmonics_schedule_from_dict,
)
from kernelgen.ops.harmonics import FUSED
from kernelgen.problem.other_kinds import SEPARATOR, HarmonicsProblem, VectorProblem
from kernelgen.problem.product import TensorProductProblem

# The slots that each direction reads.
HARMONICS_OPERANDS = {"forward": ("x",), "backward": ("x", "g"), "double_backward": ("x", "g", "tx")}


class HarmonicsKind(KernelKind):
    """From vectors [n, 3] to harmonics [n, dim_out]."""

    rank = 1
    problem_type = HarmonicsProblem
    operations = (HarmonicsSpec.operation,)
    directions = HARMONICS_DIRECTIONS
    inputs = tangents = "x"
    rows = ("vectors", "nodes")
    table = "harmonics"
    groups = MappingProxyType({"spherical harmonics": "harmonics"})
    read = staticmethod(harmonics_schedule_from_dict)

    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> HarmonicsProblem:
        """From a table with degrees (``"0-3"``, or a list), normalize and normalization, as of e3nn's function."""
        keys = ("degrees", "normalize", "normalization")
        check_table(table, f"harmonics {name!r}", keys, required=keys)
        degrees = table["degrees"]
        if isinstance(degrees, str) and (span := re.fullmatch(r"(\d+)-(\d+)", degrees)):
            degrees = list(range(int(span[1]), int(span[2]) + 1))
        if not isinstance(degrees, list):
            raise ConfigError(f"harmonics {name!r}: degrees are {degrees!r}; expected for example '0-3' or [0, 2]")
        return HarmonicsProblem(tuple(degrees), table["normalization"], table["normalize"])

    def owns_key(self, key: str) -> bool:
        return key.startswith("sh|")

    def check(self, workload: Any) -> None:
        layout, deterministic = workload.layout, workload.deterministic
        if layout != HarmonicsSpec.layout or deterministic:
            raise ConfigError(
                f"harmonics {workload.label!r} have layout {layout!r} and deterministic = "
                f"{str(deterministic).lower()}; leave both out: harmonics have one layout and are always deterministic"
            )

    def blank_spec(
        self, problem: Any, operation: str, asked: Any, dtype: str, layout: str, facts: DeviceFacts, deterministic: bool
    ) -> Any:
        return HarmonicsSpec(problem, asked, HARMONICS_SCHEDULES[facts.backend](), dtype, facts)

    def default(self, spec: HarmonicsSpec, num_edges: int | None) -> HarmonicsSchedule:
        return default_harmonics_schedule(spec.problem, spec.direction, spec.dtype, spec.facts)

    def plan(self, spec: HarmonicsSpec, find_schedule: FindSchedule) -> HarmonicsPlan:
        return harmonics_plan(spec)

    def describe(self, problem: HarmonicsProblem) -> tuple[str, ...]:
        degrees = ", ".join(map(str, problem.degrees))
        vectors = "normalized" if problem.normalize else "raw"
        return (
            f"spherical harmonics of degrees {degrees}",
            f"{vectors} vectors, normalization {problem.normalization}, {problem.dim_out} outputs",
        )

    def irreps(self, problem: HarmonicsProblem, layout: str) -> dict[str, str]:
        parity = "eo"
        return {"x": "1o", "g": "+".join(f"{degree}{parity[degree % 2]}" for degree in problem.degrees)}

    def compulsory_bytes(self, work: Any, direction: str, num_edges: int, num_nodes: int) -> int:
        elements = {"x": 3, "tx": 3, "g": work.problem.dim_out}
        moved = (*HARMONICS_OPERANDS[direction], *HARMONICS_DIRECTIONS[direction].outputs)
        return num_edges * sum(elements[name] for name in moved) * BYTES[work.dtype]


# The kind of convolutions of harmonics of edge vectors.
#
# Vectors are operand ``y``. The schedule decides, for each direction, whether harmonics are formed inside the product's
# kernel or in a separate one. The kernels use the schedules known for product and harmonics.

VECTORS = "vectors"


@dataclass(frozen=True)
class VectorKernel:
    """Everything that determines the kernels of a direction except the schedules of product and harmonics."""

    problem: VectorProblem
    direction: Direction
    schedule: VectorSchedule
    dtype: str
    layout: str
    facts: DeviceFacts
    deterministic: bool = False
    operation: str = VECTORS


class VectorsKind(OfProductKind):
    """From edge vectors [edges, 3] to sums at nodes; and first gradients."""

    rank = 2
    problem_type = VectorProblem
    operations = convolutions = (VECTORS,)
    table = "vectors"
    groups = MappingProxyType({"convolutions of edge vectors": "vectors"})
    directions = MappingProxyType({name: DIRECTIONS[name] for name in ("forward", "backward", "edge_backward")})
    read = staticmethod(functools.partial(read_schedule, kinds=VECTOR_SCHEDULES))

    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> VectorProblem:
        """A product of harmonics from a table: names of the ``product`` and of the ``harmonics``, its second input."""
        keys = ("product", "harmonics")
        check_table(table, f"vectors {name!r}", keys, required=keys)
        for key, kind in (("product", TensorProductProblem), ("harmonics", HarmonicsProblem)):
            if not isinstance(others.get(str(table[key])), kind):
                known = [other for other, problem in others.items() if isinstance(problem, kind)]
                raise ConfigError(f"vectors {name!r}: " + unknown_name(key, str(table[key]), known))
        product, harmonics = (others[table[key]] for key in keys)
        assert isinstance(product, TensorProductProblem) and isinstance(harmonics, HarmonicsProblem)
        return VectorProblem(product, harmonics)

    def owns_key(self, key: str) -> bool:
        return SEPARATOR in key

    def check(self, workload: Any) -> None:
        super().check(workload)
        if not workload.problem.product.is_channelwise:
            raise ConfigError(
                f"{workload.label!r} has paths that cannot be fused with harmonics; tune its product and its harmonics "
                "separately"
            )

    def blank_spec(
        self, problem: Any, operation: str, asked: Any, dtype: str, layout: str, facts: DeviceFacts, deterministic: bool
    ) -> Any:
        return VectorKernel(problem, asked, VECTOR_SCHEDULES[facts.backend](), dtype, layout, facts, deterministic)

    def default(self, spec: Any, num_edges: int | None) -> Any:
        return VECTOR_SCHEDULES[spec.facts.backend]()

    def plan(self, spec: Any, find_schedule: FindSchedule) -> Any:
        """The plan of the product's kernel, with the schedule known for it."""
        kernel = (spec.dtype, spec.layout, spec.facts)
        place, name = spec.schedule.harmonics, spec.direction.name
        known = product_schedule(find_schedule, spec.problem, name, place, *kernel, None, spec.deterministic)
        harmonics = spec.problem.harmonics if place == "inside" else None
        asked = (spec.problem.product, spec.direction, known, "conv", spec.dtype, spec.layout, "int64", spec.facts)
        whole = Spec(*asked, deterministic=spec.deterministic, harmonics=harmonics)
        return make_plan(ProductKind.kernel_spec(self, whole, known))

    def describe(self, problem: Any) -> tuple[str, ...]:
        vectors = f"of harmonics of degrees {', '.join(map(str, problem.harmonics.degrees))} of edge vectors"
        return (*super().describe(problem), vectors)

    def irreps(self, problem: Any, layout: str) -> dict[str, str]:
        return super().irreps(problem, layout) | {"y": problem.irrep}

    def compulsory_bytes(self, work: Any, direction: str, num_edges: int, num_nodes: int) -> int:
        return bytes_of_product(work, work.problem.product, direction, num_edges, num_nodes, dim_y=3)


def product_schedule(
    find_schedule: FindSchedule,
    problem: VectorProblem,
    direction: str,
    place: str,
    dtype: str,
    layout: str,
    facts: DeviceFacts,
    graph_class: Any,
    deterministic: bool,
) -> Any:
    """The product's schedule in a direction: that of the convolution, or of the plain product if unfused.

    graph_class: a ``GraphClass`` of this kind, or None; that module needs the kinds, so this one cannot import it.
    """
    unfused = place == "unfused"
    where = graph_class
    if where is not None:
        other = {"operation": "plain", "log2_degree": 0} if unfused else {"operation": "conv"}
        where = dataclasses.replace(where, **other)
    kernel = (problem.product, "plain" if unfused else "conv", direction, dtype, layout, facts, where, False)
    schedule: Any = find_schedule(*kernel, deterministic=deterministic).schedule
    return dataclasses.replace(schedule, fuse=False) if unfused else schedule


assert set(VectorsKind.directions) <= set(FUSED)
