"""What a kernel's plan says of its work: memory traffic, atomic additions, registers, occupancy, waves, code.

All are relative to the problem or to the device, so that a model learns them on other problems than it is asked about.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kernelgen.arithmetic.couplings import path_terms
from kernelgen.kernels.product.channelwise import Plan, group_paths, registers_of
from kernelgen.kernels.product.plan import MAX_REGISTERS, OwnersPlan
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import BYTES
from kernelgen.problem.product import TensorProductProblem

NAMES = (
    *("registers", "pressure", "spilled", "blocks_held", "warps_held", "warps_busy", "waves", "tail"),
    *(
        "traffic",
        "edge_bytes",
        "added",
        "added_bytes",
        "near_rows",
        "values_per_path",
        "values_per_product",
        "in_flight",
    ),
    *("sums", "weights_held", "useful_lanes", "products", "largest_share", "largest_group", "largest_paths"),
    *("intensity", "code_held", "code_of_group", "groups_held"),
)
# What the compiler took over the estimate, with spilled ones, mean of the logarithms of 12,176 kernels on an H200.
RELOADED, OTHERS = 1.34, 1.15
# Shared memory that each block reserves, and most blocks of a multiprocessor: CUDA C++ programming guide, table of
# technical specifications per compute capability.
RESERVED_BYTES, MOST_BLOCKS = 1024, 32
# Beyond so many waves the last one does not matter.
MANY_WAVES = 20


@dataclass(frozen=True)
class GroupSizes:
    """A path group in numbers. x, g: elements of its rows. products: with a coefficient each, of one channel."""

    x: int
    g: int
    mul: int
    paths: int
    values: int
    products: int


@functools.lru_cache(maxsize=1024)
def group_sizes(problem: TensorProductProblem, count: int) -> tuple[GroupSizes, ...]:
    """Of every group of a partition into ``count`` groups."""
    terms = path_terms(problem)
    return tuple(
        GroupSizes(
            sum(problem.in1[block].dim for block in group.in1),
            sum(problem.out[block].dim for block in group.out),
            group.mul,
            len(group.paths),
            sum(len(terms[path].values) for path in group.paths),
            sum(len(terms[path].entries) for path in group.paths),
        )
        for group in group_paths(problem, count)
    )


@dataclass(frozen=True)
class Occupancy:
    """registers: that a thread needs. limit: that it can have. blocks: that a multiprocessor holds at once."""

    registers: float
    limit: int
    blocks: int

    @classmethod
    def of(cls, plan: Plan, shared_bytes: int) -> Occupancy:
        schedule, facts = schedule_of(plan), plan.spec.facts
        needed = registers_of(plan) * (RELOADED if schedule.prefetch in ("reload", "ring2", "ring4") else OTHERS)
        threads = schedule.block_size * max(1, schedule.min_blocks)
        limit = min(MAX_REGISTERS, facts.registers_per_unit // threads)
        used = min(max(32, 8 * math.ceil(needed / 8)), limit if schedule.min_blocks else MAX_REGISTERS)
        blocks = min(facts.max_threads_per_unit, facts.registers_per_unit // used) // schedule.block_size
        if shared_bytes:
            blocks = min(blocks, facts.shared_per_unit // (shared_bytes + RESERVED_BYTES))
        return cls(needed, limit, max(1, min(MOST_BLOCKS, blocks)))


@dataclass(frozen=True)
class Traffic:
    """Elements an edge, by the plan and at least. near: of rows that a worker keeps for its run."""

    moved: float
    added: float
    near: float
    least: float

    @classmethod
    def of(cls, plan: Plan, groups: Sequence[GroupSizes], share: float) -> Traffic:
        """share: rows of the near side an edge, as one worker takes several edges of a node."""
        problem, direction = plan.spec.problem, plan.spec.direction
        live, read = direction.live_outputs, _reads(plan)
        in_rows, out_rows = sum(group.x * group.mul for group in groups), sum(group.g * group.mul for group in groups)
        of_in, of_out = (share if plan.near == side else 1.0 for side in ("in1", "out"))
        own_weights = 0 if problem.shared_weights else problem.weight_numel * read["w"]
        moved = float(own_weights) + problem.dim_in2 * plan.units * read["y"] + problem.weight_numel * ("w" in live)
        moved += in_rows * of_in * read["x"] + out_rows * of_out * read["g"]
        added = float(in_rows) * of_in * ("x" in live and plan.node_sums != "x")
        added += out_rows * of_out * ("g" in live and plan.node_sums != "g")
        added += problem.dim_in2 * plan.units * ("y" in live)
        least = float(problem.weight_numel) * (read["w"] + ("w" in live)) + problem.dim_in2
        least += problem.dim_in1 * (of_in * read["x"] + ("x" in live)) + problem.dim_out * of_out * read["g"]
        return cls(moved, added, share * (in_rows if plan.near == "in1" else out_rows), least)


def schedule_of(plan: Plan) -> CudaSchedule:
    assert isinstance(plan.spec.schedule, CudaSchedule)
    return plan.spec.schedule


def _reads(plan: Plan) -> dict[str, int]:
    """How many arrays of each slot the kernel reads: an input and its tangent."""
    operands = plan.spec.direction.operands
    return {slot: (slot in operands) + (f"t{slot}" in operands) for slot in "xywg"}


def log2(number: float) -> float:
    """At least of a thousandth."""
    return math.log2(max(number, 1e-3))


def work_of(plan: Plan | OwnersPlan, edges: float, nodes: float) -> list[float]:
    """The numbers of :data:`NAMES`; of a plan of two kernels, of the one for edges. nodes: that own edges."""
    shared_bytes, main = plan.shared_bytes, plan.others if isinstance(plan, OwnersPlan) else plan
    schedule, facts = schedule_of(main), main.spec.facts
    conv = main.spec.operation == "conv"
    owned = schedule.accumulate == "registers" and conv
    runs = nodes * schedule.teams_per_node if owned else edges / schedule.edges_per_chunk
    a_node = edges / nodes if conv else 1.0
    share = 1.0 / max(1.0, min(edges / max(1.0, runs), a_node))
    groups = group_sizes(main.spec.problem, len(main.groups))
    held, traffic = Occupancy.of(main, shared_bytes), Traffic.of(main, groups, share)
    size = BYTES[main.spec.dtype]
    blocks = max(1.0, runs * main.units * schedule.lanes / schedule.block_size)
    waves, warps = blocks / (facts.units * held.blocks), held.blocks * schedule.block_size / 32
    busy = min(warps, runs * main.units / schedule.edges_per_warp / facts.units)
    flight = warps * schedule.lanes * size * traffic.moved / max(1, main.units)
    return [
        *(log2(held.registers / MAX_REGISTERS), log2(held.registers / held.limit)),
        *(max(0.0, held.registers - held.limit) / 64, log2(held.blocks), log2(warps), log2(busy)),
        *(log2(waves), 1.0 if main.fills_waves else _tail(waves)),
        *(log2(traffic.moved / traffic.least), log2(traffic.moved * size), log2(1 + traffic.added / traffic.least)),
        *(log2(traffic.added * size), log2(1 + traffic.near / traffic.least)),
        *_arithmetic(main, groups, traffic, log2(flight / 1024)),
        *_code(main, groups, held, blocks / facts.units),
    ]


def _tail(waves: float) -> float:
    """Times as long as with a full last wave."""
    return math.ceil(waves) / waves if waves < MANY_WAVES else 1.0


def _arithmetic(plan: Plan, groups: Sequence[GroupSizes], traffic: Traffic, flight: float) -> list[float]:
    """From ``values_per_path`` to ``intensity``."""
    schedule, live, read = schedule_of(plan), plan.spec.direction.live_outputs, _reads(plan)
    size, paths = BYTES[plan.spec.dtype], len(plan.spec.problem.paths)
    tiles = [-(-group.mul // plan.tile) for group in groups]
    values = sum(group.values * tile for group, tile in zip(groups, tiles, strict=True))
    products = sum(group.products * tile for group, tile in zip(groups, tiles, strict=True))
    a_lane = schedule.channels_per_thread * products
    read_values = values * read["y"] if schedule.edge_operand != "inline" else 8.0 * a_lane
    results = len(live) + 2 * len(plan.spec.direction.tangents)
    of_x, of_g = "x" in live or plan.near == "in1", "g" in live or plan.near == "out"
    words, widest = schedule.channels_per_thread * size // 4, max(group.products for group in groups)
    most_paths = max(group.paths for group in groups)
    return [
        *(log2(values / paths), log2(read_values / max(1, a_lane)), flight),
        log2(max(group.x * of_x + group.g * of_g for group in groups) * words),
        log2(most_paths * read["w"] * words),
        sum(group.mul for group in groups) / (plan.units * plan.tile),
        *(log2(a_lane), log2(widest * schedule.channels_per_thread * plan.units / max(1, a_lane))),
        *(log2(widest * schedule.channels_per_thread), most_paths / paths),
        log2(a_lane * schedule.lanes * results / (traffic.least * size)),
    ]


def _code(plan: Plan, groups: Sequence[GroupSizes], held: Occupancy, blocks_each: float) -> list[float]:
    """Code that a multiprocessor executes at a time, as products: blocks side by side have other path groups.

    A multiprocessor's caches hold 128 kB of code. Backward of nequip-benzene (68 paths) takes 1.6 times as long with
    two blocks of four warps than with one block of eight, at the same registers and warps, where all do one group.
    """
    schedule, direction = schedule_of(plan), plan.spec.direction
    results = len(direction.live_outputs) + 2 * len(direction.tangents)
    a_product = schedule.channels_per_thread * (BYTES[plan.spec.dtype] // 4) * results
    code = [group.products * a_product for group in groups]
    number_of = [number for number, group in enumerate(groups) for _ in range(-(-group.mul // plan.tile))]
    shares = [
        set(number_of[start : start + schedule.warps_per_edge])
        for start in range(0, plan.units, schedule.warps_per_edge)
    ]
    a_block = sum(sum(code[number] for number in share) for share in shares) / len(shares)
    held_groups = held.blocks * sum(map(len, shares)) / len(shares)
    at_once = min(sum(code), min(held.blocks, max(1.0, blocks_each)) * a_block)
    return [log2(at_once), log2(sum(code) / len(code)), log2(min(len(groups), held_groups))]
