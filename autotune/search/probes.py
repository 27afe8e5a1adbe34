"""Probes of a space: schedules that are measured once each, beside the sampler's proposals.

``fuse`` is not a knob of the search. In 15 studies (H200, and a CPU of two cores) unfused schedules were a seventh of
all trials and half of the first fifty, and the fastest of them took 4 to 29 times as long as the fastest fused one:
torch's gather and scatter around the kernel dominate, whatever the other knobs. So there is one unfused probe, the
default schedule without fusion, which tests this on every problem and graph. Kernels of pairs add to node rows in
memory anyway: there unfused takes 1.0 to 1.5 times as long, and the probe may win.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.plan import MAX_REGISTERS, estimate_registers
from kernelgen.kernels.product.schedule import CudaSchedule

if TYPE_CHECKING:
    from autotune.search.space import Space

# Most estimated registers per thread of a probed tiling: two blocks of 128 threads fit.
TILING_REGISTERS = 200
# Edges per warp and channels per lane.
_TILINGS = ((1, 1), (1, 2), (1, 4), (2, 2), (4, 4))


def probes_of(space: Space) -> tuple[Knobs, ...]:
    """Probes for a kernel of a channelwise product."""
    kinds = (_tilings, _owners, _forms, unfused)
    return tuple(schedule for kind in kinds for schedule in kind(space))


def _legal(space: Space, values: Mapping[str, Any]) -> CudaSchedule | None:
    """The default schedule with these values, if all are choices of the space and legal together."""
    if not all(value in space.knobs.get(knob, (getattr(space.default, knob),)) for knob, value in values.items()):
        return None
    schedule = space.schedule(values)
    assert isinstance(schedule, CudaSchedule)
    return schedule if space.broken_limit(schedule) is None else None


def _tilings(space: Space) -> tuple[Knobs, ...]:
    """The default with small teams of several channels per lane, in as few path groups as registers allow.

    They read fewer edge values and issue fewer instructions per edge, but leave fewer teams, so several share a node.
    Three knobs and the path groups only help together, which a search of single knobs does not find.
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
    """The default without sums in memory, and so without initial zeros; one for each number of teams per edge.

    On a small graph that saves one of two launches. For a plain product each team takes one edge, so that memory is
    read in order: fastest on an H200 if a team has all channels, backward of mace-mp-first and mace-mp-medium. There
    the compiler uses fewer registers than estimated, because rows are loaded when used.
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
        # Like the fastest schedule with sums in memory, but without them: two edges per team and no shared memory.
        two = {"edges_per_chunk": 2, "edge_operand": "inline", "block_size": 128, "min_blocks": 3}
        faster = _legal(space, {knob: getattr(found[1], knob) for knob in space.knobs} | two)
        return (*found.values(), *([faster] if faster else []))
    return tuple(found.values())


def _forms(space: Space) -> tuple[Knobs, ...]:
    """The default in forms that the sampler would try late.

    The kernel writes its own initial zeros, with the default's sums and with every gradient summed in memory. Or it
    copies weights to shared memory early, and so does not prefetch them into L2.
    """
    if not isinstance(space.default, CudaSchedule):
        return ()
    inside: tuple[dict[str, Any], ...] = ({"zeros": "inside"}, {"zeros": "inside", "accumulate": "atomics"})
    rings = ({"prefetch": ring, "ahead": "none"} for ring in ("ring2", "ring4"))
    found = (_legal(space, change) for change in (*inside, *rings))
    return tuple(dict.fromkeys(schedule for schedule in found if schedule))


def unfused(space: Space) -> tuple[Knobs, ...]:
    """The default without fusion; none for a deterministic kernel, because torch's sums have no fixed order."""
    if space.spec.operation == "plain" or space.spec.deterministic:
        return ()
    schedule = space.schedule({"fuse": False})
    return (schedule,) if space.broken_limit(schedule) is None else ()
