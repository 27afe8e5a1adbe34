"""Spherical harmonics as the tuner sees them: the second :class:`autotune.families.Family`.

Vectors are operand ``x``, their tangents ``tx``, harmonics (and their cotangents) ``g``. Directions have the names of a
product's, and rows are the same in both layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.errors import ConfigError
from autotune.families import Family, Run
from kernelgen.device import DeviceFacts
from kernelgen.plan.defaults import default_harmonics_schedule
from kernelgen.plan.spherical_harmonics import HarmonicsPlan, harmonics_plan
from kernelgen.problem.spherical_harmonics import HarmonicsProblem
from kernelgen.schedule.kernel_spec import BYTES, HarmonicsSpec
from kernelgen.schedule.knobs import Knobs
from kernelgen.schedule.spherical_harmonics import HARMONICS_SCHEDULES, HarmonicsSchedule, harmonics_schedule_from_dict
from kernelgen.terms.directions import HARMONICS_DIRECTIONS

if TYPE_CHECKING:
    from autotune.baselines.passes import Call
    from autotune.space import Space
    from autotune.verify import Reference
    from autotune.workload import Tensors, Workload
    from kernelgen.runtime.graph import EdgeOrder

OPERATION, LAYOUT = "harmonics", "mul_ir"
# What each direction reads, by slot; it writes its outputs.
OPERANDS = {"forward": ("x",), "backward": ("x", "g"), "double_backward": ("x", "g", "tx")}


@dataclass(frozen=True)
class HarmonicsKernel(HarmonicsSpec):
    """A spec with the rest of what every kernel is stored and looked up by."""

    operation: ClassVar[str] = OPERATION
    layout: ClassVar[str] = LAYOUT
    deterministic: ClassVar[bool] = False


class Harmonics(Family):
    """Vectors [n, 3] to harmonics [n, dim_out]."""

    operations = (OPERATION,)
    directions = HARMONICS_DIRECTIONS
    inputs = "x"

    def check(self, workload: Workload) -> None:
        if workload.layout != LAYOUT or workload.deterministic:
            raise ConfigError(
                f"harmonics {workload.label!r} have layout {workload.layout!r} and deterministic = "
                f"{str(workload.deterministic).lower()}; expected neither: their rows have one layout, and they are "
                "always bitwise equal from run to run"
            )

    def read(self, data: Mapping[str, Any]) -> HarmonicsSchedule:
        return harmonics_schedule_from_dict(data)

    def spec(
        self,
        problem: HarmonicsProblem,
        operation: str,
        direction: Any,
        dtype: str,
        layout: str,
        facts: DeviceFacts,
        deterministic: bool = False,
    ) -> HarmonicsKernel:
        asked = HARMONICS_DIRECTIONS[direction] if isinstance(direction, str) else direction
        return HarmonicsKernel(problem, asked, HARMONICS_SCHEDULES[facts.backend](), dtype, facts)

    def default(self, spec: HarmonicsSpec, num_edges: int | None) -> HarmonicsSchedule:
        return default_harmonics_schedule(spec.problem, spec.direction, spec.dtype, spec.facts)

    def plan(self, spec: HarmonicsSpec) -> HarmonicsPlan:
        return harmonics_plan(spec)

    def describe(self, problem: HarmonicsProblem) -> tuple[str, ...]:
        degrees = ", ".join(map(str, problem.degrees))
        vectors = "normalized" if problem.normalize else "raw"
        return (
            f"spherical harmonics of degrees {degrees}",
            f"{vectors} vectors, normalization {problem.normalization}, {problem.dim_out} outputs",
        )

    def space(self, workload: Workload, direction: str, facts: DeviceFacts) -> Space:
        from autotune.spaces import harmonics_space

        return harmonics_space(self.spec(workload.harmonics, OPERATION, direction, workload.dtype, LAYOUT, facts))

    def tensors(self, workload: Workload, device: Any) -> Tensors:
        from autotune.verify_harmonics import make_vectors

        return make_vectors(workload, device)

    def irreps(self, workload: Workload) -> dict[str, str]:
        parity = "eo"
        return {"x": "1o", "g": "+".join(f"{degree}{parity[degree % 2]}" for degree in workload.harmonics.degrees)}

    def compulsory_bytes(self, workload: Workload, direction: str, num_edges: int, num_nodes: int) -> int:
        elements = {"x": 3, "tx": 3, "g": workload.harmonics.dim_out}
        moved = (*OPERANDS[direction], *HARMONICS_DIRECTIONS[direction].outputs)
        return num_edges * sum(elements[name] for name in moved) * BYTES[workload.dtype]

    def reference(self, workload: Workload, device: Any, tensors: Tensors | None = None) -> Reference:
        from autotune.verify_harmonics import HarmonicsReference

        return HarmonicsReference(workload, device, tensors)

    def build(self, workload: Workload, schedules: Mapping[str, Knobs], device: str) -> Any:
        import torch

        from kernelgen.ops.harmonics_operator import build_harmonics

        given: Any = dict(schedules)
        return build_harmonics(workload.harmonics, given, dtype=getattr(torch, workload.dtype), device=device)

    def specs(self, operator: Any, directions: Iterable[str]) -> list[Any]:
        return [operator.spec(HARMONICS_DIRECTIONS[name]) for name in directions]

    def call(self, workload: Workload, operator: Any, tensors: Tensors, order: EdgeOrder | None) -> Call:
        return operator

    def run(
        self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool = False
    ) -> Run:
        v, g, t = tensors.x, tensors.g, tensors.tx
        if direction == "forward":
            return lambda: {"g": operator.run_forward(v, poison=poison)}
        if direction == "backward":
            return lambda: {"x": operator.run_backward(v, g, poison=poison)}
        return lambda: operator.run_double_backward(v, g, t, poison=poison)
