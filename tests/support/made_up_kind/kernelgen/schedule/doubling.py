"""The knobs of a made-up kind, and its spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kernelgen.problem.doubling import Doubling

from kernelgen.device import DeviceFacts
from kernelgen.schedule.knobs import Knobs


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
