"""Kernels that zero their own outputs: they add nothing before the zeros are written."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import struct
import threading
import types
from typing import Any

import pytest
import torch
from cuda_emulator import run_direction
from reference import assert_matches_e3nn, expected, make_case, relative_error
from vector_cases import expected as of_vectors
from vector_cases import vectors_case, without_zero_vector

from autotune.measure.space import search_space
from autotune.workload.config import load_problems
from kernelgen.arithmetic.directions import DIRECTIONS, backward
from kernelgen.compile.compiler import compile_source
from kernelgen.device import cuda_facts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.dispatch import emit, make_plan
from kernelgen.kernels.product.schedule import CudaSchedule, schedule_from_dict
from kernelgen.kernels.source import included
from kernelgen.kernels.spec import BUFFERS, Spec
from kernelgen.ops.product import build
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime import call as memory
from kernelgen.runtime import kernel as driver
from kernelgen.runtime import kernel as launch
from kernelgen.runtime import kernel as zeros
from kernelgen.runtime.call import Checks, Runner
from kernelgen.runtime.kernel import load_kernel

FACTS = cuda_facts("sm_90")
PROBLEM = TensorProductProblem.channelwise("64x0e+32x1e+8x2e", "0e+1e+2e", "0e+1e+2e")
GRADIENTS = ["backward", "edge_backward", "joint_backward", "double_backward"]
FORMS = {
    "atomics": CudaSchedule(accumulate="atomics", edges_per_chunk=2, path_groups=3, block_size=32),
    "staged": CudaSchedule(
        accumulate="atomics", edges_per_chunk=8, path_groups=3, edge_operand="shared", prefetch="reload"
    ),
    "ring": CudaSchedule(prefetch="ring2", edges_per_warp=4, path_groups=4, stage_edges=8),
    "split-nodes": CudaSchedule(teams_per_node=4, path_groups=3, edge_operand="shared"),
    "alone": CudaSchedule(order="sender", path_groups=4, edges_per_warp=2, stage_edges=16, block_size=512),
    "plain": CudaSchedule(path_groups=4, edges_per_warp=2, edges_per_chunk=2, stage_edges=4, warps_per_edge=2),
    "by-sender": CudaSchedule(order="sender", path_groups=4, teams_per_node=2, edges_per_warp=2, stage_edges=16),
}


def spec_of(direction: str, schedule: CudaSchedule, arch: str = "sm_90", operation: str = "conv") -> Spec:
    kernel = (PROBLEM, DIRECTIONS[direction], schedule, operation, "float32", "ir_mul", "int64", cuda_facts(arch))
    return Spec(*kernel)


def inside(schedule: CudaSchedule) -> CudaSchedule:
    return dataclasses.replace(schedule, zeros="inside")


@pytest.mark.parametrize("direction", GRADIENTS)
@pytest.mark.parametrize("form", FORMS)
def test_against_e3nn(form: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs begin as NaN. Small blocks are several that write zeros, large ones one."""
    monkeypatch.setattr("kernelgen.kernels.product.plan.REGISTER_SLACK", 10)
    operation = "plain" if form == "plain" else "conv"
    case = make_case(PROBLEM, operation, edges=12, nodes=20)  # some nodes have no edges
    results = run_direction(case, DIRECTIONS[direction], operation, "ir_mul", "float64", inside(FORMS[form]))
    wanted = expected(case, direction)
    errors = {slot: relative_error(results[slot], wanted[slot]) for slot in wanted}
    assert max(errors.values()) < 1e-10, errors


