"""Chooses the emitter for a plan's type: an entry of ``EMITTERS`` in a file of this folder."""

from __future__ import annotations

from kernelgen.emit.hip import hip_form
from kernelgen.emit.launch import LaunchRule
from kernelgen.emit.source import Emitter, Source
from kernelgen.folder import collected
from kernelgen.plan.planner import AnyPlan

_EMITTERS: dict[type, Emitter] = {
    plan: emitter for emitters in collected("kernelgen.emit", "EMITTERS") for plan, emitter in emitters.items()
}


def emit(plan: AnyPlan) -> Source:
    """The complete source of a plan's kernel."""
    source = _EMITTERS[type(plan)].source(plan)
    return hip_form(source, plan.spec.facts) if plan.spec.facts.is_hip else source


def launch_rule(plan: AnyPlan) -> LaunchRule:
    """How a plan's CUDA kernel is launched."""
    return _EMITTERS[type(plan)].launch(plan)


def geometry(plan: AnyPlan, num_edges: int, num_in: int, num_out: int, held: int = 0) -> tuple[int, int, int]:
    """Launch geometry of a CUDA kernel: blocks, threads a block, and dynamic shared memory in bytes.

    held: blocks that a multiprocessor holds at a time, 0 if that is not known.
    """
    return launch_rule(plan).geometry(num_edges, num_in, num_out, plan.spec.facts.units, held)
