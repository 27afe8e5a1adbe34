"""The CUDA text without a GPU: executed lane by lane on the host against e3nn, and compiled by NVRTC."""

from __future__ import annotations

import dataclasses

import pytest
from cuda_emulator import run_direction as run
from reference import directions_with_one_part, expected, make_case, relative_error

from kernelgen.arithmetic.directions import DIRECTIONS, fixed_order_parts
from kernelgen.device import cuda_facts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.product.plan import OwnersPlan
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import TensorProductProblem

FACTS = cuda_facts("sm_90")


MEDIUM = ("32x0e+32x1o", "0e+1o+2e+3o", "0e+1o+2e+3o")
UNEQUAL = ("64x0e+32x1e+8x2e", "0e+1e+2e", "0e+1e+2e")
NARROW = ("10x0e+10x1o", "0e+1o", "0e+1o+1e")
SINGLE = ("32x0e+32x1o", "0e+1o+2e", "0e+1o+2e")
ODD = ("89x1o+1x0e", "1o+2e", "1o+0e+2e")

FORMS = {
    "default": (MEDIUM, "conv", "mul_ir", CudaSchedule()),
    "staged": (
        MEDIUM,
        "conv",
        "ir_mul",
        CudaSchedule(edge_operand="shared", path_groups=2, prefetch="copy", stage_edges=8),
    ),
    "half-warps": (MEDIUM, "conv", "mul_ir", CudaSchedule(channels_per_thread=2, edges_per_warp=2, stage_edges=16)),
    "quarter-warps": (
        MEDIUM,
        "conv",
        "ir_mul",
        CudaSchedule(channels_per_thread=4, edges_per_warp=4, stage_edges=8, path_groups=4),
    ),
    "atomics": (
        MEDIUM,
        "conv",
        "mul_ir",
        CudaSchedule(accumulate="atomics", edges_per_chunk=4, prefetch="none", path_groups=10),
    ),
    "plain": (MEDIUM, "plain", "mul_ir", CudaSchedule(edges_per_chunk=4)),
    "plain-staged": (
        MEDIUM,
        "plain",
        "ir_mul",
        CudaSchedule(edges_per_chunk=16, path_groups=5, edge_operand="shared", warps_per_edge=4, stream=True),
    ),
    "unequal": (UNEQUAL, "conv", "mul_ir", CudaSchedule(path_groups=3, channels_per_thread=2, warps_per_edge=2)),
    "unequal-plain": (UNEQUAL, "plain", "ir_mul", CudaSchedule(path_groups=4, edge_operand="shared", block_size=64)),
    "narrow-atomics": (
        NARROW,
        "conv",
        "mul_ir",
        CudaSchedule(edges_per_warp=2, stage_edges=16, accumulate="atomics", prefetch="copy"),
    ),
    "narrow-staged": (
        NARROW,
        "conv",
        "ir_mul",
        CudaSchedule(edges_per_warp=8, stage_edges=4, channels_per_thread=2, edge_operand="shared"),
    ),
    # a single work unit stores dF/dy instead of adding it; nine components over 16 lanes have padded halves
    "single-unit": (SINGLE, "conv", "ir_mul", CudaSchedule(edges_per_warp=2, stage_edges=16, channels_per_thread=2)),
    "by-sender": (MEDIUM, "conv", "mul_ir", CudaSchedule(order="sender", path_groups=2, prefetch="reload")),
    "by-sender-staged": (
        UNEQUAL,
        "conv",
        "ir_mul",
        CudaSchedule(
            order="sender", path_groups=4, edge_operand="shared", prefetch="none", edges_per_warp=2, stage_edges=16
        ),
    ),
    "basis": (MEDIUM, "conv", "ir_mul", CudaSchedule(edge_operand="basis", path_groups=2, prefetch="none")),
    "basis-small-teams": (
        UNEQUAL,
        "conv",
        "ir_mul",
        CudaSchedule(edge_operand="basis", path_groups=4, edges_per_warp=4, stage_edges=8, channels_per_thread=4),
    ),
    "ahead": (
        MEDIUM,
        "conv",
        "ir_mul",
        CudaSchedule(ahead="rows", path_groups=3, accumulate="atomics", prefetch="reload"),
    ),
    "split-nodes": (
        MEDIUM,
        "conv",
        "ir_mul",
        CudaSchedule(ahead="all", teams_per_node=4, path_groups=3, edge_operand="shared"),
    ),
    "ahead-along": (
        MEDIUM,
        "conv",
        "ir_mul",
        CudaSchedule(ahead="along", teams_per_node=4, path_groups=3, edge_operand="shared"),
    ),
    "split-nodes-by-sixteen": (
        MEDIUM,
        "conv",
        "ir_mul",
        CudaSchedule(
            **{"teams_per_node": 16, "block_size": 256, "edges_per_warp": 2, "channels_per_thread": 2},
            **{"path_groups": 3, "stage_edges": 4, "ahead": "all", "edge_operand": "shared"},
        ),
    ),
    "split-nodes-by-sender": (
        UNEQUAL,
        "conv",
        "mul_ir",
        CudaSchedule(
            **{"order": "sender", "path_groups": 4, "edges_per_warp": 2, "stage_edges": 16, "warps_per_edge": 2},
            **{"teams_per_node": 2, "channels_per_thread": 2, "block_size": 64, "finish": "unrolled"},
        ),
    ),
    "split-nodes-unrolled": (
        MEDIUM,
        "conv",
        "ir_mul",
        CudaSchedule(finish="unrolled", teams_per_node=8, block_size=256, path_groups=3),
    ),
    "split-nodes-unrolled-by-sender": (
        UNEQUAL,
        "conv",
        "mul_ir",
        CudaSchedule(order="sender", path_groups=9, teams_per_node=4, finish="unrolled", channels_per_thread=2),
    ),
    "ring": (
        MEDIUM,
        "conv",
        "ir_mul",
        CudaSchedule(prefetch="ring2", edge_operand="shared", stage_edges=8, path_groups=2),
    ),
    "ring-of-half-warps": (
        MEDIUM,
        "conv",
        "mul_ir",
        CudaSchedule(
            **{"prefetch": "ring4", "edges_per_warp": 2, "channels_per_thread": 2, "stage_edges": 4},
            **{"edge_operand": "basis", "accumulate": "atomics", "edges_per_chunk": 8},
        ),
    ),
    "ring-by-sender": (
        UNEQUAL,
        "conv",
        "ir_mul",
        CudaSchedule(
            **{"prefetch": "ring4", "order": "sender", "edges_per_warp": 4, "path_groups": 4, "stage_edges": 8},
            **{"teams_per_node": 2, "edge_operand": "shared"},
        ),
    ),
    "odd": (ODD, "conv", "mul_ir", CudaSchedule(path_groups=2, warps_per_edge=4)),
}


