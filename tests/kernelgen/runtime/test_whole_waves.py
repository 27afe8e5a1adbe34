"""Runs of edges whose number fills whole waves of a device: launches, and results on a GPU."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from reference import assert_matches_e3nn, make_case

from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import cuda_facts
from kernelgen.kernels.dispatch import AnyPlan, emit, geometry, make_plan
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.ops.product import build
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime import kernel as kernel_module
from kernelgen.runtime.kernel import _CudaRun

PROBLEM = TensorProductProblem.channelwise("16x0e+16x1o", "0e+1o", "0e+1o")
WAVES = CudaSchedule(accumulate="atomics", runs="waves")
UNITS = 10


def plan_of(schedule: CudaSchedule, direction: str = "backward", operation: str = "conv") -> AnyPlan:
    facts = cuda_facts("sm_90", units=UNITS)
    return make_plan(Spec(PROBLEM, DIRECTIONS[direction], schedule, operation, "float32", "ir_mul", "int64", facts))


@pytest.mark.parametrize("zeros", ["apart", "inside"])
@pytest.mark.parametrize("units_of_block", [1, 2])
def test_blocks_fill_whole_waves(zeros: str, units_of_block: int) -> None:
    """4 warps a block, 32 edges a run: 40 blocks at a time on 10 multiprocessors that hold 4 each."""
    forms = [dataclasses.replace(WAVES, zeros=zeros, path_groups=units_of_block, runs=r) for r in ("fixed", "waves")]
    fixed, waves = map(plan_of, forms)
    none = geometry(waves, 0, 1, 1)[0]
    assert none == geometry(waves, 0, 1, 1, 4)[0] and (none > 0) == (zeros == "inside")
    for edges, expected in ((1, 40), (40 * 128 // units_of_block, 40), (1 + 40 * 128 // units_of_block, 80)):
        assert geometry(waves, edges, 99, 99, 4)[0] - none == expected
        assert geometry(fixed, edges, 99, 99, 4) == geometry(fixed, edges, 99, 99)
        assert geometry(waves, edges, 99, 99) == geometry(fixed, edges, 99, 99), "how many fit is not known"


def test_blocks_that_share_runs_come_together() -> None:
    """Three blocks for the path groups of a run: 39 of the 40 that fit."""
    plan = plan_of(dataclasses.replace(WAVES, path_groups=3))
    assert geometry(plan, 100, 9, 9, 1)[0] == 9, "of the 10 that fit"
    assert geometry(plan, 10_000, 9, 9, 4)[0] % 39 == 0


def test_only_runs_of_a_convolution_that_are_added_in_memory_have_this_form() -> None:
    assert plan_of(WAVES).fills_waves
    owned = dataclasses.replace(WAVES, accumulate="registers")
    for plan in (plan_of(owned), plan_of(WAVES, operation="plain"), plan_of(dataclasses.replace(WAVES, runs="fixed"))):
        assert not plan.fills_waves
        assert "all_runs" not in emit(plan).text


def test_the_driver_is_asked_once_how_many_blocks_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def held(_: object, threads: int, shared: int, device: int) -> int:
        asked.append((threads, shared, device))
        return 4

    monkeypatch.setattr(kernel_module, "blocks_held", held)
    monkeypatch.setattr(kernel_module, "launch_function", lambda: None)
    for schedule, calls in ((WAVES, [(128, 0, 1)]), (dataclasses.replace(WAVES, runs="fixed"), [])):
        asked.clear()
        run = _CudaRun(plan_of(schedule), types.SimpleNamespace(handle=7))  # type: ignore[arg-type]
        shapes = [run._geometry_of((edges, 9, 9), 1) for edges in (100, 200)]
        assert asked == calls
        assert shapes == [geometry(run._plan, edges, 9, 9, 4) for edges in (100, 200)]


@pytest.mark.gpu
@pytest.mark.parametrize("edges", [1, 300, 5000])
@pytest.mark.parametrize("zeros", ["apart", "inside"])
def test_on_a_gpu(zeros: str, edges: int) -> None:
    schedule = dataclasses.replace(WAVES, zeros=zeros, path_groups=2, edge_operand="shared", stage_edges=8)
    schedules = dict.fromkeys(("forward", "backward", "edge_backward"), schedule)
    operator = build(PROBLEM, schedules, dtype=torch.float64, layout="ir_mul", device="cuda")
    case = make_case(PROBLEM, "conv", edges=edges, nodes=20, num_out=20)
    assert_matches_e3nn(operator, case, schedules, 1e-10, "cuda")
    kernel = kernel_module.load_kernel(operator.specs("backward")[-1])
    run = kernel._run
    assert isinstance(run, _CudaRun) and run._held
    blocks = next(iter(run._geometry.values()))[0] - geometry(kernel.plan, 0, 1, 1)[0]
    assert blocks >= torch.cuda.get_device_properties(0).multi_processor_count
