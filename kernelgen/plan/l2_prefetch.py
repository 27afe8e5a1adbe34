"""Lists the row pieces that a team prefetches to the L2 cache, from a plan and a path group.

A :class:`RowSpan` is a piece of a row that holds only channels of the team. DRAM has about three times the latency of
L2, and a prefetch in flight holds no register.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernelgen.plan.path_groups import Group
from kernelgen.schedule.tensor_product import CudaSchedule

if TYPE_CHECKING:
    from kernelgen.plan.channelwise import Plan


@dataclass(frozen=True)
class RowSpan:
    """``length`` elements of a row of ``slot`` (w, x or g), from ``start + step * (the team's first channel)``."""

    slot: str
    start: int
    length: int
    step: int = 0


def row_spans(plan: Plan, group: Group) -> list[RowSpan]:
    """The pieces of an edge's rows that a team of this group loads and the schedule prefetches."""
    schedule, slots = plan.spec.schedule, {name[-1] for name in plan.spec.direction.operands}
    assert isinstance(schedule, CudaSchedule)
    found: list[RowSpan] = []
    for span in _wanted(plan, group, schedule.ahead):
        last = found[-1] if found else None
        if span.slot not in slots:
            continue
        if last and last.slot == span.slot and not span.step and last.start + last.length == span.start:
            found[-1] = RowSpan(span.slot, last.start, last.length + span.length)
        else:
            found.append(span)
    return found


def _wanted(plan: Plan, group: Group, ahead: str) -> Iterator[RowSpan]:
    problem, tiled = plan.spec.problem, plan.tiles(group) > 1
    tile = plan.tile if tiled else group.mul
    if ahead in ("weights", "rows") and not problem.shared_weights:
        for path in sorted(problem.paths[p].weight_offset for p in group.paths):
            yield RowSpan("w", path, tile, int(tiled))
    if ahead != "rows":
        return
    for slot, side, blocks in (("x", "in1", group.in1), ("g", "out", group.out)):
        if side == plan.near:
            continue
        for b in sorted(blocks):
            block = getattr(problem, side)[b]
            if not tiled:
                yield RowSpan(slot, block.offset, block.dim * block.mul)
            elif plan.spec.layout == "mul_ir":
                yield RowSpan(slot, block.offset, block.dim * tile, block.dim)
            else:
                yield from (RowSpan(slot, block.offset + m * block.mul, tile, 1) for m in range(block.dim))


def broken_span(plan: Plan, group: Group) -> str:
    """Why the spans of a group cannot be prefetched; empty if they can.

    A pass that wants some outputs alone runs by the schedule of its whole direction, and may read no weights; then
    there is nothing to prefetch.
    """
    spans = row_spans(plan, group)
    if not spans:
        reads_weights = any(name[-1] == "w" for name in plan.spec.direction.operands)
        return "there are no such rows" if reads_weights else ""
    if group.mul % plan.tile and any(span.step for span in spans):
        return f"{group.mul} channels are no multiple of the {plan.tile} of a team"
    return ""
