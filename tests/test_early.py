"""Kernels that begin beside the one that fills their zeros: nothing is added or kept before those are there."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import types

import pytest
import torch
from cuda_emulator import run_direction
from reference import assert_matches_e3nn, expected, make_case, relative_error

from autotune.config_tables import load_problems
from autotune.space import search_space
from kernelgen import CudaSchedule, TensorProductProblem, build, driver, fill
from kernelgen.compile import compile_source
from kernelgen.device import cuda_facts
from kernelgen.direction import DIRECTIONS
from kernelgen.emit import emit
from kernelgen.errors import ScheduleError
from kernelgen.launch import load_kernel
from kernelgen.plan import make_plan
from kernelgen.schedule import schedule_from_dict
from kernelgen.source import Source
from kernelgen.spec import Spec

FACTS = cuda_facts("sm_90")
PROBLEM = TensorProductProblem.channelwise("64x0e+32x1e+8x2e", "0e+1e+2e", "0e+1e+2e")
GRADIENTS = ["backward", "edge_backward", "joint_backward", "double_backward"]
FORMS = {
    "atomics": CudaSchedule(accumulate="atomics", edges_per_chunk=2, path_groups=3),
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


def early(form: str) -> CudaSchedule:
    return dataclasses.replace(FORMS[form], early=True)


@pytest.mark.parametrize("direction", GRADIENTS)
@pytest.mark.parametrize("form", FORMS)
def test_zeros_that_come_as_late_as_can_be(form: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the first lane waits outputs hold NaN; then they are cleared, with whatever was written before."""
    monkeypatch.setattr("kernelgen.plan.REGISTER_SLACK", 10)
    operation = "plain" if form == "plain" else "conv"
    case = make_case(PROBLEM, operation, edges=12, nodes=20)  # some nodes have no edges
    results = run_direction(case, DIRECTIONS[direction], operation, "ir_mul", "float64", early(form))
    wanted = expected(case, direction)
    errors = {slot: relative_error(results[slot], wanted[slot]) for slot in wanted}
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("direction", GRADIENTS)
@pytest.mark.parametrize("form", FORMS)
def test_the_compiler_takes_it(form: str, direction: str) -> None:
    operation = "plain" if form == "plain" else "conv"
    plan = make_plan(spec_of(direction, early(form), operation=operation))
    text = emit(plan).text
    assert "griddepcontrol.wait" in text
    assert compile_source(emit(plan), FACTS).resources["registers"] > 0
    assert "griddepcontrol" not in emit(make_plan(spec_of(direction, FORMS[form], operation=operation))).text


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernel_of_zeros_compiles(arch: str) -> None:
    resources = compile_source(Source(fill.SOURCE, "cuda", fill.ENTRY), cuda_facts(arch)).resources
    assert resources["registers"] <= 32 and not resources["spill_bytes"]


def test_where_it_makes_no_sense() -> None:
    def broken(direction: str, schedule: CudaSchedule, **where: str) -> str:
        with pytest.raises(ScheduleError) as raised:
            make_plan(spec_of(direction, dataclasses.replace(schedule, early=True), **where))
        return str(raised.value)

    assert "needs sm_90" in broken("backward", FORMS["atomics"], arch="sm_80")
    assert "adds to none" in broken("forward", CudaSchedule(path_groups=3))
    narrow = TensorProductProblem.channelwise("32x0e+32x1o", "0e+1o+2e", "0e+1o+2e")
    for operation, accumulate in (("conv", "owners"), ("plain", "registers")):
        schedule = CudaSchedule(accumulate=accumulate, edges_per_chunk=1, block_size=64, early=True)
        with pytest.raises(ScheduleError, match="adds to none"):
            make_plan(dataclasses.replace(spec_of("backward", schedule, operation=operation), problem=narrow))


def test_kernels_of_pairs_may_not() -> None:
    """They do not wait: one from a foreign database would add to memory that is not zero yet."""
    pairs = TensorProductProblem.from_instructions(
        "4x0e", "1x0e", "4x0e", [(0, 0, 0, "uvw", True)], shared_weights=False
    )
    for arch, told in (("sm_90", "does not wait"), ("sm_80", "needs sm_90")):
        for early in (False, True):
            spec = spec_of("backward", CudaSchedule(accumulate="atomics", early=early), arch)
            spec = dataclasses.replace(spec, problem=pairs)
            if early:
                with pytest.raises(ScheduleError, match=told):
                    make_plan(spec)
            else:
                make_plan(spec)


