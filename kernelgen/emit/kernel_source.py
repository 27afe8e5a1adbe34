"""Chooses the emitter for a plan's kind and backend."""

from __future__ import annotations

from kernelgen.emit.cuda.kernel import emit_cuda, launch_geometry
from kernelgen.emit.cuda.two_part_kernel import emit_owners, owners_geometry
from kernelgen.emit.harmonics import emit_harmonics, harmonics_geometry
from kernelgen.emit.host import emit_host
from kernelgen.emit.pairs.kernel import emit_pairs, pair_geometry
from kernelgen.emit.source import Source
from kernelgen.plan.pairs import PairPlan
from kernelgen.plan.planner import AnyPlan, OwnersPlan
from kernelgen.plan.spherical_harmonics import HarmonicsPlan


def emit(plan: AnyPlan) -> Source:
    """The complete source of a plan's kernel."""
    if isinstance(plan, HarmonicsPlan):
        return emit_harmonics(plan)
    if isinstance(plan, PairPlan):
        return emit_pairs(plan)
    if isinstance(plan, OwnersPlan):
        return emit_owners(plan)
    return emit_cuda(plan) if plan.spec.facts.backend == "cuda" else emit_host(plan)


def geometry(plan: AnyPlan, num_edges: int, num_in: int, num_out: int) -> tuple[int, int, int]:
    """Launch geometry of a CUDA kernel: blocks, threads a block, and dynamic shared memory in bytes."""
    if isinstance(plan, HarmonicsPlan):
        return harmonics_geometry(plan, num_edges)
    if isinstance(plan, PairPlan):
        return pair_geometry(plan, num_edges)
    if isinstance(plan, OwnersPlan):
        return owners_geometry(plan, num_edges, num_in, num_out)
    return launch_geometry(plan, num_edges, num_in, num_out)