CASES = [(form, False) for form in FORMS] + [(form, True) for form in ("half-warps", "atomics", "plain-staged", "odd")]
# Each form runs in one of the directions that have parts of what others have; with two more it is slow.
EACH_DIRECTION = [
    pytest.param(*case, direction, marks=[] if direction in directions_with_one_part(place) else [pytest.mark.slow])
    for place, case in enumerate(CASES)
    for direction in DIRECTIONS
]


@pytest.mark.parametrize(("form", "shared", "direction"), EACH_DIRECTION)
def test_lanes_compute_what_e3nn_computes(form, shared, direction, monkeypatch) -> None:
    # float64 takes twice the registers; the emulator has no limit, so test every form in the exact precision
    monkeypatch.setattr("kernelgen.kernels.product.plan.REGISTER_SLACK", 10)
    irreps, operation, layout, schedule = FORMS[form]
    problem = TensorProductProblem.channelwise(*irreps, shared_weights=shared)
    case = make_case(problem, operation, edges=26)
    results = run(case, DIRECTIONS[direction], operation, layout, "float64", schedule)
    wanted = expected(case, direction)
    errors = {slot: relative_error(results[slot], wanted[slot]) for slot in wanted}
    assert max(errors.values()) < 1e-10, errors


WRITES_ROWS = [form for form in FORMS if form not in ("single-unit", "basis", "ahead-along", "ring-by-sender")]


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("direction", ["forward", "backward", "double_backward"])
@pytest.mark.parametrize("form", WRITES_ROWS)
def test_lanes_exchange_what_they_write(form, direction, layout, monkeypatch) -> None:
    monkeypatch.setattr("kernelgen.kernels.product.plan.REGISTER_SLACK", 10)
    irreps, operation, _, schedule = FORMS[form]
    case = make_case(TensorProductProblem.channelwise(*irreps), operation, edges=26)
    schedule = dataclasses.replace(schedule, writes="rows")
    results = run(case, DIRECTIONS[direction], operation, layout, "float64", schedule)
    wanted = expected(case, direction)
    errors = {slot: relative_error(results[slot], wanted[slot]) for slot in wanted}
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("form", ["atomics", "ring-of-half-warps", "ahead"])
def test_runs_of_permuted_edges_compute_what_e3nn_computes(form, direction, monkeypatch) -> None:
    monkeypatch.setattr("kernelgen.kernels.product.plan.REGISTER_SLACK", 10)
    irreps, operation, layout, schedule = FORMS[form]
    case = make_case(TensorProductProblem.channelwise(*irreps), operation, edges=26)
    results = run(case, DIRECTIONS[direction], operation, layout, "float64", schedule, permuted=True)
    wanted = expected(case, direction)
    errors = {slot: relative_error(results[slot], wanted[slot]) for slot in wanted}
    assert max(errors.values()) < 1e-10, errors


