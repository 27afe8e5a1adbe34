"""The plan of a channelwise product's kernel: path groups, work units, writers of each output, memory needs.

``kernelgen.kernels.product.plan`` makes it and checks legality; emitters read it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelgen.arithmetic.couplings import EdgeValue, edge_slots, path_terms
from kernelgen.errors import ScheduleError
from kernelgen.kernels.product.schedule import LONG_RUN, CudaSchedule
from kernelgen.kernels.spec import BYTES, Spec
from kernelgen.problem.product import TensorProductProblem


@dataclass(frozen=True)
class Plan:
    """``zeroed`` outputs must be zero before the kernel adds to them; only one group writes an ``exclusive_*`` block.

    joins_y: the teams of a block, one a unit, share a run of edges and sum their parts of dF/dy in shared memory.
    """

    spec: Spec
    groups: tuple[Group, ...]
    exclusive_in1: frozenset[int]
    exclusive_out: frozenset[int]
    zeroed: frozenset[str]
    shared_bytes: int = 0
    joins_y: bool = False

    @property
    def owner(self) -> str:
        """``receiver`` or ``sender`` if one worker takes all edges with that node; else empty."""
        owned = self.spec.operation == "conv" and self.spec.schedule.accumulate == "registers"
        return self.spec.schedule.order if owned else ""

    @property
    def near(self) -> str:
        """The side whose rows a worker keeps from edge to edge: ``in1``, ``out``, or empty for a plain product."""
        if self.spec.operation == "plain":
            return ""
        return "in1" if self.owner == "sender" else "out"

    @property
    def node_sums(self) -> str:
        """The output, ``x`` or ``g``, whose rows are each written once, by the node's owner; empty for none."""
        owned = {"receiver": "g", "sender": "x"}.get(self.owner, "")
        return owned if owned and owned in self.spec.direction.live_outputs else ""

    @property
    def stage(self) -> int:
        """CUDA: edges that a team fetches at a time, limited by the length of its run (at least 4)."""
        schedule = self.spec.cuda
        return schedule.stage_edges if self.owner else min(schedule.stage_edges, max(4, schedule.edges_per_chunk))

    @property
    def fills_waves(self) -> bool:
        """CUDA: whether workers take runs whose number, not length, is fixed: by the launch."""
        schedule = self.spec.schedule
        adds = self.spec.operation == "conv" and schedule.accumulate == "atomics"
        return adds and isinstance(schedule, CudaSchedule) and schedule.runs == "waves"

    @property
    def stores_whole_rows(self) -> bool:
        """CUDA: whether a run stores the rows of receivers whose edges it has all, and adds to the others alone."""
        return isinstance(self.spec.schedule, CudaSchedule) and self.spec.schedule.zeros == "cut"

    def sums_of(self, group: Group) -> int:
        """CUDA: elements of :attr:`node_sums` that a team of this group holds."""
        problem = self.spec.problem
        rows = {"x": [problem.in1[b].dim for b in group.in1], "g": [problem.out[b].dim for b in group.out], "": []}
        return sum(rows[self.node_sums]) * self.tile

    @property
    def partial_y(self) -> int:
        """Rows of partial sums of dF/dy for each edge, one a unit (0: one complete row).

        If more than two units added to one row, the sum would depend on their order.
        """
        split = isinstance(self.spec.schedule, CudaSchedule) and self.units > 2 and not self.joins_y
        return self.units if self.spec.deterministic and split and "y" in self.spec.direction.live_outputs else 0

    @property
    def lanes(self) -> int:
        """CUDA: lanes of a team."""
        return self.spec.cuda.lanes

    @property
    def tile(self) -> int:
        """CUDA: channels of a team."""
        return self.lanes * self.spec.cuda.channels_per_thread

    @property
    def weight_operands(self) -> tuple[str, ...]:
        """Buffers of weights that the kernel reads."""
        return tuple(name for name in ("w", "tw") if name in self.spec.direction.operands)

    @property
    def ring(self) -> int:
        """CUDA: edges whose weights a team keeps in shared memory; 0 if they are loaded to registers."""
        prefetch = self.spec.cuda.prefetch
        return int(prefetch[4:]) if prefetch.startswith("ring") and self.weight_operands else 0

    def tiles(self, group: Group) -> int:
        """CUDA: teams that share the channels of a group."""
        return -(-group.mul // self.tile)

    @property
    def units(self) -> int:
        """CUDA: (group, tile) pairs, each a team's share of one run of edges."""
        return units_of(self.groups, self.tile)

    # Elements of shared memory of a team (CUDA).

    @property
    def value_elements(self) -> int:
        """For the edge values of its fetched edges."""
        if self.spec.cuda.edge_operand == "inline":
            return 0
        return max((stage_stride(self, group.paths) for group in self.groups), default=0) * self.stage

    def ring_row(self, group: Group) -> int:
        """For its weights of one edge."""
        return len(self.weight_operands) * len(group.paths) * self.tile

    @property
    def exchange_start(self) -> int:
        """Before those of :attr:`exchange_elements`: edge values that it fetched, and the ring of weights."""
        rows = max((self.ring_row(group) for group in self.groups), default=0) if self.ring else 0
        return self.value_elements + self.ring * rows

    @property
    def exchange_elements(self) -> int:
        """In which it exchanges the channels of a block that it writes."""
        problem, live = self.spec.problem, self.spec.direction.live_outputs
        written = [problem.in1[p.in1].dim for p in problem.paths if "x" in live]
        written += [problem.out[p.out].dim for p in problem.paths if "g" in live]
        widest = max((dim for dim in written if dim > 1), default=0)
        return widest * self.tile if self.spec.cuda.writes == "rows" else 0

    @property
    def stage_elements(self) -> int:
        return self.exchange_start + self.exchange_elements

    @property
    def sums_elements(self) -> int:
        """For its sums of a node that several teams share."""
        return 0 if self.spec.cuda.teams_per_node == 1 else max(map(self.sums_of, self.groups), default=0)

    @property
    def joint_elements(self) -> int:
        """For its parts of dF/dy of its fetched edges."""
        return self.stage * self.spec.dim_y if self.joins_y else 0


def why_no_row_is_whole(plan: Plan) -> str:
    """CUDA: why runs of edges may not store the rows that are theirs alone (``zeros="cut"``); empty if they may."""
    spec, used = plan.spec, {path.out for path in plan.spec.problem.paths}
    if spec.direction.outputs != "g":
        return f"is for kernels that sum values at receivers and nothing else, not for {spec.direction.text}"
    if not (spec.takes_runs and spec.schedule.has_long_runs):
        return f"is for convolutions with accumulate='atomics' and edges_per_chunk of at least {LONG_RUN}"
    if plan.exclusive_out & used != set(range(len(spec.problem.out))):
        groups = f"path_groups={len(plan.groups)}"
        return f"stores whole rows, and with {groups} some block of the result is written by several groups or by none"
    return ""


def units_of(groups: Iterable[Group], tile: int) -> int:
    """CUDA: teams of ``tile`` channels that share one run of edges."""
    return sum(-(-group.mul // tile) for group in groups)


def block_of_an_edge(groups: Iterable[Group], schedule: CudaSchedule) -> dict[str, Any]:
    """Knobs that make the teams that share a run of edges one block, so that they can sum in shared memory.

    Empty if one team does all of an edge, if a team is not a whole warp, or if the teams do not fit into a block.
    """
    units = units_of(groups, schedule.lanes * schedule.channels_per_thread)
    knobs = {"warps_per_edge": units, "block_size": units * schedule.lanes, "teams_per_node": 1}
    fits = all(value in schedule.choices[knob] for knob, value in knobs.items())
    return knobs if units > 1 and fits and schedule.edges_per_warp == 1 else {}


def registers_of(plan: Plan) -> int:
    """CUDA: estimate of the 32-bit registers a thread of the widest group holds: sums, operands, edge rows."""
    spec, schedule = plan.spec, plan.spec.cuda
    problem, operands, live = spec.problem, spec.direction.operands, spec.direction.live_outputs
    widest = 0
    for group in plan.groups:
        rows = sum(problem.in1[b].dim for b in group.in1)
        outs = sum(problem.out[b].dim for b in group.out)
        read_in = rows * (("x" in operands) + ("tx" in operands))
        read_out = outs * (("g" in operands) + ("tg" in operands))
        held = outs * ("g" in live) + rows * ("x" in live)
        held += len(group.paths) if problem.shared_weights and "w" in live else 0
        staged = 0 if plan.ring else len(group.paths) * len(plan.weight_operands)
        for read, near in ((read_in, plan.near == "in1"), (read_out, plan.near == "out")):
            held, staged = held + read * near, staged + read * (not near)
        channels = schedule.channels_per_thread * (held + staged * (2 if schedule.prefetch == "copy" else 1))
        row = problem.dim_in2 * ("y" in live)
        if schedule.edge_operand == "inline":
            row += problem.dim_in2 * (("y" in operands) + ("ty" in operands))
        elif schedule.edge_operand == "basis":
            row += len(_staged_values(problem, group.paths, "basis")) * (("y" in operands) + ("ty" in operands))
        widest = max(widest, channels + row)
    return widest * BYTES[spec.dtype] // 4 + 24


def stage_stride(plan: Plan, paths: tuple[int, ...]) -> int:
    """Shared-memory elements of one staged edge: edge values of paths, padded to an odd multiple of 16 bytes."""
    operands = plan.spec.direction.operands
    values = _staged_values(plan.spec.problem, paths, plan.spec.cuda.edge_operand)
    return padded_stride(len(values) * (("y" in operands) + ("ty" in operands)), plan.spec.dtype)


def padded_stride(values: int, dtype: str) -> int:
    """Elements of rows in shared memory that lanes read: an odd multiple of 16 bytes."""
    width = 16 // BYTES[dtype]
    vectors = -(-values // width)
    return width * (vectors + 1 - vectors % 2)


@functools.lru_cache(maxsize=4096)
def _staged_values(problem: TensorProductProblem, paths: tuple[int, ...], edge_operand: str) -> tuple[EdgeValue, ...]:
    terms = path_terms(problem)
    return edge_slots([terms[p] for p in paths], edge_operand == "basis")[0]


# Partitions the paths of a problem into groups, each with its own accumulators.


@dataclass(frozen=True)
class Group:
    """Paths of equal multiplicity that one worker computes together."""

    paths: tuple[int, ...]
    in1: tuple[int, ...]
    out: tuple[int, ...]
    mul: int


def _accumulators(problem: TensorProductProblem, paths: tuple[int, ...]) -> int:
    return sum(problem.out[out].dim for out in {problem.paths[p].out for p in paths})


def _split(problem: TensorProductProblem, paths: tuple[int, ...]) -> list[tuple[int, ...]]:
    half: list[int] = []
    total, size = _accumulators(problem, paths), 0
    for path in paths[:-1]:
        if half and size >= total / 2:
            break
        half.append(path)
        size += problem.out[problem.paths[path].out].dim
    return [tuple(half), paths[len(half) :]]


@functools.lru_cache(maxsize=1024)
def group_paths(problem: TensorProductProblem, count: int) -> tuple[Group, ...]:
    """Partition the paths into ``count`` groups; paths of one input block stay together if possible.

    Raises ScheduleError unless ``count`` lies between the number of distinct multiplicities and the number of paths.
    """
    by_block = itertools.groupby(sorted(problem.paths, key=lambda p: (p.in1, p.index)), key=lambda p: p.in1)
    parts = [tuple(path.index for path in paths) for _, paths in by_block]
    least = len({path.mul for path in problem.paths})
    if not least <= count <= max(1, len(problem.paths)):
        raise ScheduleError(
            f"path_groups={count}: this problem allows {least} (one a multiplicity) "
            f"to {len(problem.paths)} (one a path)"
        )

    def mul(paths: tuple[int, ...]) -> int:
        return problem.paths[paths[0]].mul

    while len(parts) > count:
        pairs = [(a, b) for a, b in itertools.combinations(parts, 2) if mul(a) == mul(b)]
        first, second = min(pairs, key=lambda pair: sum(_accumulators(problem, part) for part in pair))
        parts[parts.index(first)] = first + second
        parts.remove(second)
    while len(parts) < count:
        largest = max((part for part in parts if len(part) > 1), key=lambda part: _accumulators(problem, part))
        position = parts.index(largest)
        parts[position : position + 1] = _split(problem, largest)
    return tuple(
        Group(
            part,
            tuple(dict.fromkeys(problem.paths[p].in1 for p in part)),
            tuple(dict.fromkeys(problem.paths[p].out for p in part)),
            mul(part),
        )
        for part in parts
    )


# Lists the row pieces that a team prefetches to the L2 cache, from a plan and a path group.
#
# A :class:`RowSpan` is a piece of a row that holds only channels of the team. DRAM has about three times the latency of
# L2, and a prefetch in flight holds no register.


@dataclass(frozen=True)
class RowSpan:
    """``length`` elements of a row of ``slot`` (w, x or g), from ``start + step * (the team's first channel)``."""

    slot: str
    start: int
    length: int
    step: int = 0


def row_spans(plan: Plan, group: Group) -> list[RowSpan]:
    """The pieces of an edge's rows that a team of this group loads and the schedule prefetches."""
    schedule, slots = plan.spec.cuda, {name[-1] for name in plan.spec.direction.operands}
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
