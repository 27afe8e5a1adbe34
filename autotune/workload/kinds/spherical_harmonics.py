"""The kind of spherical harmonics.

Vectors are operand ``x``, their tangents ``tx``, harmonics (and their cotangents) ``g``. Directions are named as for
products, and both layouts have the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from autotune.errors import ConfigError
from autotune.workload.kinds.base import FindSchedule, KernelKind, Problem
from autotune.workload.toml_tables import check_table
from kernelgen.arithmetic.directions import HARMONICS_DIRECTIONS
from kernelgen.device import DeviceFacts
from kernelgen.kernels.harmonics.plan import HarmonicsPlan, harmonics_plan
from kernelgen.kernels.harmonics.schedule import HARMONICS_SCHEDULES, HarmonicsSchedule, harmonics_schedule_from_dict
from kernelgen.kernels.product.defaults import default_harmonics_schedule
from kernelgen.kernels.spec import BYTES, HarmonicsSpec
from kernelgen.problem.harmonics import HarmonicsProblem

OPERATION, LAYOUT = HarmonicsSpec.operation, HarmonicsSpec.layout
# The slots that each direction reads.
OPERANDS = {"forward": ("x",), "backward": ("x", "g"), "double_backward": ("x", "g", "tx")}


class HarmonicsKind(KernelKind):
    """From vectors [n, 3] to harmonics [n, dim_out]."""

    rank = 1
    problem_type = HarmonicsProblem
    operations = (OPERATION,)
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
        if layout != LAYOUT or deterministic:
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
        moved = (*OPERANDS[direction], *HARMONICS_DIRECTIONS[direction].outputs)
        return num_edges * sum(elements[name] for name in moved) * BYTES[work.dtype]
