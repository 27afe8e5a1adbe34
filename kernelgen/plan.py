"""From (problem, direction, schedule) to a plan: path groups, work units, who writes what, and every limit.

This is the one place that decides legality: :func:`make_plan` raises ScheduleError naming the limit that is broken
and by how much. Emitters trust a plan.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kernelgen.ahead import broken_span
from kernelgen.errors import ScheduleError, UnsupportedError
from kernelgen.grouping import Group, group_paths
from kernelgen.pairs import PairPlan, pair_plan
from kernelgen.schedule import CudaSchedule, HostSchedule
from kernelgen.spec import BYTES, Spec
from kernelgen.terms import EdgeValue, edge_slots, path_terms

MAX_REGISTERS = 255
# A schedule may be estimated at this many times the registers of a thread: more only spills.
REGISTER_SLACK = 1.5


@dataclass(frozen=True)
class Plan:
    """``zeroed`` outputs must be zero before launch; ``exclusive_*`` blocks have a single writing group."""

    spec: Spec
    groups: tuple[Group, ...]
    exclusive_in1: frozenset[int]
    exclusive_out: frozenset[int]
    zeroed: frozenset[str]
    shared_bytes: int = 0

    @property
    def owner(self) -> str:
        """``receiver`` or ``sender`` where one worker takes all edges of a node (in that order); else empty."""
        owned = self.spec.operation == "conv" and self.spec.schedule.accumulate == "registers"
        return self.spec.schedule.order if owned else ""

    @property
    def near(self) -> str:
        """The side whose rows stay with a worker from edge to edge: ``in1``, ``out``, or empty for a plain product."""
        if self.spec.operation == "plain":
            return ""
        return "in1" if self.owner == "sender" else "out"

    @property
    def node_sums(self) -> str:
        """``x`` or ``g``: the output whose rows the workers that own nodes write, each row once; empty for none."""
        owned = {"receiver": "g", "sender": "x"}.get(self.owner, "")
        return owned if owned and owned in self.spec.direction.live_outputs else ""

    @property
    def stage(self) -> int:
        """CUDA: edges that a team fetches at a time; no more than about its run has."""
        schedule = self.spec.schedule
        assert isinstance(schedule, CudaSchedule)
        return schedule.stage_edges if self.owner else min(schedule.stage_edges, max(4, schedule.edges_per_chunk))

    def sums_of(self, group: Group) -> int:
        """CUDA: elements of :attr:`node_sums` that a team of a group holds."""
        problem = self.spec.problem
        rows = {"x": [problem.in1[b].dim for b in group.in1], "g": [problem.out[b].dim for b in group.out], "": []}
        return sum(rows[self.node_sums]) * self.tile

    @property
    def partial_y(self) -> int:
        """Partial sums of dF/dy that each edge gets, a row a unit (0: one row, complete).

        More than two units that add to one row would make it depend on their order.
        """
        split = isinstance(self.spec.schedule, CudaSchedule) and self.units > 2
        return self.units if self.spec.deterministic and split and "y" in self.spec.direction.live_outputs else 0

    @property
    def tile(self) -> int:
        """CUDA: channels of a team."""
        schedule = self.spec.schedule
        assert isinstance(schedule, CudaSchedule)
        return schedule.lanes * schedule.channels_per_thread

    def tiles(self, group: Group) -> int:
        """CUDA: teams that share the channels of a group."""
        return -(-group.mul // self.tile)

    @property
    def units(self) -> int:
        """CUDA: (group, tile) pairs, each a team's share of one run of edges."""
        return sum(self.tiles(group) for group in self.groups)


AnyPlan = Plan | PairPlan


def make_plan(spec: Spec) -> AnyPlan:
    """The plan of a spec, or ScheduleError with the broken limit."""
    if isinstance(spec.schedule, HostSchedule):
        spec.facts.check_cores(spec.schedule.threads)
    if spec.deterministic and spec.problem.shared_weights and "w" in spec.direction.live_outputs:
        raise UnsupportedError(
            "gradients of shared weights sum over all edges in no fixed order; expand the weights to one row an edge "
            "for a deterministic gradient"
        )
    return _channel_plan(spec) if spec.problem.is_channelwise else pair_plan(spec)


def _channel_plan(spec: Spec) -> Plan:
    problem, schedule = spec.problem, spec.schedule
    groups = group_paths(problem, schedule.path_groups) if problem.paths else ()
    exclusive_in1 = frozenset(
        block for block in range(len(problem.in1)) if sum(block in group.in1 for group in groups) <= 1
    )
    exclusive_out = frozenset(
        block for block in range(len(problem.out)) if sum(block in group.out for group in groups) <= 1
    )
    plan = Plan(spec, groups, exclusive_in1, exclusive_out, frozenset())
    if spec.deterministic:
        _check_deterministic(plan)
    if isinstance(schedule, CudaSchedule):
        plan = _check_cuda(plan, schedule)
    return dataclasses.replace(plan, zeroed=_zeroed(plan))


def _zeroed(plan: Plan) -> frozenset[str]:
    """Outputs that receive sums from several workers, or that have elements nobody writes."""
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
    if not (single_unit and covers_y) and not plan.partial_y:
        zeroed.add("out_y")
    if problem.shared_weights:
        zeroed.add("out_w")
    return frozenset(name for name in zeroed if name[4:] in spec.direction.outputs)


