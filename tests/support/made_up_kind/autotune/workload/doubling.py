"""How kernels of a made-up kind are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kernelgen.kernels.doubling import DoublingSchedule, DoublingSpec
from kernelgen.problem.doubling import Doubling

from autotune.workload.kind import FindSchedule, KernelKind, Problem
from autotune.workload.toml_tables import check_table
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import DeviceFacts
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.knobs import Knobs


class DoublingKind(KernelKind):
    problem_type = Doubling
    operations = ("doubling",)
    directions = MappingProxyType({"forward": DIRECTIONS["forward"]})
    inputs = tangents = "x"
    table = "doublings"
    groups = MappingProxyType({"doubled rows": "doubled"})

    def problem_from(self, name: str, table: Any, others: Mapping[str, Problem]) -> Doubling:
        check_table(table, f"doubling {name!r}", ("size",), required=("size",))
        return Doubling(table["size"])

    def owns_key(self, key: str) -> bool:
        return key.startswith("doubling|")

    def check(self, workload: Any) -> None:
        """All are legal."""

    @staticmethod
    def read(data: Mapping[str, Any]) -> Knobs:
        return DoublingSchedule(data["unroll"])

    def blank_spec(
        self, problem: Any, operation: str, asked: Any, dtype: str, layout: str, facts: DeviceFacts, deterministic: bool
    ) -> DoublingSpec:
        return DoublingSpec(problem, asked, DoublingSchedule(), dtype, facts)

    def default(self, spec: Any, num_edges: int | None) -> Knobs:
        return DoublingSchedule()

    def plan(self, spec: Any, find_schedule: FindSchedule) -> Any:
        return make_plan(spec)

    def describe(self, problem: Any) -> tuple[str, ...]:
        return (f"rows of {problem.size} elements, doubled",)

    def irreps(self, problem: Any, layout: str) -> dict[str, str]:
        return {"x": f"{problem.size}x0e", "g": f"{problem.size}x0e"}

    def compulsory_bytes(self, work: Any, direction: str, num_edges: int, num_nodes: int) -> int:
        return 2 * 4 * work.problem.size * num_edges
