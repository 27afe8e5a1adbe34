"""Schedules that are worth one measurement each, beside what a sampler proposes: a space enters, its probes leave.

``fuse`` is no knob of a search. In 15 studies (H200, and a CPU of two cores) the fastest of the unfused schedules, a
seventh of all trials and half of the first fifty, took 4 to 29 times as long as the fastest fused one: torch's gather
and scatter around the kernel decide, whatever its other knobs. So unfused stands beside the space as one probe, the
default schedule without fusion, which keeps the claim under test on every problem and graph. Kernels of pairs add to
the rows of nodes in memory in any case: there it takes 1.0 to 1.5 times as long, and the probe may win.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelgen.plan import estimate_registers
from kernelgen.schedule import Knobs

if TYPE_CHECKING:
    from autotune.space import Space

# Estimated registers of a thread up to which a tiling is taken into the probes: two blocks of 128 threads fit.
TILING_REGISTERS = 200


def probes_of(space: Space) -> tuple[Knobs, ...]:
    """Of a kernel of a channelwise product."""
    return (*_tilings(space), *_whole_rows(space), *unfused(space))


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
            if not all(value in space.knobs[knob] for knob, value in values.items()):
                break
            schedule = space.schedule({**values, "path_groups": groups, "prefetch": "none", "stage_edges": 8})
            if space.broken_limit(schedule) is None and estimate_registers(space.plan(schedule)) <= TILING_REGISTERS:
                found.append(schedule)
                break
    return tuple(found)


def _whole_rows(space: Space) -> tuple[Knobs, ...]:
    """The default with teams so wide that a deterministic gradient of y takes no partial rows, hence no more memory."""
    direction = space.spec.direction
    if space.spec.facts.backend != "cuda" or not space.spec.deterministic or "y" not in direction.live_outputs:
        return ()
    found = []
    for channels in space.knobs["channels_per_thread"]:
        values = {"edges_per_warp": 1, "channels_per_thread": channels, "path_groups": space.knobs["path_groups"][0]}
        schedule = space.schedule({**values, "prefetch": "none"})
        if space.broken_limit(schedule) is None and not space.plan(schedule).partial_y:
            found.append(schedule)
    return tuple(found)


def unfused(space: Space) -> tuple[Knobs, ...]:
    """The default without fusion; torch's sums at nodes are in no fixed order, so never of a deterministic kernel."""
    if space.spec.operation == "plain" or space.spec.deterministic:
        return ()
    schedule = space.schedule({"fuse": False})
    return (schedule,) if space.broken_limit(schedule) is None else ()
