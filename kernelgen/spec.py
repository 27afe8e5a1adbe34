"""What one kernel is: a problem, a direction, a schedule and the device that it is compiled for, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.device import DeviceFacts
from kernelgen.direction import OPERANDS, Direction
from kernelgen.errors import ScheduleError
from kernelgen.problem import TensorProductProblem
from kernelgen.schedule import Schedule

BYTES = {"float32": 4, "float64": 8}
# Pointer arguments of every kernel, in this order; null where a direction does not use one.
BUFFERS = (
    *OPERANDS,
    *("out_x", "out_y", "out_w", "out_g"),
    *("sender", "receiver", "spans", "perm"),
)


@dataclass(frozen=True)
class Spec:
    """All that determines one kernel's source.

    operation: ``conv`` (gather by sender, product, sum by receiver) or ``plain`` (edge by edge).
    layout: of node features and outputs, ``mul_ir`` (e3nn's: channel, then component) or ``ir_mul``.
    index: dtype of sender and receiver. facts: the device compiled for. deterministic: no sum may depend on which
    worker comes first.
    """

    problem: TensorProductProblem
    direction: Direction
    schedule: Schedule
    operation: str
    dtype: str
    layout: str
    index: str
    facts: DeviceFacts
    deterministic: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("operation", ("conv", "plain")),
            ("dtype", tuple(BYTES)),
            ("layout", ("mul_ir", "ir_mul")),
            ("index", ("int32", "int64")),
        )
        for name, allowed in checks:
            if getattr(self, name) not in allowed:
                raise ScheduleError(f"{name} is {getattr(self, name)!r}; expected one of {allowed}")
        if self.schedule.backend != self.facts.backend:
            raise ScheduleError(f"a {self.schedule.backend} schedule cannot run on {self.facts.name}")
