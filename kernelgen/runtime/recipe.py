"""What a launch of a product's kernel needs beside its code: outputs to zero, operands, the owner of nodes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kernelgen.plan.planner import AnyPlan, make_plan
from kernelgen.schedule.kernel_spec import Spec
from kernelgen.schedule.tensor_product import CudaSchedule


@dataclass(frozen=True)
class Recipe:
    """``spec`` has the live outputs alone; without any there is no ``plan``, and all outputs are zero.

    writes: by live slot, ``zero`` (the kernel adds to zeros), ``inside`` (the kernel zeroes it itself first) or
    ``empty`` (it overwrites). reads: names of the operands. gathers: rows of nodes are gathered for the kernel, and its
    rows summed. owner, partial_y: of the plan. permuted: of the kernel that takes runs of edges by receiver, where
    those are better than runs in a graph's own order.
    """

    spec: Spec
    plan: AnyPlan | None
    writes: dict[str, str]
    reads: tuple[str, ...]
    gathers: bool
    owner: str
    partial_y: int
    permuted: Spec | None


def live_spec(spec: Spec) -> Spec | None:
    """The spec with the outputs to which something contributes; None if there are none."""
    live = spec.direction.live_outputs if spec.problem.paths else ""
    return dataclasses.replace(spec, direction=dataclasses.replace(spec.direction, outputs=live)) if live else None


def recipe_of(spec: Spec, is_conv: bool, plan: AnyPlan | None = None) -> Recipe:
    """The recipe of a spec. plan: of the live outputs, if it is at hand."""
    live, gathers = live_spec(spec), is_conv and spec.operation == "plain"
    if live is None:
        return Recipe(spec, None, {}, (), gathers, "", 0, None)
    plan = plan or make_plan(live)
    schedule = spec.schedule
    zeroed = "inside" if isinstance(schedule, CudaSchedule) and schedule.zeros == "inside" else "zero"
    writes = {slot: zeroed if f"out_{slot}" in plan.zeroed else "empty" for slot in live.direction.outputs}
    permuted = dataclasses.replace(live, permuted=True) if spec.takes_runs and schedule.has_long_runs else None
    return Recipe(live, plan, writes, live.operands, gathers, plan.owner, plan.partial_y, permuted)
