"""A made-up kind's knobs and spec, its plan, and its emitter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kernelgen.problem.doubling import Doubling

from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.source import LaunchRule, Share, Source


@dataclass(frozen=True)
class DoublingSchedule(Knobs):
    unroll: int = 1

    backend: ClassVar[str] = "cpu"
    choices: ClassVar[dict[str, tuple]] = {"unroll": (1, 2, 4)}


@dataclass(frozen=True)
class DoublingSpec:
    problem: Doubling
    direction: Any
    schedule: DoublingSchedule
    dtype: str
    facts: DeviceFacts
    operation: str = "doubling"
    layout: str = "mul_ir"
    deterministic: bool = False

    @property
    def row_work(self) -> int:
        return self.problem.size


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


def emit_doubling(plan: DoublingPlan) -> Source:
    return Source(f"// {plan.spec.problem.key}, {plan.spec.schedule.key}\n", "c++")


def doubling_launch(plan: DoublingPlan) -> LaunchRule:
    return LaunchRule(32, 0, (Share("edges"),))