ODD = TensorProductProblem.channelwise("6x0e+5x1o", "0e+1o", "0e+1o", shared_weights=True)
SHARED = {
    "receiver": CudaSchedule(path_groups=2, teams_per_node=4),
    "sender": CudaSchedule(order="sender", teams_per_node=4, path_groups=2),
    "runs": CudaSchedule(accumulate="atomics", edges_per_chunk=4, path_groups=2),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", SHARED)
def test_sums_of_shared_weights_and_rows_of_odd_length(form: str, dtype: str) -> None:
    """Teams without edges add too, and arrays end within 16 bytes."""
    case = make_case(ODD, "conv", edges=13, nodes=21)
    results = run_direction(case, DIRECTIONS["backward"], "conv", "ir_mul", dtype, inside(SHARED[form]))
    for slot, wanted in expected(case, "backward").items():
        assert relative_error(results[slot], wanted) < (1e-5 if dtype == "float32" else 1e-10), slot


@pytest.mark.parametrize("outputs", ["w", "y", "x", "xw"])
def test_gradients_asked_for_alone(outputs: str) -> None:
    """Those of shared weights have as many elements for any graph."""
    case, direction = make_case(ODD, "conv", edges=13, nodes=21), backward(outputs)
    results = run_direction(case, direction, "conv", "ir_mul", "float64", inside(SHARED["runs"]))
    wanted = expected(case, "backward")
    assert set(results) == set(outputs)
    assert max(relative_error(results[slot], wanted[slot]) for slot in outputs) < 1e-10
    spec = Spec(ODD, direction, inside(SHARED["runs"]), "conv", "float32", "ir_mul", "int64", FACTS)
    assert compile_source(emit(make_plan(spec)), FACTS).resources["registers"] > 0


def test_harmonics_formed_inside() -> None:
    """Gradients of vectors have three columns, whatever the harmonics have."""
    product, unit = TensorProductProblem.channelwise("6x0e+6x1o", "0e+1o+2e", "0e+1o+2e"), (0, 1, 2)
    harmonics = HarmonicsProblem(unit, "component", True)
    case = vectors_case("conv", product, edges=11, nodes=9, num_out=9)
    schedule = CudaSchedule(accumulate="atomics", edges_per_chunk=2, path_groups=3, zeros="inside")
    results = run_direction(case, backward(), "conv", "ir_mul", "float64", schedule, harmonics=harmonics)
    for slot, wanted in of_vectors(case, harmonics, backward()).items():
        pair = (without_zero_vector(slot, rows) for rows in (results[slot], wanted))
        assert relative_error(*pair) < 1e-10, slot


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("direction", GRADIENTS)
@pytest.mark.parametrize("form", FORMS)
def test_the_compiler_takes_it(form: str, direction: str) -> None:
    operation = "plain" if form == "plain" else "conv"
    plan = make_plan(spec_of(direction, inside(FORMS[form]), operation=operation))
    assert "await_zeros" in emit(plan).text
    assert "__threadfence" not in emit(plan).text, "behind one, sums become reads of what was there"
    assert compile_source(emit(plan), FACTS).resources["registers"] > 0
    assert "await_zeros" not in emit(make_plan(spec_of(direction, FORMS[form], operation=operation))).text


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
def test_other_architectures_take_it(arch: str) -> None:
    source = emit(make_plan(spec_of("backward", inside(FORMS["atomics"]), arch)))
    assert compile_source(source, cuda_facts(arch)).resources["registers"] > 0


def test_where_it_is_refused() -> None:
    """For kernels that do not wait: such a schedule in a foreign database would add to memory not yet zeroed."""
    pairs = TensorProductProblem.from_instructions(
        "4x0e", "1x0e", "4x0e", [(0, 0, 0, "uvw", True)], shared_weights=False
    )
    narrow = TensorProductProblem.channelwise("32x0e+32x1o", "0e+1o+2e", "0e+1o+2e")
    owners = CudaSchedule(accumulate="owners", block_size=64)
    for problem, schedule in ((narrow, owners), (pairs, CudaSchedule(accumulate="atomics"))):
        spec = spec_of("backward", inside(schedule))
        with pytest.raises(ScheduleError, match="does not wait"):
            make_plan(dataclasses.replace(spec, problem=problem))
    for arch in ("sm_80", "sm_100"):
        assert make_plan(spec_of("backward", inside(FORMS["atomics"]), arch)).zeroed


def test_of_a_kernel_that_adds_to_nothing_it_means_nothing() -> None:
    """A tuned backward with only the gradients of weights is neither an error nor a separate trial."""
    schedule = inside(FORMS["atomics"])
    plan = make_plan(dataclasses.replace(spec_of("backward", schedule), direction=backward("w")))
    assert plan.spec.schedule == FORMS["atomics"] and not plan.zeroed
    owners = CudaSchedule(accumulate="owners", path_groups=4, warps_per_edge=2)
    of_x = make_plan(spec_of("source_backward", inside(owners)))
    assert of_x == make_plan(spec_of("source_backward", owners))
    assert of_x.owner == "sender" and of_x.spec.schedule.accumulate == "registers"
    space = search_space(PROBLEM, "conv", "forward", "float32", FACTS, num_edges=300)
    told = space.broken_limit(inside(CudaSchedule(path_groups=3)))
    assert told is not None and "makes the kernel of" in told


def test_it_is_searched_where_launches_decide() -> None:
    def is_searched(direction: str, num_edges: int, operation: str = "conv", **options: bool) -> bool:
        space = search_space(PROBLEM, operation, direction, "float32", FACTS, num_edges=num_edges, **options)
        return "zeros" in space.knobs

    assert all(is_searched(direction, 300) for direction in GRADIENTS if direction != "double_backward")
    assert not is_searched("forward", 300) and not is_searched("backward", 100_000)
    assert not is_searched("backward", 300, deterministic=True)
    assert is_searched("backward", 100_000, "plain") and not is_searched("forward", 100_000, "plain")


def test_records_without_it_read_as_ever() -> None:
    """Stored schedules and kernel texts do not name knobs that were added later."""
    plain, changed = CudaSchedule(), CudaSchedule(zeros="inside")
    assert "zeros" not in plain.key and "zeros" not in plain.to_dict() and "zeros=inside" in changed.key
    for schedule in (plain, changed):
        assert schedule_from_dict(schedule.to_dict()) == schedule
    with pytest.raises(ScheduleError, match="zeros"):
        schedule_from_dict({**plain.to_dict(), "zeros": 1})


def test_each_launch_has_a_number_and_each_stream_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"stream": 0, "capturing": False}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: now["stream"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: now["capturing"], raising=False)
    monkeypatch.setattr(zeros, "_lines", {})
    monkeypatch.setattr(zeros, "_unused", {})
    monkeypatch.setattr(zeros, "_AT_A_TIME", 2)
    monkeypatch.setattr(zeros, "_cleared_in_the_graph", lambda device: torch.zeros(2, dtype=torch.int64))
    made = iter(range(1 << 20, 1 << 30, 1 << 20))
    monkeypatch.setattr(zeros, "clean_memory", lambda device, size: next(made))

    def launch(device: int = 0, **changed: int) -> zeros.FlaggedLaunch:
        now.update({"stream": 0, "capturing": False} | changed)
        return zeros.next_launch(device)

    first, again, other, elsewhere = launch(), launch(), launch(stream=64), launch(device=1)
    captured = [launch(capturing=True) for _ in range(2)]
    of_a_thread = [launch(stream=2) for _ in range(2)]
    of_threads: list[zeros.FlaggedLaunch] = []
    thread = threading.Thread(target=lambda: of_threads.append(launch(stream=2)))
    thread.start()
    thread.join()
    assert first.address == again.address and of_a_thread[0].address == of_a_thread[1].address
    different = [first, other, elsewhere, *captured, of_a_thread[0], *of_threads]
    assert len({launch.address for launch in different}) == len(different)
    assert [launch.kept is not None for launch in different] == 3 * [False] + 2 * [True] + 2 * [False]
    assert all(launch.kept is not None and launch.kept.data_ptr() == launch.address for launch in captured)
    launches = [first, again, other, elsewhere, *captured, *of_a_thread, *of_threads]
    assert [launch.number - first.number for launch in launches] == list(range(len(launches)))
    constants = re.search(r"constexpr int LINE = (\d+), COPIES = (\d+);", included("product.cuh:zero_outputs"))
    assert constants is not None
    line, copies = map(int, constants.groups())
    assert 8 * line * (1 + copies) == zeros._SPACING and first.address - other.address in (
        -zeros._SPACING,
        zeros._SPACING,
    )


