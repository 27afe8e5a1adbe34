"""Kernels of spherical harmonics against e3nn in float64: on the host, as CUDA text lane by lane, as binaries."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cuda_emulator import emulate
from harmonics_reference import operands, reference, vectors, worst

from kernelgen.arithmetic.directions import BACKWARD, DOUBLE_BACKWARD, FORWARD, HARMONICS_DIRECTIONS, HarmonicsDirection
from kernelgen.compile.compiler import compile_source
from kernelgen.compile.gpu import nvrtc_version
from kernelgen.device import DeviceFacts, cuda_facts, device_facts, hip_facts
from kernelgen.errors import ScheduleError, ToolMissingError
from kernelgen.kernels.dispatch import emit, geometry
from kernelgen.kernels.knobs import read_schedule
from kernelgen.kernels.spherical_harmonics import (
    HARMONICS_SCHEDULES,
    HarmonicsCudaSchedule,
    HarmonicsHostSchedule,
    HarmonicsSchedule,
    HarmonicsSpec,
    default_harmonics_schedule,
    harmonics_plan,
)
from kernelgen.ops.harmonics import HarmonicsOperator, build_harmonics
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.runtime.kernel import load_kernel

FACTS = cuda_facts("sm_90")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
EACH = (FORWARD, BACKWARD, *DOUBLE_BACKWARD.values())
EACH_DIRECTION = pytest.mark.parametrize("direction", EACH, ids=lambda d: f"{d.name}-{d.outputs}")
PROBLEMS = [
    HarmonicsProblem((0, 1, 2, 3), "component", True),
    HarmonicsProblem((3, 0, 3, 1), "integral", False),
    HarmonicsProblem((6,), "norm", True),
    HarmonicsProblem((2,), "integral", True),
    HarmonicsProblem((1,), "norm", False),
    HarmonicsProblem((0,), "integral", True),
    HarmonicsProblem(tuple(range(13)), "component", True),
]
EACH_PROBLEM = pytest.mark.parametrize(
    "problem", [*PROBLEMS[:-1], pytest.param(PROBLEMS[-1], marks=pytest.mark.slow)], ids=lambda problem: problem.key
)
L3 = PROBLEMS[0]


def inputs(problem: HarmonicsProblem, dtype: torch.dtype = torch.float64, count: int = 0) -> tuple[torch.Tensor, ...]:
    """v, g and t of ``count`` rows (0: all), rounded to ``dtype``, as float64."""
    v = vectors() if dtype is torch.float64 else vectors()[20:40]
    t, g = operands(problem, v)
    return tuple(tensor.to(dtype).double()[: count or None] for tensor in (v, g, t))


def assert_is_e3nns(operator: HarmonicsOperator, device: str = "cpu", apart: bool = True) -> None:
    """Values and both outputs of the second derivative, as bare calls and through autograd. apart: each alone too."""
    problem, dtype = operator.problem, operator.dtype
    v, g, t = inputs(problem, dtype)
    values, first, second_v, second_g = reference(problem, v, t, g)
    v, g, t = (tensor.to(device, dtype) for tensor in (v, g, t))

    def check(found: torch.Tensor, wanted: torch.Tensor, degrees: tuple[int, ...]) -> None:
        assert found.dtype == dtype and found.device == v.device
        assert worst(found.detach().cpu().double(), wanted, degrees) < TOLERANCE[dtype]

    check(operator.op_forward(v), values, problem.degrees)
    check(operator.op_backward(v, g, "x")["x"], first, (1,))
    for outputs in DOUBLE_BACKWARD if apart else ("xg",):
        found = operator.op_double_backward(v, g, t, outputs)
        assert set(found) == set(outputs)
        for slot, wanted, degrees in (("x", second_v, (1,)), ("g", second_g, problem.degrees)):
            if slot in outputs:
                check(found[slot], wanted, degrees)
    v, g = v.requires_grad_(), g.requires_grad_()
    out = operator(v)
    check(out, values, problem.degrees)
    (gradient,) = torch.autograd.grad(out, v, g, create_graph=True)
    check(gradient, first, (1,))
    for some, wanted in (((v,), (second_v,)), ((g,), (second_g,))) if apart else (((v, g), (second_v, second_g)),):
        for found, value in zip(torch.autograd.grad(gradient, some, t, retain_graph=True), wanted, strict=True):
            check(found, value, (1,) if value is second_v else problem.degrees)


@EACH_PROBLEM
def test_values_and_both_derivatives_are_e3nns(problem: HarmonicsProblem) -> None:
    assert_is_e3nns(build_harmonics(problem, dtype=torch.float64), apart=problem not in PROBLEMS[2:-1])


@pytest.mark.parametrize("problem", PROBLEMS[:2], ids=lambda problem: problem.key)
def test_single_precision(problem: HarmonicsProblem) -> None:
    assert_is_e3nns(build_harmonics(problem, dtype=torch.float32), apart=False)


BLOCK_SIZES = HarmonicsHostSchedule.choices["block_size"]


@pytest.mark.parametrize(
    "block_size",
    [BLOCK_SIZES[0], *(pytest.param(size, marks=pytest.mark.slow) for size in BLOCK_SIZES[1:-1]), BLOCK_SIZES[-1]],
)
def test_every_block_size_of_the_host(block_size: int) -> None:
    threads = min(2, device_facts("cpu").units)
    assert_is_e3nns(build_harmonics(L3, HarmonicsHostSchedule(block_size, threads), dtype=torch.float64), apart=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("staging", HarmonicsCudaSchedule.choices["staging"])
@EACH_PROBLEM
def test_on_a_gpu(problem: HarmonicsProblem, staging: str, dtype: torch.dtype) -> None:
    schedule = HarmonicsCudaSchedule(block_size=32, staging=staging)
    assert_is_e3nns(build_harmonics(problem, schedule, dtype=dtype, device="cuda"), "cuda")


@pytest.mark.gpu
def test_the_default_schedule_on_a_gpu() -> None:
    for problem in PROBLEMS:
        assert_is_e3nns(build_harmonics(problem, device="cuda"), "cuda")


def filled(direction: HarmonicsDirection, problem: HarmonicsProblem, rows: int) -> dict[str, torch.Tensor]:
    """A kernel's buffers, with outputs full of nan and one extra row, where nothing may be written."""
    v, g, t = inputs(problem, count=rows)
    buffers = {"x": v, "g": g, "tx": t}
    for slot, size in (("x", 3), ("g", problem.dim_out)):
        if slot in direction.outputs:
            buffers[f"out_{slot}"] = torch.full((rows + 1, size), torch.nan, dtype=torch.float64)
    return buffers


