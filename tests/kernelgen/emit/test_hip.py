"""The HIP form of kernels: lane by lane on the host against e3nn, compiled by clang, and never launched."""

from __future__ import annotations

import dataclasses
import re
import subprocess

import pytest
import torch
from cuda_emulator import FACTS as CUDA
from cuda_emulator import run_direction
from pair_problems import mixed
from reference import expected, make_case, relative_error

from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.compile.compiler import compile_source
from kernelgen.compile.gpu import FLAGS, find_clang, hip_job
from kernelgen.device import HIP_ARCHS, DeviceFacts, device_facts, hip_facts
from kernelgen.errors import CompileError, ScheduleError, ToolMissingError, UnsupportedError
from kernelgen.kernels.dispatch import emit, make_plan
from kernelgen.kernels.product.plan import default_schedule
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.source import Source
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime.kernel import load_kernel

# One card of waves of 64 lanes, one of 32.
WAVES = pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
MEDIUM = TensorProductProblem.channelwise("32x0e+32x1o", "0e+1o+2e", "0e+1o+2e")
NARROW = TensorProductProblem.channelwise("10x0e+10x1o", "0e+1o", "0e+1o+1e")
FORMS = {
    "whole-warps": (MEDIUM, "conv", "mul_ir", CudaSchedule(edge_operand="shared", stage_edges=8, path_groups=2)),
    # A team an edge, so that both halves of a wave of 64 have teams.
    "eighths": (
        NARROW,
        "conv",
        "ir_mul",
        CudaSchedule(accumulate="atomics", edges_per_chunk=1, edges_per_warp=8, stage_edges=4, channels_per_thread=2),
    ),
    "runs": (MEDIUM, "conv", "ir_mul", CudaSchedule(accumulate="atomics", edges_per_warp=2, stage_edges=8)),
    "split-nodes": (MEDIUM, "conv", "ir_mul", CudaSchedule(teams_per_node=4, path_groups=3, block_size=256)),
    "ring": (MEDIUM, "conv", "ir_mul", CudaSchedule(prefetch="ring2", path_groups=2, stage_edges=8, ahead="weights")),
    "rows": (MEDIUM, "conv", "mul_ir", CudaSchedule(writes="rows", path_groups=2, stream=True, ahead="along")),
    "plain": (MEDIUM, "plain", "mul_ir", CudaSchedule(edges_per_chunk=4, edge_operand="basis", stage_edges=8)),
    "half-a-wave": (MEDIUM, "conv", "mul_ir", CudaSchedule(block_size=32, path_groups=2, stage_edges=8)),
    "pairs": (mixed(), "plain", "mul_ir", CudaSchedule(accumulate="atomics", edges_per_warp=4)),
    "owners": (MEDIUM, "conv", "ir_mul", CudaSchedule(accumulate="owners", path_groups=4, warps_per_edge=4)),
}


# Owners are for gradients of the inputs alone.
NONE_OF_OWNERS = (("owners", "forward"), ("owners", "double_backward"))


def spec_of(facts: DeviceFacts, direction: str, **knobs: object) -> Spec:
    schedule = dataclasses.replace(CudaSchedule(path_groups=2, stage_edges=8), **knobs)
    return Spec(MEDIUM, DIRECTIONS[direction], schedule, "conv", "float32", "ir_mul", "int64", facts)


def spreads(schedule: CudaSchedule) -> CudaSchedule:
    """With ``owners`` a block is the warps that share an edge, one unit each."""
    if schedule.accumulate != "owners":
        return schedule
    return dataclasses.replace(schedule, edges_per_chunk=1, edge_operand="shared", stage_edges=4)


CASES = [(form, direction) for form in FORMS for direction in ("forward", "backward", "double_backward")]


