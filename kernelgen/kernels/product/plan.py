"""Makes the plan of a tensor product's spec (problem, direction, schedule, device) and checks every limit.

Also the default schedules, by simple rules.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError, UnsupportedError
from kernelgen.kernels.knobs import power_of_two_at_most
from kernelgen.kernels.pairs.channels import ChannelPlan, channel_plan, channels_of
from kernelgen.kernels.pairs.plan import PairPlan, pair_paths, pair_plan
from kernelgen.kernels.product.channelwise import (
    Group,
    Plan,
    block_of_an_edge,
    broken_span,
    group_paths,
    registers_of,
    row_spans,
    why_no_row_is_whole,
)
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule, Schedule
from kernelgen.kernels.spec import BYTES, ORDER_OF_BLOCKS, Spec, with_knobs

MAX_REGISTERS = 255
# An estimate of registers may exceed the limit by this factor, because estimates are rough; more would spill.
REGISTER_SLACK = 1.5


@dataclass(frozen=True)
class OwnersPlan:
    """Two kernels in one launch: the first blocks own senders and write dF/dx, the others write the other gradients."""

    spec: Spec
    of_x: Plan
    others: Plan
    owner: str = "sender"
    partial_y: int = 0

    @property
    def zeroed(self) -> frozenset[str]:
        return self.of_x.zeroed | self.others.zeroed

    @property
    def shared_bytes(self) -> int:
        return max(self.of_x.shared_bytes, self.others.shared_bytes)


ProductPlan = Plan | PairPlan | ChannelPlan | OwnersPlan


def product_plan(spec: Spec) -> ProductPlan:
    """The plan of a spec, or ScheduleError with the broken limit.

    A kernel that needs no zeroed output gets ``zeros="apart"`` in the plan's own schedule, and one that writes no rows
    of several components ``writes="lanes"``.
    """
    if isinstance(spec.schedule, HostSchedule):
        spec.facts.check_cores(spec.schedule.threads)
    if spec.deterministic and spec.problem.shared_weights and "w" in spec.direction.live_outputs:
        raise UnsupportedError(
            "gradients of shared weights sum over all edges in no fixed order; expand the weights to one row an edge "
            "for a deterministic gradient"
        )
    if not spec.problem.is_channelwise:
        plan: ProductPlan = channel_plan(spec) if channels_of(spec) else pair_plan(spec)
    else:
        plan = _owners_plan(spec) if spec.schedule.accumulate == "owners" else _channel_plan(spec)
    if isinstance(spec.schedule, CudaSchedule):
        return _check_zeros(plan, spec.schedule)
    return plan


def _check_zeros(plan: ProductPlan, schedule: CudaSchedule) -> ProductPlan:
    if schedule.zeros == "apart":
        return plan
    if plan.spec.facts.is_hip:
        raise ScheduleError(f"zeros={schedule.zeros!r} {ORDER_OF_BLOCKS}")
    if not isinstance(plan, Plan):
        raise ScheduleError(
            f"zeros={schedule.zeros!r} begins while zeros are written, and this kernel does not wait for those"
        )
    if schedule.zeros == "cut" and (why := why_no_row_is_whole(plan)):
        raise ScheduleError(f"zeros='cut' {why}")
    return plan if plan.zeroed else with_knobs(plan, zeros="apart")


def _owners_plan(spec: Spec) -> Plan | OwnersPlan:
    """The plan of ``accumulate="owners"``; a plan of one kernel if the other would have no output."""
    direction, schedule = spec.direction, spec.cuda
    live = direction.live_outputs
    if "g" in live:
        raise ScheduleError(f"accumulate='owners' is for gradients of the inputs, not for {direction.text}")
    split = spec.operation == "conv" and "x" in live
    rest = live.replace("x", "") if split else live
    others = None
    if rest:
        others = _channel_plan(dataclasses.replace(spec, direction=dataclasses.replace(direction, outputs=rest)))
        if "y" in rest and others.units > 1 and not others.joins_y:
            raise ScheduleError(
                f"accumulate='owners' with edges_per_warp={schedule.edges_per_warp}, block_size={schedule.block_size}, "
                f"warps_per_edge={schedule.warps_per_edge}: a block must be the {others.units} warps that share an edge"
            )
    if not split:
        assert others is not None
        return others
    groups = next(n for n in range(schedule.path_groups, 0, -1) if _are_exclusive(group_paths(spec.problem, n)))
    teams = min(16, schedule.block_size // schedule.lanes)
    owning = dataclasses.replace(schedule, accumulate="registers", order="sender", path_groups=groups)
    owning = dataclasses.replace(owning, warps_per_edge=1, teams_per_node=teams)
    of_x = _channel_plan(
        dataclasses.replace(spec, schedule=owning, direction=dataclasses.replace(direction, outputs="x"))
    )
    return of_x if others is None else OwnersPlan(spec, of_x, others)


def _are_exclusive(groups: tuple[Group, ...]) -> bool:
    """Whether each block of x belongs to one group; always true for one group a multiplicity."""
    blocks = [block for group in groups for block in group.in1]
    return len(blocks) == len(set(blocks))


def _of_one_group(count: int, blocks_of: Iterable[tuple[int, ...]]) -> frozenset[int]:
    """The blocks below ``count`` that at most one group has."""
    met = Counter(itertools.chain.from_iterable(blocks_of))
    return frozenset(block for block in range(count) if met[block] <= 1)


def _channel_plan(spec: Spec) -> Plan:
    problem, schedule = spec.problem, spec.schedule
    groups = group_paths(problem, schedule.path_groups) if problem.paths else ()
    exclusive_in1 = _of_one_group(len(problem.in1), (group.in1 for group in groups))
    exclusive_out = _of_one_group(len(problem.out), (group.out for group in groups))
    plan = Plan(spec, groups, exclusive_in1, exclusive_out, frozenset())
    plan = dataclasses.replace(plan, joins_y=_joins_y(plan))
    if spec.deterministic:
        _check_deterministic(plan)
    if isinstance(schedule, CudaSchedule):
        plan = _check_cuda(plan, schedule)
    return dataclasses.replace(plan, zeroed=_zeroed(plan))


def _joins_y(plan: Plan) -> bool:
    """Whether each dF/dy must have one writer and the warps that share an edge form a block.

    A team must be a whole warp, because the groups' functions contain the block's barrier.
    """
    spec, schedule = plan.spec, plan.spec.schedule
    alone = spec.deterministic or schedule.accumulate == "owners"
    if not (alone and isinstance(schedule, CudaSchedule) and "y" in spec.direction.live_outputs):
        return False
    whole = plan.units == schedule.warps_per_edge and schedule.block_size == schedule.lanes * plan.units
    return whole and schedule.edges_per_warp == schedule.teams_per_node == 1 and plan.units > 1


def _zeroed(plan: Plan) -> frozenset[str]:
    """Outputs to which several workers add, or with elements that no worker writes."""
    problem, spec = plan.spec.problem, plan.spec
    live = spec.direction.live_outputs
    zeroed = {f"out_{slot}" for slot in spec.direction.outputs if slot not in live}
    read_in1, used_out = {p.in1 for p in problem.paths}, {p.out for p in problem.paths}
    sums_x = spec.operation == "conv" and plan.owner != "sender"
    if sums_x or len(read_in1) < len(problem.in1) or len(plan.exclusive_in1) < len(problem.in1):
        zeroed.add("out_x")
    sums_out = spec.operation == "conv" and plan.owner != "receiver"
    if sums_out or len(used_out) < len(problem.out) or len(plan.exclusive_out) < len(problem.out):
        zeroed.add("out_g")
    single_unit = isinstance(spec.schedule, CudaSchedule) and plan.units == 1
    covers_y = spec.harmonics is not None or {p.in2 for p in problem.paths} == set(range(len(problem.in2)))
    if not (single_unit and covers_y) and not plan.partial_y and not plan.joins_y:
        zeroed.add("out_y")
    if problem.shared_weights:
        zeroed.add("out_w")
    return frozenset(name for name in zeroed if name[4:] in spec.direction.outputs)


def _check_deterministic(plan: Plan) -> None:
    """Check that each output element has one writer, or two that add to zero (a + b = b + a).

    And that gradients of y have no rows of partial sums if the teams that share an edge could be a block.
    """
    spec, live = plan.spec, plan.spec.direction.live_outputs
    if spec.operation == "plain":
        owned = "xg" if spec.schedule.fuse else ""
    else:
        owned = {"receiver": "g", "sender": "x"}.get(plan.owner, "")
    for slot in sorted(set(live) & set("xg") - set(owned)):
        raise ScheduleError(
            f"accumulate={spec.schedule.accumulate!r}, order={spec.schedule.order!r} sums {slot} in no fixed order; "
            f"a deterministic kernel owns the {'senders' if slot == 'x' else 'receivers'}"
        )
    for slot, side in (("x", "in1"), ("g", "out")):
        writers = Counter(block for group in plan.groups for block in getattr(group, side))
        # On the host one worker runs all groups of an edge, one after the other.
        if isinstance(spec.schedule, CudaSchedule) and slot in live and max(writers.values(), default=0) > 2:
            raise ScheduleError(
                f"path_groups={spec.schedule.path_groups}: {max(writers.values())} groups add to one block of {slot}; "
                "a deterministic kernel allows two"
            )
    # Rows of partial sums need extra memory.
    schedule = spec.schedule
    if isinstance(schedule, CudaSchedule) and plan.partial_y and (block := block_of_an_edge(plan.groups, schedule)):
        wanted = ", ".join(f"{knob}={value}" for knob, value in block.items())
        raise ScheduleError(f"a deterministic gradient of y sums in shared memory where it can: expected {wanted}")


def estimate_registers(plan: ProductPlan) -> int:
    """CUDA: estimate of a thread's 32-bit registers; 0 for pairs, which nothing is planned by."""
    if isinstance(plan, OwnersPlan):
        return max(registers_of(plan.of_x), registers_of(plan.others))
    return 0 if isinstance(plan, PairPlan | ChannelPlan) else registers_of(plan)


