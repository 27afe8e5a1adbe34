"""From a spec to its plan, and from a plan to its source: the planner and the emitters of each kind of kernel.

Planners alone decide legality: each raises a ScheduleError that names the broken limit. Emitters trust a plan. A new
kind adds its lines to ``PLANNERS`` and ``EMITTERS``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from kernelgen.kernels.pairs.channels import ChannelPlan, channel_launch, emit_channels
from kernelgen.kernels.pairs.emit import emit_pairs, pair_launch
from kernelgen.kernels.pairs.plan import PairPlan
from kernelgen.kernels.product.channelwise import Plan
from kernelgen.kernels.product.emit import emit_owners, emit_product, launch_of, owners_launch
from kernelgen.kernels.product.plan import OwnersPlan, product_plan
from kernelgen.kernels.radial.emit import emit_radial, radial_launch
from kernelgen.kernels.radial.plan import RadialPlan, RadialSpec, radial_plan
from kernelgen.kernels.source import Emitter, LaunchRule, Source, included
from kernelgen.kernels.spec import AnySpec, Spec
from kernelgen.kernels.spherical_harmonics import (
    HarmonicsPlan,
    HarmonicsSpec,
    emit_harmonics,
    harmonics_launch,
    harmonics_plan,
)
from kernelgen.kernels.symmetric_contraction import (
    ContractionPlan,
    ContractionSpec,
    contraction_launch,
    contraction_plan,
    emit_contraction,
)


class AnyPlan(Protocol):
    """What launching a kernel needs to know of it.

    zeroed: outputs that must be zero before the kernel adds to them. owner: the nodes that a worker owns
    (``sender``, ``receiver`` or none). partial_y: rows of partial sums of dF/dy.
    """

    @property
    def spec(self) -> AnySpec: ...
    @property
    def zeroed(self) -> frozenset[str]: ...
    @property
    def owner(self) -> str: ...
    @property
    def partial_y(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...


PLANNERS: dict[type, Callable[[Any], Any]] = {
    Spec: product_plan,
    RadialSpec: radial_plan,
    HarmonicsSpec: harmonics_plan,
    ContractionSpec: contraction_plan,
}


def make_plan(spec: Any) -> Any:
    """The plan of a spec (of its kind's type), or ScheduleError with the broken limit."""
    planner = PLANNERS.get(type(spec))
    if planner is None:
        expected = [known.__name__ for known in PLANNERS]
        raise TypeError(f"a {type(spec).__name__} is no spec; expected one of {expected}")
    return planner(spec)


EMITTERS: dict[type, Emitter] = {
    Plan: Emitter(emit_product, launch_of),
    PairPlan: Emitter(emit_pairs, pair_launch),
    ChannelPlan: Emitter(emit_channels, channel_launch),
    OwnersPlan: Emitter(emit_owners, owners_launch),
    RadialPlan: Emitter(emit_radial, radial_launch),
    HarmonicsPlan: Emitter(emit_harmonics, harmonics_launch),
    ContractionPlan: Emitter(emit_contraction, contraction_launch),
}


def emit(plan: AnyPlan) -> Source:
    """The complete source of a plan's kernel; equal plans give equal text.

    For an AMD GPU in HIP's form: the CUDA text after a header that says what CUDA's built-in names mean there. The
    hand-written headers keep assembler text to ``__CUDA_ARCH__`` and have a C++ form beside it, which HIP takes: plain
    loads and stores, copies to shared memory that a lane waits for, no prefetches.
    """
    source, facts = EMITTERS[type(plan)].source(plan), plan.spec.facts
    if not facts.is_hip:
        return source
    note = f"// HIP for waves of {facts.wave} lanes: compiles, emulated, not run\n"
    text = f"{note}constexpr int WAVE = {facts.wave};\n{included('hip.hpp')}\n{source.text}"
    return dataclasses.replace(source, text=text, language="hip")


def launch_rule(plan: AnyPlan) -> LaunchRule:
    """How a plan's CUDA kernel is launched."""
    return EMITTERS[type(plan)].launch(plan)


def geometry(plan: AnyPlan, num_edges: int, num_in: int, num_out: int, held: int = 0) -> tuple[int, int, int]:
    """Launch geometry of a CUDA kernel: blocks, threads a block, and dynamic shared memory in bytes.

    held: blocks that a multiprocessor holds at a time, 0 if that is not known.
    """
    return launch_rule(plan).geometry(num_edges, num_in, num_out, plan.spec.facts.units, held)
