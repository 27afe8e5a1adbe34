"""The emitters of tensor products: by plan, and by backend."""

from __future__ import annotations

from kernelgen.emit.cuda.kernel import emit_cuda, launch_of
from kernelgen.emit.cuda.two_part_kernel import emit_owners, owners_launch
from kernelgen.emit.host import emit_host
from kernelgen.emit.pairs.kernel import emit_pairs, pair_launch
from kernelgen.emit.source import Emitter, Source
from kernelgen.plan.channelwise import Plan
from kernelgen.plan.pairs import PairPlan
from kernelgen.plan.tensor_product import OwnersPlan


def _emit_channelwise(plan: Plan) -> Source:
    return emit_cuda(plan) if plan.spec.facts.backend == "cuda" else emit_host(plan)


EMITTERS = {
    Plan: Emitter(_emit_channelwise, launch_of),
    PairPlan: Emitter(emit_pairs, pair_launch),
    OwnersPlan: Emitter(emit_owners, owners_launch),
}
