"""The emitter of a made-up kind."""

from __future__ import annotations

from kernelgen.plan.doubling import DoublingPlan

from kernelgen.emit.launch import LaunchRule, Share
from kernelgen.emit.source import Emitter, Source


def emit_doubling(plan: DoublingPlan) -> Source:
    return Source(f"// {plan.spec.problem.key}, {plan.spec.schedule.key}\n", "c++")


EMITTERS = {DoublingPlan: Emitter(emit_doubling, lambda plan: LaunchRule(32, 0, (Share("edges"),)))}
