"""Rows and indices carried from one stage of a node's edges to the next (``prefetch="carry"``)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cuda_emulator import run_direction
from reference import assert_matches_e3nn, expected, make_case, relative_error

from kernelgen import CudaSchedule, TensorProductProblem, build
from kernelgen.compile import compile_source
from kernelgen.device import cuda_facts
from kernelgen.direction import DIRECTIONS
from kernelgen.emit import emit
from kernelgen.errors import ScheduleError
from kernelgen.plan import make_plan
from kernelgen.spec import Spec

FACTS = cuda_facts("sm_90")
PROBLEM = TensorProductProblem.channelwise("64x0e+32x1e+8x2e", "0e+1e+2e", "0e+1e+2e")
FORMS = {
    "shared": CudaSchedule(path_groups=3, edge_operand="shared", stage_edges=4),
    "basis": CudaSchedule(path_groups=4, edge_operand="basis", stage_edges=8, ahead="weights"),
    "inline": CudaSchedule(path_groups=3, stage_edges=4, ahead="rows"),
    "split-nodes": CudaSchedule(path_groups=3, edge_operand="shared", stage_edges=4, teams_per_node=2),
    "small-teams": CudaSchedule(path_groups=4, edge_operand="shared", stage_edges=4, edges_per_warp=4, stream=True),
    "by-sender": CudaSchedule(order="sender", path_groups=4, edge_operand="shared", stage_edges=4, warps_per_edge=2),
    "wide": CudaSchedule(path_groups=4, edge_operand="shared", stage_edges=8, channels_per_thread=4, edges_per_warp=2),
}
DIRECTIONS_HERE = ["forward", "backward", "edge_backward", "source_backward", "joint_backward", "double_backward"]


def carried(form: str) -> CudaSchedule:
    return dataclasses.replace(FORMS[form], prefetch="carry")


def spec_of(direction: str, schedule: CudaSchedule, operation: str = "conv") -> Spec:
    return Spec(PROBLEM, DIRECTIONS[direction], schedule, operation, "float32", "ir_mul", "int64", FACTS)


@pytest.mark.parametrize("direction", DIRECTIONS_HERE)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("edges", "nodes"), [(150, 5), (12, 20)], ids=["many-stages", "nodes-without-edges"])
def test_every_stage_has_its_own_edges(
    edges: int, nodes: int, form: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of about thirty edges take four to eight stages, the last one of a few edges."""
    monkeypatch.setattr("kernelgen.plan.REGISTER_SLACK", 10)
    case = make_case(PROBLEM, "conv", edges=edges, nodes=nodes)
    results = run_direction(case, DIRECTIONS[direction], "conv", "ir_mul", "float64", carried(form))
    wanted = expected(case, direction)
    errors = {slot: relative_error(results[slot], wanted[slot]) for slot in wanted}
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("form", FORMS)
def test_the_compiler_takes_it_without_spills(form: str) -> None:
    """A stage's indices take two registers more than loading them when they are needed."""
    plain = dataclasses.replace(FORMS[form], prefetch="reload")
    found, before = (
        compile_source(emit(make_plan(spec_of("forward", schedule))), FACTS).resources
        for schedule in (carried(form), plain)
    )
    assert found["spill_bytes"] == 0 and found["registers"] <= before["registers"] + 24


@pytest.mark.parametrize(
    ("schedule", "operation"),
    [
        (CudaSchedule(prefetch="carry", path_groups=3, stage_edges=32), "conv"),
        (CudaSchedule(prefetch="carry", path_groups=3, stage_edges=4, edges_per_warp=8), "conv"),
        (CudaSchedule(prefetch="carry", path_groups=3, stage_edges=4, accumulate="atomics"), "conv"),
        (CudaSchedule(prefetch="carry", path_groups=3, stage_edges=4), "plain"),
    ],
    ids=["stage of a whole team", "small team", "no owner", "plain"],
)
def test_where_it_makes_no_sense_it_is_refused(schedule: CudaSchedule, operation: str) -> None:
    with pytest.raises(
        ScheduleError, match="prefetch='carry'.* expected a worker that owns a node and stage_edges below"
    ):
        make_plan(spec_of("forward", schedule, operation))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelgen.plan.REGISTER_SLACK", 4)
    schedules = dict.fromkeys(DIRECTIONS_HERE, carried(form))
    operator = build(PROBLEM, schedules, dtype=dtype, layout="ir_mul", device="cuda")
    case = make_case(PROBLEM, "conv", edges=900, nodes=20, num_out=20)
    assert_matches_e3nn(operator, case, schedules, 1e-5 if dtype == torch.float32 else 1e-10, "cuda")