def assert_filled(buffers: dict[str, torch.Tensor], direction: HarmonicsDirection, problem: HarmonicsProblem) -> None:
    values, first, second_v, second_g = reference(problem, buffers["x"], buffers["tx"], buffers["g"])
    wanted = {"forward": {"g": values}, "backward": {"x": first}}.get(direction.name, {"x": second_v, "g": second_g})
    for slot in direction.outputs:
        found = buffers[f"out_{slot}"]
        assert found[-1].isnan().all(), "written past the end"
        assert worst(found[:-1], wanted[slot], problem.degrees if slot == "g" else (1,)) < 1e-11


@EACH_DIRECTION
@pytest.mark.parametrize("rows", [1, 7, 32, 75])
@pytest.mark.parametrize("sizes", [(16, 64), pytest.param((64, 16), marks=pytest.mark.slow)], ids=str)
def test_a_host_kernel_writes_every_row_and_no_other(
    sizes: tuple[int, int], rows: int, direction: HarmonicsDirection
) -> None:
    """Rows of 16 elements are whole squares of what changes sides at a time, those of 18 are not."""
    for problem, schedule in zip(PROBLEMS[:2], map(HarmonicsHostSchedule, sizes), strict=True):
        buffers = filled(direction, problem, rows)
        kernel = load_kernel(HarmonicsSpec(problem, direction, schedule, "float64", device_facts("cpu")))
        kernel.launch(buffers, rows, rows, rows)
        assert_filled(buffers, direction, problem)