def test_it_is_searched_where_launches_decide() -> None:
    def has(direction: str, num_edges: int, arch: str = "sm_90", operation: str = "conv", **options: bool) -> bool:
        facts = cuda_facts(arch)
        space = search_space(PROBLEM, operation, direction, "float32", facts, num_edges=num_edges, **options)
        return "early" in space.knobs

    assert all(has(direction, 300) for direction in GRADIENTS if direction != "double_backward")
    assert not has("forward", 300) and not has("backward", 100_000) and not has("backward", 300, "sm_80")
    assert not has("backward", 300, deterministic=True)
    assert has("backward", 100_000, operation="plain") and not has("forward", 100_000, operation="plain")


def test_records_without_it_read_as_ever() -> None:
    """Stored schedules and the texts of kernels do not name a knob that is younger than they are."""
    plain, changed = CudaSchedule(), CudaSchedule(early=True)
    assert "early" not in plain.key and "early" not in plain.to_dict() and "early=True" in changed.key
    for schedule in (plain, changed):
        assert schedule_from_dict(schedule.to_dict()) == schedule
    with pytest.raises(ScheduleError, match="early"):
        schedule_from_dict({**plain.to_dict(), "early": 1})


class Attribute(ctypes.Structure):
    """``CUlaunchAttribute`` of cuda.h."""

    _fields_ = (("number", ctypes.c_int), ("unused", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """``CUlaunchConfig`` of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint)),
    )


def test_what_the_driver_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed configuration is the driver's structure; another thread has its own."""
    given: list[tuple] = []

    def called(address: int, handle: int, parameters: None, extra: str) -> int:
        config = Config.from_address(address)
        shape = [getattr(config, name) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared", "stream", "count")]
        attribute = config.attributes[0]
        given.append((shape, attribute.number, list(attribute.value), handle, parameters, extra, address))
        return 7

    monkeypatch.setattr(driver, "_library", lambda: types.SimpleNamespace(cuLaunchKernelEx=called))
    monkeypatch.setattr(driver, "early_launch_function", driver.early_launch_function.__wrapped__)
    launch = driver.early_launch_function()
    assert launch(99, 5, 1, 1, 64, 1, 1, 4096, 1 << 40, None, "extra") == 7
    thread = threading.Thread(target=launch, args=(99, 6, 1, 1, 32, 1, 1, 0, None, None, "more"))
    thread.start()
    thread.join()
    assert given[0][:-1] == ([5, 1, 1, 64, 1, 1, 4096, 1 << 40, 1], 6, [1] + 15 * [0], 99, None, "extra")
    assert given[1][:-1] == ([6, 1, 1, 32, 1, 1, 0, None, 1], 6, [1] + 15 * [0], 99, None, "more")
    assert given[0][-1] != given[1][-1]
    assert ctypes.sizeof(Config) == driver._EarlyLaunch.packer.size


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelgen.plan.REGISTER_SLACK", 4)
    schedules = dict.fromkeys(GRADIENTS[:3], early(form))
    operation = "plain" if form == "plain" else "conv"
    operator = build(PROBLEM, schedules, operation=operation, dtype=dtype, layout="ir_mul", device="cuda")
    case = make_case(PROBLEM, operation, edges=300, nodes=20, num_out=20)
    assert_matches_e3nn(operator, case, schedules, 1e-5 if dtype == torch.float32 else 1e-10, "cuda")


@pytest.mark.gpu
def test_on_a_gpu_in_memory_that_holds_anything_many_times() -> None:
    """Launches behind each other, on the autograd thread and replayed from a graph."""
    problem = load_problems()["mace-mp-medium"]
    schedules = {
        name: CudaSchedule(accumulate="atomics", edges_per_chunk=1, path_groups=4, early=True)
        for name in ("backward", "edge_backward")
    }
    operator = build(problem, schedules, layout="ir_mul", device="cuda")
    assert load_kernel(operator.specs("backward")[-1]).plan.spec.schedule.early
    case = make_case(problem, "conv", edges=300, nodes=20, num_out=20)
    x, y, w, g = (case.tensors[name].float().cuda() for name in "xywg")
    sender, receiver = case.sender.cuda(), case.receiver.cuda()
    inputs = [t.requires_grad_() for t in (x, y, w)]
    out = operator(*inputs, sender, receiver, num_out=20)
    wanted = torch.autograd.grad(out, inputs, g, retain_graph=True)
    for _ in range(300):
        for like in wanted:
            torch.full_like(like, float("nan"))  # freed at once: what is allocated next
        found = torch.autograd.grad(out, inputs, g, retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The gradients are run on the stream of the forward: both or none are captured.
        out = operator(*inputs, sender, receiver, num_out=20)
        kept = torch.autograd.grad(out, inputs, g, retain_graph=True)
    for _ in range(20):
        for tensor in kept:
            tensor.fill_(float("nan"))
        graph.replay()
        for a, b in zip(kept, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