def test_a_launch_hands_over_its_lines_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind all buffers and sizes; results are then not filled before."""
    given: list[tuple] = []

    def launch_on(device: int, function: object, handle: int, shape: tuple, arguments: ctypes.Array) -> int:
        block = ctypes.string_at(arguments[1], ctypes.c_size_t.from_address(arguments[3]).value)
        given.append(struct.unpack(f"<{len(block) // 8}Q", block))
        return 0

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(launch, "next_launch", lambda device: zeros.FlaggedLaunch(None, 4096, 7))
    monkeypatch.setattr(launch, "launch_on", launch_on)
    monkeypatch.setattr(launch, "launch_function", lambda: None)
    for schedule, added in (FORMS["atomics"], ()), (inside(FORMS["atomics"]), (4096, 7)):
        plan = make_plan(spec_of("backward", schedule))
        launch._CudaRun(plan, types.SimpleNamespace(handle=1))(range(len(BUFFERS)), 300, 20, 21, 0)
        assert given.pop() == (*range(len(BUFFERS)), 300, 20, 21, *added)
        runner = Runner(plan.spec, Checks(PROBLEM, "conv", torch.float32, "cuda"))
        assert runner.start is (memory.empty if added else memory.zeros) and runner.zeroed == "xy"
        shapes = {"x": (20, PROBLEM.dim_in1), "y": (300, 9), "w": (300, PROBLEM.weight_numel)}
        assert bool(runner._layout(shapes).together) is not added, "one fill for both, if they are filled"


class Config(ctypes.Structure):
    """``CUlaunchConfig`` of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)),
    )