@pytest.mark.covering(2)
@EACH_DIRECTION
@pytest.mark.parametrize(
    "problem", [PROBLEMS[0], PROBLEMS[1], PROBLEMS[3], PROBLEMS[4]], ids=lambda problem: problem.key
)
@pytest.mark.parametrize("staging", HarmonicsCudaSchedule.choices["staging"])
def test_lane_by_lane(staging: str, problem: HarmonicsProblem, direction: HarmonicsDirection) -> None:
    """75 rows in blocks of 32: rows of 16 elements are padded, those of 5 and 18 straddle what is copied at a time."""
    plan = harmonics_plan(HarmonicsSpec(problem, direction, HarmonicsCudaSchedule(32, staging), "float64", FACTS))
    assert bool(plan.staged) is (staging != "none" and bool({"g", "out_g"} & set(plan.live)))
    strides = {"none": problem.dim_out, "ahead": {16: 18}.get(problem.dim_out, problem.dim_out)}
    assert plan.stride == strides.get(staging, problem.dim_out | 1)
    buffers = filled(direction, problem, 75)
    emulate(plan, buffers, 75, 75, 75)
    assert_filled(buffers, direction, problem)


@pytest.mark.parametrize("direction", [BACKWARD, DOUBLE_BACKWARD["xg"]], ids=lambda direction: direction.name)
@pytest.mark.parametrize("stages", HarmonicsCudaSchedule.choices["stages"])
@pytest.mark.parametrize("facts", [FACTS, hip_facts("gfx942")], ids=lambda facts: facts.arch)
def test_one_warp_goes_through_all_tiles(facts: DeviceFacts, stages: int, direction: HarmonicsDirection) -> None:
    """75 rows are two tiles and one of 11 rows. On an AMD GPU in the HIP form."""
    spec = HarmonicsSpec(L3, direction, HarmonicsCudaSchedule(32, "ahead", 1, stages), "float64", facts)
    plan = harmonics_plan(dataclasses.replace(spec, facts=dataclasses.replace(facts, units=1)))
    assert geometry(plan, 75, 75, 75)[0] == 1
    buffers = filled(direction, L3, 75)
    emulate(plan, buffers, 75, 75, 75)
    assert_filled(buffers, direction, L3)