OWNERS = {
    "one-unit": (SINGLE, "ir_mul", CudaSchedule(edges_per_chunk=1)),
    "one-unit-ahead": (
        SINGLE,
        "mul_ir",
        CudaSchedule(edges_per_chunk=2, block_size=64, ahead="all", edge_operand="shared", stage_edges=4),
    ),
    "joined": (
        MEDIUM,
        "ir_mul",
        CudaSchedule(edges_per_chunk=1, path_groups=4, warps_per_edge=4, edge_operand="shared", stage_edges=4),
    ),
    "joined-plain": (
        UNEQUAL,
        "ir_mul",
        CudaSchedule(edges_per_chunk=2, path_groups=3, stage_edges=4, warps_per_edge=4, edge_operand="basis"),
    ),
    "joined-runs": (
        UNEQUAL,
        "mul_ir",
        CudaSchedule(edges_per_chunk=8, path_groups=3, stage_edges=8, warps_per_edge=4, prefetch="copy"),
    ),
}


@pytest.mark.parametrize("direction", ["backward", "edge_backward", "joint_backward"])
@pytest.mark.parametrize("form", OWNERS)
def test_owners_write_what_e3nn_computes_into_memory_that_held_anything(form, direction, monkeypatch) -> None:
    monkeypatch.setattr("kernelgen.kernels.product.plan.REGISTER_SLACK", 10)
    irreps, layout, schedule = OWNERS[form]
    schedule, operation = dataclasses.replace(schedule, accumulate="owners"), "plain" if "plain" in form else "conv"
    problem = TensorProductProblem.channelwise(*irreps)
    spec = Spec(problem, DIRECTIONS[direction], schedule, operation, "float64", layout, "int64", FACTS)
    assert make_plan(spec).zeroed == frozenset(), "nothing starts from zero, so the emulator fills outputs with NaN"
    case = make_case(problem, operation, edges=37)
    results = run(case, DIRECTIONS[direction], operation, layout, "float64", schedule)
    wanted = expected(case, direction)
    errors = {slot: relative_error(results[slot], wanted[slot]) for slot in wanted}
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rings_of_any_piece(dtype, channels, monkeypatch) -> None:
    """A team's weights of a path take a part of one copy, a whole one or several."""
    monkeypatch.setattr("kernelgen.kernels.product.plan.REGISTER_SLACK", 10)
    problem = TensorProductProblem.channelwise("128x0e+128x1o", "0e+1o", "0e+1o+1e")
    case = make_case(problem, "conv", edges=11)
    schedule = CudaSchedule(prefetch="ring2", channels_per_thread=channels, path_groups=2)
    for direction in ("forward", "double_backward"):
        results = run(case, DIRECTIONS[direction], "conv", "ir_mul", dtype, schedule)
        wanted = expected(case, direction)
        errors = {slot: relative_error(results[slot].double(), wanted[slot]) for slot in wanted}
        assert max(errors.values()) < (1e-10 if dtype == "float64" else 1e-5), errors