def bytes_ahead(plan: ProductPlan) -> int:
    """What all teams that a GPU holds at once prefetch to L2 for the edges they are at, in bytes; 0 without prefetch.

    Of 105 kernels with this prefetch that won on an H200, 100 ask for at most 0.75 times its L2. Arrays that are
    prefetched as a whole (``ahead="all"``, on small graphs) do not count.
    """
    schedule, facts = plan.spec.schedule, plan.spec.facts
    if not (isinstance(plan, Plan) and isinstance(schedule, CudaSchedule) and schedule.ahead in ("weights", "rows")):
        return 0
    registers = min(MAX_REGISTERS + 1, 8 * -(-registers_of(plan) // 8))
    blocks = min(facts.max_threads_per_unit, facts.registers_per_unit // registers) // schedule.block_size
    if plan.shared_bytes:
        blocks = min(blocks, facts.shared_per_unit // plan.shared_bytes)
    teams = facts.units * max(1, blocks) * schedule.block_size // schedule.lanes
    edge = max(sum(span.length for span in row_spans(plan, group)) for group in plan.groups)
    return teams * schedule.stage_edges * edge * BYTES[plan.spec.dtype]


def _check_ring(plan: Plan, group: Group) -> None:
    """Check that each path's weights of a team's channels can be copied in pieces of 16 bytes."""
    problem, prefetch = plan.spec.problem, f"prefetch={plan.spec.cuda.prefetch!r}"
    if problem.shared_weights:
        raise ScheduleError(f"{prefetch} copies weights of edges, and all edges share these")
    if group.mul % plan.tile:
        raise ScheduleError(f"{prefetch}: {group.mul} channels are no multiple of the {plan.tile} of a team")
    starts = [problem.weight_numel, plan.tile, *(problem.paths[p].weight_offset for p in group.paths)]
    if any(start * BYTES[plan.spec.dtype] % 16 for start in starts):
        raise ScheduleError(f"{prefetch}: weights of some path do not start at a multiple of 16 bytes")


def _check_cuda(plan: Plan, schedule: CudaSchedule) -> Plan:
    spec, facts = plan.spec, plan.spec.facts
    if schedule.stage_edges > schedule.lanes:
        raise ScheduleError(f"stage_edges={schedule.stage_edges} exceeds the {schedule.lanes} lanes of a team")
    for group in plan.groups:
        if group.mul % schedule.channels_per_thread:
            raise ScheduleError(
                f"channels_per_thread={schedule.channels_per_thread} does not divide {group.mul} channels"
            )
        if plan.ring:
            _check_ring(plan, group)
        if schedule.ahead in ("weights", "rows") and (why := broken_span(plan, group)):
            raise ScheduleError(f"ahead={schedule.ahead!r} cannot be asked for: {why}")
    teams = schedule.block_size // schedule.lanes
    if schedule.warps_per_edge > min(teams, max(1, plan.units)):
        raise ScheduleError(
            f"warps_per_edge={schedule.warps_per_edge} exceeds the block's {teams} teams or the {plan.units} work units"
        )
    if schedule.teams_per_node > 1 and not plan.owner:
        raise ScheduleError(f"teams_per_node={schedule.teams_per_node} splits nodes, and here no worker owns a node")
    if schedule.teams_per_node * schedule.warps_per_edge > teams:
        raise ScheduleError(
            f"teams_per_node x warps_per_edge = {schedule.teams_per_node * schedule.warps_per_edge} exceeds the "
            f"block's {teams} teams"
        )
    threads = facts.check_threads(schedule.block_size, schedule.min_blocks)
    registers = registers_of(plan)
    limit = min(MAX_REGISTERS, facts.registers_per_unit // threads)
    if registers > REGISTER_SLACK * limit:
        raise ScheduleError(
            f"about {registers} registers a thread, {registers / limit:.1f} times the {limit} there are; "
            "use more path_groups, fewer channels_per_thread or no prefetch"
        )
    shared = teams * (plan.stage_elements + plan.sums_elements + plan.joint_elements) * BYTES[spec.dtype]
    if shared > facts.shared_per_block:
        raise ScheduleError(f"{shared} bytes of shared memory a block; there are {facts.shared_per_block}")
    if schedule.writes == "rows" and not plan.exchange_elements:
        plan = with_knobs(plan, writes="lanes")
    return dataclasses.replace(plan, shared_bytes=shared)


# Legal schedules for untuned products, by simple rules.
#
# A better default does not need a new generator version: what a kernel computes does not depend on it.

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
