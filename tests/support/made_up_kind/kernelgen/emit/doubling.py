"""The emitter of a made-up kind."""

from __future__ import annotations

from kernelgen.plan.doubling import DoublingPlan

from kernelgen.emit.source import Emitter, Source


def emit_doubling(plan: DoublingPlan) -> Source:
    return Source(f"// {plan.spec.problem.key}, {plan.spec.schedule.key}\n", "c++")


EMITTERS = {DoublingPlan: Emitter(emit_doubling, lambda plan, num_edges, num_in, num_out: (num_edges, 32, 0))}
