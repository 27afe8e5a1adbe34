"""Moves the schedule of one kernel of a product to another kernel: nearest choices, then the canonical form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.channelwise import block_of_an_edge, group_paths
from kernelgen.kernels.product.schedule import CudaSchedule, Schedule
from kernelgen.kernels.spec import Spec


def nearest_values(knobs: Mapping[str, tuple], default: Knobs, schedule: Knobs) -> dict[str, Any]:
    """The choice of every knob that is nearest to a schedule's; the default's where none is near."""
    values = {}
    for knob, choices in knobs.items():
        value = getattr(schedule, knob)
        if value not in choices and isinstance(value, int):
            value = min(choices, key=lambda choice: abs(math.log((choice + 1) / (value + 1))))
        values[knob] = value if value in choices else getattr(default, knob)
    return values


def canonical_product(spec: Spec, schedule: Schedule) -> Schedule:
    """Set knobs without effect on the kernel of a channelwise product to their default values."""
    changes: dict[str, Any] = {}
    fresh, plain = type(schedule)(), spec.operation == "plain"
    fused = schedule.fuse and not plain
    owned = fused and schedule.accumulate == "registers"
    block = _block_of_an_edge(spec, schedule) if fused or plain else {}
    if plain:
        changes["fuse"] = fresh.fuse
    if not (fused or block):
        changes["accumulate"] = fresh.accumulate
    if not owned:
        changes["order"] = fresh.order
    if isinstance(schedule, CudaSchedule):
        changes["stage_edges"] = min(schedule.stage_edges, schedule.lanes)
        if owned:
            changes["edges_per_chunk"] = fresh.edges_per_chunk
        else:
            changes["teams_per_node"] = 1
        if changes.get("teams_per_node", schedule.teams_per_node) == 1:
            changes["finish"] = "blocks"
        if not (fused or plain) or schedule.accumulate == "owners":
            changes["zeros"] = "apart"
        if schedule.zeros == "cut" and not (fused and schedule.has_long_runs):
            changes["zeros"] = "apart"
        if not fused or schedule.accumulate != "atomics":
            changes["runs"] = "fixed"
        if not set("xg") & set(spec.direction.live_outputs):
            changes["writes"] = "lanes"
        if fused and schedule.accumulate == "owners":
            changes["warps_per_edge"] = 1
        elif not owned:
            changes["stage_edges"] = min(changes["stage_edges"], max(4, schedule.edges_per_chunk))
    return dataclasses.replace(schedule, **changes | block)


def _block_of_an_edge(spec: Spec, schedule: Schedule) -> dict[str, int]:
    """If each gradient of y has one writer, make the teams that share an edge one block, where possible."""
    alone = spec.deterministic or schedule.accumulate == "owners"
    if not isinstance(schedule, CudaSchedule) or not alone or "y" not in spec.direction.live_outputs:
        return {}
    return block_of_an_edge(group_paths(spec.problem, schedule.path_groups), schedule)