def _check_deterministic(plan: Plan) -> None:
    """Every element of an output must have one writer, or two that add to zero: a + b is b + a."""
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
        writers = [sum(block in getattr(group, side) for group in plan.groups) for block in _blocks_of(spec, side)]
        # On the host one worker runs all groups of an edge, one after the other.
        if isinstance(spec.schedule, CudaSchedule) and slot in live and max(writers, default=0) > 2:
            raise ScheduleError(
                f"path_groups={spec.schedule.path_groups}: {max(writers)} groups add to one block of {slot}; "
                "a deterministic kernel allows two"
            )


def _blocks_of(spec: Spec, side: str) -> range:
    return range(len(getattr(spec.problem, side)))


def estimate_registers(plan: AnyPlan) -> int:
    """32-bit registers a thread of the widest group holds across its loop (CUDA): sums, operands, edge rows.

    Of a pair plan 0: what an edge needs lies in shared memory.
    """
    if isinstance(plan, PairPlan):
        return 0
    spec, schedule = plan.spec, plan.spec.schedule
    assert isinstance(schedule, CudaSchedule)
    problem, operands, live = spec.problem, spec.direction.operands, spec.direction.live_outputs
    widest = 0
    for group in plan.groups:
        rows = sum(problem.in1[b].dim for b in group.in1)
        outs = sum(problem.out[b].dim for b in group.out)
        read_in = rows * (("x" in operands) + ("tx" in operands))
        read_out = outs * (("g" in operands) + ("tg" in operands))
        held = outs * ("g" in live) + rows * ("x" in live)
        held += len(group.paths) if problem.shared_weights and "w" in live else 0
        staged = len(group.paths) * (("w" in operands) + ("tw" in operands))
        for read, near in ((read_in, plan.near == "in1"), (read_out, plan.near == "out")):
            held, staged = held + read * near, staged + read * (not near)
        channels = schedule.channels_per_thread * (held + staged * (2 if schedule.prefetch == "copy" else 1))
        row = problem.dim_in2 * ("y" in live)
        if schedule.edge_operand == "inline":
            row += problem.dim_in2 * (("y" in operands) + ("ty" in operands))
        elif schedule.edge_operand == "basis":
            row += len(_staged_values(plan, group)) * (("y" in operands) + ("ty" in operands))
        widest = max(widest, channels + row)
    return widest * BYTES[spec.dtype] // 4 + 24


def stage_stride(plan: Plan, group: Group) -> int:
    """Shared-memory elements one staged edge takes: its edge values, padded to an odd multiple of 16 bytes."""
    operands = plan.spec.direction.operands
    values = len(_staged_values(plan, group)) * (("y" in operands) + ("ty" in operands))
    width = 16 // BYTES[plan.spec.dtype]
    vectors = -(-values // width)
    return width * (vectors + 1 - vectors % 2)


def _staged_values(plan: Plan, group: Group) -> tuple[EdgeValue, ...]:
    schedule, terms = plan.spec.schedule, path_terms(plan.spec.problem)
    assert isinstance(schedule, CudaSchedule)
    return edge_slots([terms[p] for p in group.paths], schedule.edge_operand == "basis")[0]


def stage_elements(plan: Plan) -> int:
    """Shared-memory elements in which a team keeps the edge values of the edges that it has fetched."""
    schedule = plan.spec.schedule
    assert isinstance(schedule, CudaSchedule)
    if schedule.edge_operand == "inline":
        return 0
    return max((stage_stride(plan, group) for group in plan.groups), default=0) * plan.stage


def sums_elements(plan: Plan) -> int:
    """Shared-memory elements in which a team leaves its sums of a node that it shares with other teams."""
    schedule = plan.spec.schedule
    assert isinstance(schedule, CudaSchedule)
    if schedule.teams_per_node == 1:
        return 0
    return max((plan.sums_of(group) for group in plan.groups), default=0)


def _check_cuda(plan: Plan, schedule: CudaSchedule) -> Plan:
    spec, facts = plan.spec, plan.spec.facts
    if schedule.stage_edges > schedule.lanes:
        raise ScheduleError(f"stage_edges={schedule.stage_edges} exceeds the {schedule.lanes} lanes of a team")
    for group in plan.groups:
        if group.mul % schedule.channels_per_thread:
            raise ScheduleError(
                f"channels_per_thread={schedule.channels_per_thread} does not divide {group.mul} channels"
            )
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
    registers = estimate_registers(plan)
    limit = min(MAX_REGISTERS, facts.registers_per_unit // threads)
    if registers > REGISTER_SLACK * limit:
        raise ScheduleError(
            f"about {registers} registers a thread, {registers / limit:.1f} times the {limit} there are; "
            "use more path_groups, fewer channels_per_thread or no prefetch"
        )
    shared = teams * (stage_elements(plan) + sums_elements(plan)) * BYTES[spec.dtype]
    if shared > facts.shared_per_block:
        raise ScheduleError(f"{shared} bytes of shared memory a block; there are {facts.shared_per_block}")
    return dataclasses.replace(plan, shared_bytes=shared)