def test_what_the_driver_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed configuration is the driver's structure; another thread has its own."""
    given: list[tuple] = []

    def called(address: int, handle: int, parameters: None, extra: str) -> int:
        config = Config.from_address(address)
        shape = [getattr(config, name) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared", "stream", "count")]
        given.append((shape, handle, parameters, extra, address))
        return 7

    monkeypatch.setattr(driver, "_library", lambda: types.SimpleNamespace(cuLaunchKernelEx=called))
    make: Any = driver.launch_function.__wrapped__
    launch = make()
    assert launch(99, (5, 64, 4096), 1 << 40, "extra") == 7
    thread = threading.Thread(target=launch, args=(99, (6, 32, 0), 0, "more"))
    thread.start()
    thread.join()
    assert given[0][:-1] == ([5, 1, 1, 64, 1, 1, 4096, 1 << 40, 0], 99, None, "extra")
    assert given[1][:-1] == ([6, 1, 1, 32, 1, 1, 0, None, 0], 99, None, "more")
    assert given[0][-1] != given[1][-1]
    assert ctypes.sizeof(Config) == driver._Config.packer.size


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelgen.kernels.product.plan.REGISTER_SLACK", 4)
    schedules = dict.fromkeys(GRADIENTS[:3], inside(FORMS[form]))
    operation = "plain" if form == "plain" else "conv"
    operator = build(PROBLEM, schedules, operation=operation, dtype=dtype, layout="ir_mul", device="cuda")
    case = make_case(PROBLEM, operation, edges=300, nodes=20, num_out=20)
    assert_matches_e3nn(operator, case, schedules, 1e-5 if dtype == torch.float32 else 1e-10, "cuda")


@pytest.mark.gpu
def test_on_a_gpu_in_memory_that_holds_anything_many_times() -> None:
    """Launches behind each other, on the autograd thread, replayed from a graph, and all of these on two streams."""
    problem = load_problems()["mace-mp-medium"]
    schedule = CudaSchedule(accumulate="atomics", edges_per_chunk=1, path_groups=4, zeros="inside")
    schedules = dict.fromkeys(("backward", "edge_backward"), schedule)
    operator = build(problem, schedules, layout="ir_mul", device="cuda")
    assert load_kernel(operator.specs("backward")[-1]).plan.spec.schedule == schedule
    case = make_case(problem, "conv", edges=300, nodes=20, num_out=20)
    x, y, w, g = (case.tensors[name].float().cuda() for name in "xywg")
    sender, receiver = case.sender.cuda(), case.receiver.cuda()
    torch.cuda.synchronize()

    def gradients() -> tuple[torch.Tensor, ...]:
        inputs = [t.detach().requires_grad_() for t in (x, y, w)]
        return torch.autograd.grad(operator(*inputs, sender, receiver, num_out=20), inputs, g)

    def check(found: tuple[torch.Tensor, ...]) -> None:
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        wanted = gradients()
        for _ in range(300):
            for like in wanted:
                torch.full_like(like, float("nan"))  # freed at once: what is allocated next
            check(gradients())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        kept = gradients()
    for _ in range(100):
        for tensor in kept:
            tensor.fill_(float("nan"))
        with torch.cuda.stream(side):
            beside = gradients()
        graph.replay()
        check(kept)
        side.synchronize()
        check(beside)