@pytest.mark.parametrize(
    ("irreps", "shared", "reason"),
    [
        (MEDIUM, True, "all edges share these"),
        (NARROW, False, "10 channels are no multiple of the 32 of a team"),
        (("33x0e+32x1o", "0e+1o", "0e+1o"), False, "multiple"),
    ],
)
def test_a_ring_says_what_it_cannot_hold(irreps, shared, reason) -> None:
    problem = TensorProductProblem.channelwise(*irreps, shared_weights=shared)
    schedule = CudaSchedule(prefetch="ring2", path_groups=4)
    with pytest.raises(ScheduleError, match=reason):
        make_plan(Spec(problem, DIRECTIONS["forward"], schedule, "conv", "float32", "ir_mul", "int64", FACTS))


def test_owners_say_what_they_cannot_do() -> None:
    def plan(direction: str, **knobs: object) -> object:
        schedule = dataclasses.replace(CudaSchedule(accumulate="owners"), **knobs)
        problem = TensorProductProblem.channelwise(*MEDIUM)
        return make_plan(Spec(problem, DIRECTIONS[direction], schedule, "conv", "float32", "ir_mul", "int64", FACTS))

    with pytest.raises(ScheduleError, match="gradients of the inputs, not for forward"):
        plan("forward")
    with pytest.raises(ScheduleError, match="a block must be the 4 warps that share an edge"):
        plan("backward", path_groups=4, warps_per_edge=2)
    assert isinstance(plan("backward", path_groups=4, warps_per_edge=4), OwnersPlan)


@pytest.mark.parametrize("schedule", [{}, {"order": "receiver", "accumulate": "atomics", "edges_per_chunk": 8}])
def test_a_deterministic_gradient_of_edges_takes_partial_rows_only_where_it_must(schedule) -> None:
    problem = TensorProductProblem.channelwise(*MEDIUM)
    case, direction = make_case(problem, "conv", edges=37), fixed_order_parts(DIRECTIONS["backward"])[-1]
    apart = CudaSchedule(path_groups=4, stage_edges=8, **schedule)

    def spec_of(**knobs: int) -> Spec:
        chosen = dataclasses.replace(apart, **knobs)
        return Spec(problem, direction, chosen, "conv", "float64", "ir_mul", "int64", FACTS, deterministic=True)

    for wrong in ({}, {"warps_per_edge": 4, "block_size": 256}):
        with pytest.raises(ScheduleError, match="expected warps_per_edge=4, block_size=128, teams_per_node=1"):
            make_plan(spec_of(**wrong))
    for knobs, rows in (({"warps_per_edge": 4}, 0), ({"path_groups": 3}, 3), ({"edges_per_warp": 2}, 8)):
        spec = spec_of(**knobs)
        assert make_plan(spec).partial_y == rows
        results = run(case, direction, "conv", "ir_mul", "float64", spec.schedule, deterministic=True)
        wanted = expected(case, "backward")
        assert max(relative_error(results[slot], wanted[slot]) for slot in "yw") < 1e-10


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_deterministic_parts_compute_what_e3nn_computes(direction, monkeypatch) -> None:
    monkeypatch.setattr("kernelgen.kernels.product.plan.REGISTER_SLACK", 10)
    problem = TensorProductProblem.channelwise(*MEDIUM)
    case = make_case(problem, "conv", edges=26)
    results = {}
    for part in fixed_order_parts(DIRECTIONS[direction]):
        schedule = CudaSchedule(path_groups=2, order="sender" if part.outputs == "x" else "receiver", edges_per_warp=2)
        schedule = dataclasses.replace(schedule, stage_edges=16)
        results |= run(case, part, "conv", "ir_mul", "float64", schedule, deterministic=True)
    wanted = expected(case, direction)
    errors = {slot: relative_error(results[slot], wanted[slot]) for slot in wanted}
    assert max(errors.values()) < 1e-10, errors
