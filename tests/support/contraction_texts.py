"""The kernels of symmetric contractions whose texts are pinned, see ``golden_texts``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kernelgen.arithmetic.contraction import (
    CONTRACTION_DIRECTIONS,
    FORWARD,
    ContractionDirection,
    contraction_backward,
    contraction_double_backward,
)
from kernelgen.device import DeviceFacts
from kernelgen.kernels.symmetric_contraction import (
    ContractionCudaSchedule,
    ContractionHostSchedule,
    ContractionSchedule,
    ContractionSpec,
)
from kernelgen.problem.other_kinds import ContractionProblem

PROBLEMS = {
    "usual": ContractionProblem("0e+1o+2e", "0e+1o", 3, 32),
    # Outputs without polynomials of some degrees, and channels that fill no vector.
    "odd": ContractionProblem("1o+0e+1e", "1e+0o", 2, 5),
    "quartic": ContractionProblem("0e+1o", "0e", 4, 8),
}
# All named directions, and choices of tangents and outputs that autograd makes.
EACH = (
    *CONTRACTION_DIRECTIONS.values(),
    contraction_backward("w"),
    *(contraction_double_backward(*kind) for kind in (("x", "xw"), ("x", "g"), ("w", "xg"), ("xw", "xwg"))),
)
KINDS = (("float32", "ir_mul", "int64"), ("float64", "mul_ir", "int32"))
BASES = (ContractionCudaSchedule(nodes_per_task=4), ContractionHostSchedule(nodes_per_task=4, channel_block=8))


def _legal(schedule: ContractionSchedule, direction: ContractionDirection) -> ContractionSchedule:
    """Gradients of the weights take nodes by element."""
    sums = direction is not FORWARD and "w" in direction.outputs
    return dataclasses.replace(schedule, order="element") if sums else schedule


def contractions(
    facts: Mapping[str, DeviceFacts], named: Callable[[Any], str], values_of: Callable[[Any, str], tuple]
) -> Iterator[tuple[str, ContractionSpec]]:
    """Every direction of every problem in both layouts, and every value of every knob."""

    def case(name: str, direction: ContractionDirection, schedule: Any, kind: tuple) -> tuple[str, ContractionSpec]:
        schedule = _legal(schedule, direction)
        spec = ContractionSpec(PROBLEMS[name], direction, schedule, *kind, facts[schedule.backend])
        return f"{schedule.backend} {name} {direction.text} {' '.join(kind)} {named(schedule)}", spec

    found: dict[str, ContractionSpec] = {}
    for base in BASES:
        for direction in EACH:
            found |= [case("usual", direction, base, kind) for kind in KINDS]
        for name in ("odd", "quartic"):
            found |= [
                case(name, direction, base, kind) for direction in CONTRACTION_DIRECTIONS.values() for kind in KINDS
            ]
        for name in ("forward", "backward", "double_backward"):
            direction = CONTRACTION_DIRECTIONS[name]
            for knob in base.choices:
                beside = {"min_blocks": {"block_size": 64}, "zeros": {"adds": "atomic"}}.get(knob, {})
                for value in values_of(base, knob):
                    schedule = dataclasses.replace(base, **(beside | {knob: value}))
                    found |= [case("usual", direction, schedule, KINDS[0])]
    yield from found.items()
