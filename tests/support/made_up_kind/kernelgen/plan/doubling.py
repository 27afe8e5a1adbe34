"""The plan of a made-up kind."""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.schedule.doubling import DoublingSpec

from kernelgen.errors import ScheduleError


@dataclass(frozen=True)
class DoublingPlan:
    spec: DoublingSpec
    zeroed: frozenset[str] = frozenset()
    owner: str = ""
    partial_y: int = 0
    shared_bytes: int = 0


def doubling_plan(spec: DoublingSpec) -> DoublingPlan:
    if spec.schedule.unroll > spec.problem.size:
        raise ScheduleError(f"unroll={spec.schedule.unroll} exceeds the {spec.problem.size} elements of a row")
    return DoublingPlan(spec)


PLANNERS = {DoublingSpec: doubling_plan}
