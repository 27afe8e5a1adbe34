"""Schedules that are worth one measurement each, beside what a sampler proposes: a space enters, its probes leave.

``fuse`` is no knob of a search. In 15 studies (H200, and a CPU of two cores) the fastest of the unfused schedules, a
seventh of all trials and half of the first fifty, took 4 to 29 times as long as the fastest fused one: torch's gather
and scatter around the kernel decide, whatever its other knobs. So unfused stands beside the space as one probe, the
default schedule without fusion, which keeps the claim under test on every problem and graph. Kernels of pairs add to
the rows of nodes in memory in any case: there it takes 1.0 to 1.5 times as long, and the probe may win.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelgen.plan.tensor_product import MAX_REGISTERS, estimate_registers
from kernelgen.schedule.knobs import Knobs
from kernelgen.schedule.tensor_product import CudaSchedule

if TYPE_CHECKING:
    from autotune.search.space import Space

# Estimated registers of a thread up to which a tiling is taken into the probes: two blocks of 128 threads fit.
TILING_REGISTERS = 200
# Edges a warp and channels a lane.
_TILINGS = ((1, 1), (1, 2), (1, 4), (2, 2), (4, 4))


def probes_of(space: Space) -> tuple[Knobs, ...]:
    """Of a kernel of a channelwise product."""
    kinds = (_tilings, _owners, _forms, unfused)
    return tuple(schedule for kind in kinds for schedule in kind(space))


def _legal(space: Space, values: Mapping[str, Any]) -> CudaSchedule | None:
    """The default with these values, where all are choices of the space and together legal."""
    if not all(value in space.knobs.get(knob, (getattr(space.default, knob),)) for knob, value in values.items()):
        return None
    schedule = space.schedule(values)
    assert isinstance(schedule, CudaSchedule)
    return schedule if space.broken_limit(schedule) is None else None


def _tilings(space: Space) -> tuple[Knobs, ...]:
    """The default with small teams of several channels a lane, in as few path groups as registers allow.

    They read fewer edge values and issue fewer instructions an edge, but leave fewer teams, so several share a node:
    three knobs and the path groups that only together are better, which no search of single knobs finds.
    """
    if space.spec.facts.backend != "cuda" or space.spec.operation != "conv":
        return ()
    found = []
    for tile, teams in ((2, 1), (2, 2), (4, 2), (4, 4)):
        for groups in space.knobs["path_groups"]:
            values = {"edges_per_warp": tile, "channels_per_thread": tile, "teams_per_node": teams}
            schedule = _legal(space, {**values, "path_groups": groups, "prefetch": "none", "stage_edges": 8})
            if schedule and estimate_registers(space.plan(schedule)) <= TILING_REGISTERS:
                found.append(schedule)
                break
    return tuple(found)


def _owners(space: Space) -> tuple[Knobs, ...]:
    """The default without sums in memory, so without zeros to begin with, one for each number of teams an edge.

    Of a small graph that is one launch instead of two. Of a plain product teams take one edge each, so that memory is
    walked in order: fastest on an H200 where a team had all channels, backward of mace-mp-first and mace-mp-medium.
    There the compiler takes fewer registers than estimated: rows are loaded as they are used.
    """
    if "owners" not in space.knobs.get("accumulate", ()):
        return ()
    plain = {"edges_per_chunk": 1, "stage_edges": 4, "prefetch": "none", "ahead": "none", "block_size": 64}
    base = plain if space.spec.operation == "plain" else {"block_size": 128}
    found: dict[int, Knobs] = {}
    widest = max((path.mul for path in space.spec.problem.paths), default=1)
    for groups, (tile, channels) in itertools.product(space.knobs["path_groups"], _TILINGS):
        values = {"edges_per_warp": tile, "channels_per_thread": channels, "path_groups": groups, "warps_per_edge": 1}
        schedule = _legal(space, {**base, **values, "accumulate": "owners"})
        if schedule is None or 32 // tile * channels > widest:
            continue
        units = schedule.warps_per_edge
        if units in found or units not in space.knobs["warps_per_edge"]:
            continue
        plan = space.plan(schedule)
        fits = base is plain or estimate_registers(plan) <= MAX_REGISTERS
        if fits and "out_y" not in plan.zeroed:
            found[units] = schedule
    if base is plain and 1 in found:
        # The fastest of those that add in memory, without that: two edges a team and no shared memory.
        two = {"edges_per_chunk": 2, "edge_operand": "inline", "block_size": 128, "min_blocks": 3}
        faster = _legal(space, {knob: getattr(found[1], knob) for knob in space.knobs} | two)
        return (*found.values(), *([faster] if faster else []))
    return tuple(found.values())


def _forms(space: Space) -> tuple[Knobs, ...]:
    """The default in forms that the sampler would come to late.

    Writing the zeros that it adds to, as it is and adding every gradient in memory; with its weights copied ahead to
    shared memory, so not asked into L2 as well.
    """
    if not isinstance(space.default, CudaSchedule):
        return ()
    inside: tuple[dict[str, Any], ...] = ({"zeros": "inside"}, {"zeros": "inside", "accumulate": "atomics"})
    rings = ({"prefetch": ring, "ahead": "none"} for ring in ("ring2", "ring4"))
    found = (_legal(space, change) for change in (*inside, *rings))
    return tuple(dict.fromkeys(schedule for schedule in found if schedule))


def unfused(space: Space) -> tuple[Knobs, ...]:
    """The default without fusion; torch's sums at nodes are in no fixed order, so never of a deterministic kernel."""
    if space.spec.operation == "plain" or space.spec.deterministic:
        return ()
    schedule = space.schedule({"fuse": False})
    return (schedule,) if space.broken_limit(schedule) is None else ()
