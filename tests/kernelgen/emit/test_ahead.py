"""L2 prefetches cover all that a path group's teams load of an edge's rows, once, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from kernelgen.arithmetic.directions import DIRECTIONS, Direction, backward, double_backward
from kernelgen.device import cuda_facts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.dispatch import emit, make_plan
from kernelgen.kernels.product.channelwise import Plan, RowSpan, registers_of, row_spans
from kernelgen.kernels.product.plan import bytes_ahead
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import TensorProductProblem

UNEQUAL = TensorProductProblem.channelwise("128x0e+64x1o+32x2e", "0e+1o+2e", "0e+1o+2e")


def plan_of(
    schedule: CudaSchedule, direction: str | Direction, layout: str = "ir_mul", problem: TensorProductProblem = UNEQUAL
) -> Plan:
    facts = cuda_facts("sm_90")
    found = DIRECTIONS[direction] if isinstance(direction, str) else direction
    return make_plan(Spec(problem, found, schedule, "conv", "float32", layout, "int64", facts))


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("direction", ["forward", "backward", "double_backward"])
@pytest.mark.parametrize("order", ["receiver", "sender"])
@pytest.mark.parametrize("lanes", [(1, 1), (2, 1), (4, 4)], ids=str)
def test_teams_ask_for_what_they_load_and_nothing_else(
    lanes: tuple[int, int], order: str, direction: str, layout: str
) -> None:
    schedule = CudaSchedule(
        ahead="rows", path_groups=5, order=order, edges_per_warp=lanes[0], channels_per_thread=lanes[1], stage_edges=8
    )
    plan = plan_of(schedule, direction, layout)
    operands = {name[-1] for name in plan.spec.direction.operands}
    for group in plan.groups:
        wanted = {("w", UNEQUAL.paths[p].weight_offset + u) for p in group.paths for u in range(group.mul)}
        for slot, side, blocks in (("x", "in1", group.in1), ("g", "out", group.out)):
            if slot in operands and side != plan.near:
                rows = [getattr(UNEQUAL, side)[b] for b in blocks]
                wanted |= {(slot, b.offset + i) for b in rows for i in range(b.dim * b.mul)}
        asked = [
            (span.slot, span.start + span.step * plan.tile * tile + i)
            for tile in range(plan.tiles(group))
            for span in row_spans(plan, group)
            for i in range(span.length)
        ]
        assert len(asked) == len(set(asked))
        assert set(asked) == wanted


def test_neighbouring_rows_are_one_request() -> None:
    even = TensorProductProblem.channelwise("32x0e+32x1o", "0e+1o", "0e+1o")
    plan = plan_of(CudaSchedule(ahead="rows"), "forward", problem=even)
    spans = [span for group in plan.groups for span in row_spans(plan, group)]
    assert spans == [RowSpan("w", 0, even.weight_numel), RowSpan("x", 0, even.dim_in1)]


def test_spans_that_do_not_exist_are_refused() -> None:
    whole = TensorProductProblem.channelwise("48x0e+48x1o", "0e+1o", "0e+1o")
    with pytest.raises(ScheduleError, match="48 channels are no multiple of the 32"):
        plan_of(CudaSchedule(ahead="weights", path_groups=4), "forward", problem=whole)
    shared = TensorProductProblem.channelwise("32x0e+32x1o", "0e+1o", "0e+1o", shared_weights=True)
    with pytest.raises(ScheduleError, match="ahead='weights' cannot be asked for: there are no such rows"):
        plan_of(CudaSchedule(ahead="weights"), "forward", problem=shared)


@pytest.mark.parametrize("part", [backward("w"), double_backward("yg", "w")], ids=str)
def test_a_pass_that_reads_no_weights_asks_for_none(part: Direction) -> None:
    """Gradients of the weights alone run by the schedule of all gradients."""
    schedule = CudaSchedule(ahead="weights", stage_edges=8, path_groups=5)
    plans = plan_of(schedule, part), plan_of(schedule, part.name)
    asked = [[row_spans(plan, group) for group in plan.groups] for plan in plans]
    assert not any(asked[0]) and all(asked[1])
    assert emit(plans[0]).text


def test_what_all_teams_prefetch_at_once_is_counted_by_hand() -> None:
    """Of 32 channels an edge has 64 weights, all in one group, and a row of x of 32."""
    problem = TensorProductProblem.channelwise("32x0e", "0e+1o", "0e+1o")
    chosen = CudaSchedule(ahead="weights", path_groups=1, stage_edges=8, block_size=128)
    for schedule, elements in ((chosen, 64), (dataclasses.replace(chosen, ahead="rows"), 64 + 32)):
        plan = plan_of(schedule, "forward", problem=problem)
        registers = -(-registers_of(plan) // 8) * 8
        blocks = min(2048, 65536 // registers) // 128
        assert 1 < blocks < 16 and plan.shared_bytes == 0
        assert bytes_ahead(plan) == 132 * blocks * (128 // 32) * 8 * elements * 4
    staged = plan_of(dataclasses.replace(chosen, edge_operand="shared"), "forward", problem=problem)
    held = min(2048 // 128, plan.spec.facts.shared_per_unit // staged.shared_bytes)
    assert bytes_ahead(staged) <= 132 * held * 4 * 8 * 64 * 4
    assert bytes_ahead(plan_of(dataclasses.replace(chosen, ahead="none"), "forward", problem=problem)) == 0
