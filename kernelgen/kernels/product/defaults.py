"""Chooses legal schedules for untuned products, by simple rules.

Those of other kinds are beside their planners.

A better default does not need a new generator version: what a kernel computes does not depend on this module.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError, UnsupportedError
from kernelgen.kernels.knobs import power_of_two_at_most
from kernelgen.kernels.pairs.plan import pair_paths
from kernelgen.kernels.product.channelwise import block_of_an_edge, group_paths
from kernelgen.kernels.product.plan import estimate_registers, product_plan
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule, Schedule
from kernelgen.kernels.spec import BYTES, Spec

# The limit of ``small_graph_edges`` on an H200, where it was found, and on a host.
SMALL_GRAPH_EDGES = 4096


def small_graph_edges(facts: DeviceFacts) -> int:
    """Graphs of at most this many edges leave most of a device idle, so each edge should have its own worker.

    On a GPU a worker is a warp, and with an edge each at least half of the warps that fit would be idle: so half of
    those, as the nearest power of two, since graphs are classed by powers of two. 4096 on an H200, 2048 on an A10.
    """
    return SMALL_GRAPH_EDGES if facts.backend != "cuda" else 1 << round(math.log2(max(2, facts.warps // 2)))


def easy_registers(facts: DeviceFacts) -> int:
    """Most estimated registers a thread with which three blocks of 128 threads fit on a multiprocessor.

    Registers are allocated by eights: 168 on every compute capability so far.
    """
    return facts.registers_per_unit // (3 * 128) // 8 * 8


def default_schedule(spec_without: Spec, num_edges: int | None = None) -> Schedule:
    """A legal schedule by simple rules, without a search; ``spec_without.schedule`` is replaced, not read.

    num_edges: typical number of edges of a graph; None for large graphs.
    """
    if not spec_without.problem.is_channelwise:
        return _default_of_pairs(spec_without)
    if spec_without.facts.backend == "cpu":
        return _default_host(spec_without)
    muls = {path.mul for path in spec_without.problem.paths}
    least, most = len(muls) or 1, max(1, len(spec_without.problem.paths))
    sketch = _cuda_sketch(spec_without, min(muls, default=1), num_edges)
    failure: ScheduleError | None = None
    fetching = itertools.product(_or_none(sketch.ahead), _or_none(sketch.prefetch))
    for (ahead, prefetch), groups in itertools.product(fetching, range(least, most + 1)):
        schedule = dataclasses.replace(sketch, path_groups=groups, prefetch=prefetch, ahead=ahead)
        if spec_without.deterministic and "y" in spec_without.direction.live_outputs:
            block = block_of_an_edge(group_paths(spec_without.problem, groups), schedule)
            schedule = dataclasses.replace(schedule, **block)
        try:
            plan = product_plan(dataclasses.replace(spec_without, schedule=schedule))
        except ScheduleError as error:
            failure = error
            continue
        if estimate_registers(plan) <= easy_registers(spec_without.facts) or (groups == most and prefetch == "none"):
            assert isinstance(plan.spec.schedule, Schedule)
            return plan.spec.schedule  # without knobs that have no effect on this kernel
    raise failure or ScheduleError("no default schedule is legal")


def _or_none(choice: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((choice, "none")))


def _cuda_sketch(spec: Spec, fewest_channels: int, num_edges: int | None) -> CudaSchedule:
    """All but the path groups: teams as wide as the channels; long runs of edges on large graphs, short on small ones.

    The way to fetch rows is within 5% of the best of five, measured with six problems on an H200.
    """
    edges_per_warp = min(8, 32 // power_of_two_at_most(min(32, 2 * fewest_channels - 1)))
    lanes, live = 32 // edges_per_warp, spec.direction.live_outputs
    long = CudaSchedule(
        order=_default_order(spec),
        edges_per_warp=edges_per_warp,
        edge_operand="shared",
        stage_edges=min(8, lanes),
        prefetch="reload",
        ahead="weights",
    )
    if spec.operation == "plain" and live == "g":
        return dataclasses.replace(long, edges_per_chunk=2, stage_edges=4, block_size=64)
    if spec.operation == "plain":
        return dataclasses.replace(long, stage_edges=min(32, lanes), prefetch="copy", ahead="none")
    if num_edges is None or num_edges > small_graph_edges(spec.facts):
        # Lanes that add their own channels of mul_ir to rows of x touch up to 2l+1 times the sectors.
        return long.for_layout(spec.layout) if "x" in live and not spec.direction.tangents else long
    small = dataclasses.replace(long, ahead="all")
    if spec.deterministic or live == "g":
        return dataclasses.replace(small, teams_per_node=8, block_size=256)
    added = dataclasses.replace(
        small, accumulate="atomics", edges_per_chunk=1, stage_edges=4, prefetch="none", block_size=64
    )
    inside = "g" not in live and not spec.facts.is_hip
    return dataclasses.replace(added, zeros="inside") if inside else added


def _default_of_pairs(spec: Spec) -> Schedule:
    """Edge by edge, with as many teams a block as fit into shared memory.

    If every path has one pair, a team has eight lanes. For tetris-poly-1 this takes a third of the instructions of a
    warp an edge forward, and a quarter backward.
    """
    if spec.facts.backend == "cpu":
        return HostSchedule(accumulate="atomics")
    failure: ScheduleError | None = None
    edges_per_warp = 4 if all(path.pairs == 1 for path in pair_paths(spec.problem)) else 1
    for block_size in (128, 64, 32):
        schedule = CudaSchedule(accumulate="atomics", block_size=block_size, edges_per_warp=edges_per_warp)
        try:
            product_plan(dataclasses.replace(spec, schedule=schedule))
            return schedule
        except ScheduleError as error:
            failure = error
    raise UnsupportedError(f"one edge of this product does not fit a multiprocessor's shared memory: {failure}")


def _default_order(spec: Spec) -> str:
    """By receiver, unless a deterministic kernel computes gradients of x alone."""
    return "sender" if spec.deterministic and spec.direction.live_outputs == "x" else "receiver"


def _default_host(spec: Spec) -> HostSchedule:
    lanes = spec.facts.vector_bytes // BYTES[spec.dtype]
    widest = max((path.mul for path in spec.problem.paths), default=1)
    block = max(4, min(64, lanes, power_of_two_at_most(widest)))
    return HostSchedule(order=_default_order(spec), path_groups=max(1, len(spec.problem.paths)), channel_block=block)