def test_a_constant_lane_by_lane() -> None:
    problem = PROBLEMS[5]
    for direction in EACH:
        plan = harmonics_plan(HarmonicsSpec(problem, direction, HarmonicsCudaSchedule(32), "float64", FACTS))
        buffers = filled(direction, problem, 40)
        emulate(plan, buffers, 40, 40, 40)
        for slot in direction.outputs:
            assert (buffers[f"out_{slot}"][:-1] == (direction is FORWARD) * (4 * torch.pi) ** -0.5).all()
            assert buffers[f"out_{slot}"][-1].isnan().all()


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.parametrize("staging", HarmonicsCudaSchedule.choices["staging"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("l_max", [3, 6])
def test_cuda_text_compiles_without_spills(l_max: int, arch: str, staging: str) -> None:
    try:
        nvrtc_version()
    except ToolMissingError as error:
        pytest.skip(str(error))
    facts, schedule = cuda_facts(arch), HarmonicsCudaSchedule(staging=staging)
    for direction in HARMONICS_DIRECTIONS.values():
        for dtype in ("float32", "float64"):
            problem = HarmonicsProblem(tuple(range(l_max + 1)), "component", True)
            plan = harmonics_plan(HarmonicsSpec(problem, direction, schedule, dtype, facts))
            resources = compile_source(emit(plan), facts).resources
            assert 0 < resources["registers"] <= 128 and resources["spill_bytes"] == resources["stack_bytes"] == 0


@pytest.mark.parametrize("schedule", [HarmonicsHostSchedule(), HarmonicsCudaSchedule()], ids=lambda s: s.backend)
def test_equal_specs_have_equal_text_that_names_them(schedule: HarmonicsSchedule) -> None:
    facts = FACTS if schedule.backend == "cuda" else device_facts("cpu")
    spec = HarmonicsSpec(L3, FORWARD, schedule, "float32", facts)
    text = emit(harmonics_plan(spec)).text
    assert text == emit(harmonics_plan(dataclasses.replace(spec))).text
    assert text.startswith(f"// problem    {L3.key}\n") and schedule.key in text
    others = [dataclasses.replace(spec, direction=BACKWARD), dataclasses.replace(spec, dtype="float64")]
    assert len({text, *(emit(harmonics_plan(other)).text for other in others)}) == 3


@pytest.mark.parametrize("schedule", [HarmonicsHostSchedule(256, 1), HarmonicsCudaSchedule(64, "vectors", 4)])
def test_schedules_come_back(schedule: HarmonicsSchedule) -> None:
    assert read_schedule(schedule.to_dict(), HARMONICS_SCHEDULES) == schedule


@pytest.mark.parametrize(
    "data, message",
    [
        ({"backend": "cuda", "block_size": 48}, r"HarmonicsCudaSchedule.block_size is 48; expected one of \(32, 64"),
        ({"backend": "cuda", "staging": True}, "staging is True; expected one of"),
        (
            {"backend": "cpu", "blocksize": 64},
            "unknown knob 'blocksize' for cpu; did you mean 'block_size'",
        ),
        ({"backend": "cpu", "fuse": True}, "unknown knob 'fuse'.*expected one of"),
        ({"backend": "rocm"}, r"schedule backend is 'rocm'; expected one of \('cuda', 'cpu'\)"),
    ],
)
def test_schedules_that_do_not_exist(data: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_schedule(data, HARMONICS_SCHEDULES)


def test_limits_are_said() -> None:
    with pytest.raises(ScheduleError, match="a cuda schedule cannot run on"):
        build_harmonics(L3, HarmonicsCudaSchedule())
    with pytest.raises(ScheduleError, match="threads=256 exceeds the .* cores"):
        build_harmonics(L3, HarmonicsHostSchedule(threads=256))
    with pytest.raises(ScheduleError, match=r"schedules are named \['sideways'\]"):
        build_harmonics(L3, {"sideways": HarmonicsHostSchedule()})
    wide = HarmonicsSpec(PROBLEMS[-1], DOUBLE_BACKWARD["xg"], HarmonicsCudaSchedule(512), "float64", FACTS)
    with pytest.raises(ScheduleError, match="needs 1384448 bytes of shared memory; there are 232448: take smaller"):
        harmonics_plan(wide)
    with pytest.raises(ScheduleError, match="block_size x min_blocks = 8192 threads"):
        harmonics_plan(dataclasses.replace(wide, schedule=HarmonicsCudaSchedule(512, "none", 16)))
    with pytest.raises(ScheduleError, match="dtype is 'float16'"):
        dataclasses.replace(wide, dtype="float16")


def test_the_default_of_a_gpu_is_legal_and_staged_where_two_blocks_fit() -> None:
    many = HarmonicsProblem((10,) * 40, "component", True)
    for arch in ("sm_80", "sm_90"):
        facts = cuda_facts(arch)
        for problem in (*PROBLEMS, many):
            for direction in EACH:
                schedule = default_harmonics_schedule(problem, direction, "float64", facts)
                plan = harmonics_plan(HarmonicsSpec(problem, direction, schedule, "float64", facts))
                assert 2 * plan.shared_bytes <= facts.shared_per_unit
                # Rows up to l = 12 in float64 fit twice for some directions and devices.
                assert problem == PROBLEMS[-1] or (schedule.staging == "none") is (problem is many)
