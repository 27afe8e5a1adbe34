"""The search space of one kernel of a symmetric contraction on one device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autotune.database.knobs import threads_of
from autotune.search.space import Space
from autotune.workload.kinds.symmetric_contraction import ContractionKind
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts
from kernelgen.kernels.contraction.plan import contraction_plan
from kernelgen.kernels.contraction.schedule import ContractionCudaSchedule
from kernelgen.kernels.knobs import Knobs, power_of_two_at_most
from kernelgen.kernels.spec import BYTES

WARP = 32


@dataclass(frozen=True)
class ContractionSpace(Space):
    """The space of a kernel of a symmetric contraction."""

    def canonical(self, schedule: Knobs) -> Knobs:
        if isinstance(schedule, ContractionCudaSchedule) and schedule.block_size == WARP:
            return dataclasses.replace(schedule, pace="free")  # a block of one warp waits for nothing
        return schedule


def contraction_space(spec: Any, num_nodes: int) -> Space:
    """The choices that make a kernel of their own. num_nodes: no task takes twice as many nodes as there are."""
    default, facts = spec.schedule, spec.facts
    plan = contraction_plan(spec)
    knobs: dict[str, tuple] = {**default.choices}
    knobs["nodes_per_task"] = tuple(n for n in knobs["nodes_per_task"] if n < 2 * num_nodes)
    walks = (dataclasses.replace(default, gradients=gradients) for gradients in knobs["gradients"])
    if len({contraction_plan(dataclasses.replace(spec, schedule=schedule)).parts for schedule in walks}) == 1:
        del knobs["gradients"]
    knobs.pop("adds", None)  # rows are for sums in a fixed order alone: they take memory, and save no time
    if plan.sums_weights:
        del knobs["order"]
    elif facts.backend == "cuda":
        del knobs["sums"], knobs["zeros"]
    if facts.backend == "cpu":
        lanes, widest = facts.vector_bytes // BYTES[spec.dtype], power_of_two_at_most(spec.problem.channels)
        # Narrower vectors leave lanes idle; there are none of two channels.
        least, most = min(lanes // 2, widest), min(4 * lanes, widest)
        knobs["channel_block"] = tuple(n for n in knobs["channel_block"] if least <= n <= most and n != 2)
        knobs["threads"] = threads_of(facts)
    for knob, choices in knobs.items():
        value = getattr(default, knob)
        knobs[knob] = choices if value in choices else (*choices, value)
    space = ContractionSpace(spec, MappingProxyType(knobs))
    return dataclasses.replace(space, probes=_probes(space))


def _probes(space: Space) -> tuple[Knobs, ...]:
    """On a GPU: the default with each other form of the statements, and in smaller blocks."""
    if space.spec.facts.backend != "cuda":
        return ()
    changes: list[dict[str, Any]] = [
        {knob: value} for knob in ("gradients", "sums", "pace", "order", "zeros") for value in space.knobs.get(knob, ())
    ]
    found = (space.schedule(change) for change in (*changes, {"block_size": 64}, {"block_size": 64, "pace": "parts"}))
    return tuple(
        dict.fromkeys(
            schedule for schedule in found if schedule != space.default and space.broken_limit(schedule) is None
        )
    )


def _of_contraction(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    return contraction_space(workload.spec(direction, facts), workload.num_edges)


SPACES = dict.fromkeys(ContractionKind.operations, _of_contraction)