@pytest.mark.covering(2)
@WAVES
@pytest.mark.parametrize(("form", "direction"), [case for case in CASES if case not in NONE_OF_OWNERS])
def test_lanes_of_a_wave_compute_what_e3nn_computes(form, direction, arch, monkeypatch) -> None:
    monkeypatch.setattr("kernelgen.kernels.product.plan.REGISTER_SLACK", 10)
    problem, operation, layout, schedule = FORMS[form]
    case = make_case(problem, operation, edges=26)
    facts = hip_facts(arch)
    results = run_direction(case, DIRECTIONS[direction], operation, layout, "float64", spreads(schedule), facts=facts)
    wanted = expected(case, direction)
    errors = {slot: relative_error(results[slot], wanted[slot]) for slot in wanted}
    assert max(errors.values()) < 1e-10, errors


def test_the_text_is_the_cuda_text_behind_a_header() -> None:
    cuda, hip = (emit(make_plan(spec_of(facts, "backward"))) for facts in (CUDA, hip_facts("gfx942")))
    assert hip.text.endswith(cuda.text) and (hip.language, cuda.language) == ("hip", "cuda")
    assert hip.text.startswith("// HIP for waves of 64 lanes: compiles, emulated, not run\nconstexpr int WAVE = 64;")
    assert "constexpr int WAVE = 32;" in emit(make_plan(spec_of(hip_facts("gfx1100"), "backward"))).text


@pytest.fixture
def clang() -> None:
    try:
        find_clang()
    except ToolMissingError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("arch", HIP_ARCHS)
def test_default_schedules_compile_for_amd_gpus(arch: str, clang: None) -> None:
    facts = hip_facts(arch)
    for direction in ("forward", "backward", "double_backward"):
        for num_edges in (None, 1000):
            spec = spec_of(facts, direction)
            spec = dataclasses.replace(spec, schedule=default_schedule(spec, num_edges))
            resources = compile_source(emit(make_plan(spec)), facts).resources
            assert 0 < resources["registers"] <= 512 and resources["spill_bytes"] == 0


@WAVES
def test_a_barrier_of_a_warp_is_no_instruction_and_sums_are_one(arch: str, clang: None) -> None:
    """Lanes of a wave run in step: no fence, no barrier of the block; but exchanges, and additions of floats."""
    source = emit(make_plan(spec_of(hip_facts(arch), "backward", accumulate="atomics", edge_operand="shared")))
    assert "team.sync()" in source.text
    command = [find_clang()[0], *FLAGS, f"--offload-arch={arch}", "-S", "-", "-o", "-"]
    done = subprocess.run(command, input=source.text, capture_output=True, text=True, check=True)
    assembly = done.stdout
    assert not re.search(r"s_barrier|buffer_wbl2|buffer_inv|buffer_gl[01]_inv|s_waitcnt_vscnt null", assembly)
    assert "ds_bpermute_b32" in assembly and re.search(r"global_atomic_(pk_)?add_f32", assembly)
    assert "cmpswap" not in assembly


def test_what_clang_refuses_is_a_compile_error(clang: None) -> None:
    with pytest.raises(CompileError, match="clang for gfx942 failed"):
        hip_job("gfx942").compile(Source("int broken = ;", "hip"))


def test_nothing_is_launched_on_an_amd_gpu(clang: None, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(hip_facts("gfx90a"), "forward")
    kernel = load_kernel(spec)
    assert kernel.resources["registers"] > 0
    with pytest.raises(
        UnsupportedError, match="compile and are emulated, but were never run, so they are not launched"
    ):
        kernel.launch({"x": torch.zeros(1)}, 1, 1, 1)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr("kernelgen.device.check_cuda", lambda: None)
    device_facts("cpu")
    with pytest.raises(UnsupportedError, match="never run.*built for ROCm"):
        device_facts("cuda:7")


def test_what_an_amd_gpu_does_not_promise_is_illegal() -> None:
    with pytest.raises(ScheduleError, match="order in which blocks start"):
        make_plan(spec_of(hip_facts("gfx90a"), "backward", accumulate="atomics", zeros="inside"))
    small = default_schedule(spec_of(hip_facts("gfx90a"), "backward"), 1000)
    assert isinstance(small, CudaSchedule) and small.zeros == "apart"
    with pytest.raises(UnsupportedError, match="gfx906.*expected one of gfx90a"):
        hip_facts("gfx906")
