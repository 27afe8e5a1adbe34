"""A plan enters, source leaves: picks the emitter of the plan's backend."""

from __future__ import annotations

from kernelgen.emit_cuda import emit_cuda
from kernelgen.emit_host import emit_host
from kernelgen.plan import Plan
from kernelgen.source import Source


def emit(plan: Plan) -> Source:
    """Complete source of the one kernel that ``plan`` describes."""
    return emit_cuda(plan) if plan.spec.facts.backend == "cuda" else emit_host(plan)
