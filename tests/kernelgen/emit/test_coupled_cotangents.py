"""Gradients of fused radial convolutions with coupled cotangents in tensor cores: lane by lane, against e3nn."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cuda_emulator import FACTS
from emulated_radial import run_radial
from radial_cases import RadialCase, make_radial_case
from reference import relative_error

from autotune.workload.config import load_problems
from kernelgen.arithmetic.directions import backward, forward
from kernelgen.compile.compiler import compile_source
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.dispatch import emit
from kernelgen.kernels.radial.plan import RadialPlan, RadialSchedule, RadialSpec, default_radial_schedule, radial_plan
from kernelgen.problem.product import TensorProductProblem

SUITE = load_problems()
SMALL = TensorProductProblem.channelwise("6x0e+6x1o", "0e+1o", "0e+1o")
# Blocks of different multiplicities, of which the last channels of a slice are missing; a row of y of odd length.
UNEVEN = TensorProductProblem.channelwise("18x0e+4x1o+2x2e", "0e+1o+2e", "0e+1o+2e")
# Seven components of x, y and g; long chains of products; two parts of 16 channels.
DEEP = TensorProductProblem.channelwise("24x1o+24x3o", "0e+1o+2e+3o", "1o+2e+3o")
CASES = {"small": (SMALL, 1), "uneven": (UNEVEN, 3), "deep": (DEEP, 1)}
BY_ATTRIBUTES = {"order": "in2", "edge_values": "reloaded"}


def assert_right(given: RadialCase, outputs: str, tolerance: float, schedule: RadialSchedule, *how: Any) -> None:
    wanted = given.expected()
    for name, value in run_radial(given, backward(outputs), schedule, *how).items():
        assert relative_error(value, wanted[name]) < tolerance, (name, relative_error(value, wanted[name]))


def plan_of(problem: TensorProductProblem, facts: DeviceFacts = FACTS, hidden: int = 8, **knobs: Any) -> RadialPlan:
    spec = RadialSpec(problem, hidden, backward("xyw"), RadialSchedule(**knobs), "ieee", "ir_mul", "int64", facts)
    return radial_plan(spec)


@pytest.mark.covering(2)
@pytest.mark.parametrize("knobs", [{}, BY_ATTRIBUTES | {"slices": 2}], ids=["plain", "by_attributes"])
@pytest.mark.parametrize("layout", ["ir_mul", "mul_ir"])
@pytest.mark.parametrize("coupled", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_all_gradients(name: str, coupled: int, layout: str, knobs: dict[str, Any]) -> None:
    """Receivers with less than a step of edges, several steps, more than are staged at a time; one has none."""
    problem, groups = CASES[name]
    given = make_radial_case(problem, 20, edges=75, num_out=4)
    schedule = RadialSchedule(groups, warps=2, coupled=coupled, **knobs)
    assert_right(given, "xyw", 3e-7, schedule, "ieee", layout)


@pytest.mark.parametrize("outputs", ["x", "y", "w", "xy", "yw"])
@pytest.mark.parametrize("name", CASES)
def test_some_gradients(name: str, outputs: str) -> None:
    problem, groups = CASES[name]
    given = make_radial_case(problem, 8, edges=40, num_out=3)
    assert_right(given, outputs, 3e-7, RadialSchedule(groups, warps=2, coupled=2, **BY_ATTRIBUTES))


@pytest.mark.parametrize("hidden", [4, 32, 64, 128])
def test_hidden_sizes(hidden: int) -> None:
    """Few edges a receiver: 12 edges of 9 receivers."""
    given = make_radial_case(SMALL, hidden, edges=12, num_out=9)
    assert_right(given, "xyw", 3e-7, RadialSchedule(2, warps=2, coupled=2))


@pytest.mark.parametrize("edges", [1, 15, 16, 17, 33])
def test_numbers_of_edges(edges: int) -> None:
    given = make_radial_case(SMALL, 8, edges=edges, num_out=2)
    assert_right(given, "xyw", 3e-7, RadialSchedule(warps=2, coupled=1))


def test_one_product_has_the_errors_of_tf32() -> None:
    for problem, groups in CASES.values():
        given, schedule = make_radial_case(problem, 32, edges=30), RadialSchedule(groups, warps=2, coupled=2)
        assert_right(given, "xyw", 5e-4, schedule, "tf32")
        with pytest.raises(AssertionError):
            assert_right(given, "xyw", 1e-5, schedule, "tf32")


def spread(case: RadialCase, slot: str, powers: float) -> RadialCase:
    """The case with rows of x, y, g or h that differ by up to 10**powers, in both directions."""
    rows = case.h if slot == "h" else case.case.tensors[slot]
    generator = torch.Generator().manual_seed(3)
    factors = 10 ** (powers * (2 * torch.rand(len(rows), 1, generator=generator, dtype=torch.float64) - 1))
    if slot == "h":
        return dataclasses.replace(case, h=rows * factors)
    tensors = case.case.tensors | {slot: rows * factors}
    return dataclasses.replace(case, case=dataclasses.replace(case.case, tensors=tensors))


@pytest.mark.parametrize("slot", ["x", "y", "g", "h"])
@pytest.mark.parametrize("powers", [3.0, 12.0])
def test_each_edge_is_accurate_whatever_the_others_are(slot: str, powers: float) -> None:
    """Gradients of y and h of each edge, relative to their own size."""
    given = spread(make_radial_case(SMALL, 16, edges=40), slot, powers)
    found = run_radial(given, backward("xyw"), RadialSchedule(warps=2, coupled=2, **BY_ATTRIBUTES))
    wanted = given.expected()
    for name in "yh":
        errors = (found[name].double() - wanted[name]).norm(dim=1)
        assert (errors <= 2e-6 * wanted[name].norm(dim=1)).all(), name
    assert relative_error(found["x"], wanted["x"]) < 5e-7


@pytest.mark.parametrize("size", [1e-20, 1e15])
@pytest.mark.parametrize("slots", ["hm", "gm", "xm", "gx", "yx"])
def test_any_size_of_the_operands(slots: str, size: float) -> None:
    """Halves end at 65504, and begin at 6e-8: all operands take powers of two, which never meet where they overflow."""
    given = make_radial_case(SMALL, 16, edges=20)
    tensors = dict(given.case.tensors)
    factors = dict(zip(slots, (size, 1 / size), strict=True))
    tensors |= {slot: tensors[slot] * factor for slot, factor in factors.items() if slot in tensors}
    case = dataclasses.replace(given.case, tensors=tensors)
    given = RadialCase(case, given.h * factors.get("h", 1), given.matrix * factors.get("m", 1))
    for coupled in (1, 2):
        assert_right(given, "xyw", 3e-7, RadialSchedule(warps=2, coupled=coupled))


def test_channels_of_any_size() -> None:
    """Cotangents and features of channels over 1e6: a gradient is accurate beside the largest of its kind."""
    given = make_radial_case(UNEVEN, 8, edges=40)
    generator, tensors = torch.Generator().manual_seed(5), dict(given.case.tensors)
    for slot in "xg":
        powers = 6 * torch.rand(1, tensors[slot].shape[1], generator=generator, dtype=torch.float64) - 3
        tensors[slot] = tensors[slot] * 10**powers
    given = dataclasses.replace(given, case=dataclasses.replace(given.case, tensors=tensors))
    assert_right(given, "xyw", 5e-7, RadialSchedule(3, warps=2, coupled=2, **BY_ATTRIBUTES))


def test_less_shared_memory() -> None:
    """A block then has fewer slices than asked for, and stages half as many edges."""
    most = plan_of(DEEP, warps=2, coupled=2, slices=2)
    assert most.stage == 32 and most.slices(most.product.groups[0]) == 2
    given = make_radial_case(DEEP, 8, edges=75, num_out=3)
    seen = set()
    for size in range(most.shared_bytes, 8192, -512):
        facts = dataclasses.replace(FACTS, shared_per_block=size, shared_per_unit=size + 1024)
        try:
            plan = plan_of(DEEP, facts, warps=2, coupled=2, slices=2)
        except ScheduleError:
            break
        form = plan.stage, plan.slices(plan.product.groups[0])
        assert plan.shared_bytes <= size
        if form not in seen:
            seen.add(form)
            assert_right(given, "xyw", 3e-7, plan.spec.schedule, "ieee", "ir_mul", None, facts)
    assert seen == {(32, 2), (32, 1), (16, 1)}


def test_all_groups_stage_fewer_edges_where_one_has_no_room() -> None:
    groups = {"path_groups": 3, "warps": 2, "coupled": 2}
    size = plan_of(UNEVEN, **groups).shared_bytes - 1  # the largest group's
    facts = dataclasses.replace(FACTS, shared_per_block=size, shared_per_unit=size + 1024)
    assert (plan_of(UNEVEN, **groups).stage, plan_of(UNEVEN, facts, **groups).stage) == (32, 16)


def test_which_paths_are_coupled() -> None:
    """By terms for each component of x; without coupled paths a schedule is what it was."""
    plans = {coupled: plan_of(SMALL, coupled=coupled) for coupled in (0, 1, 2)}
    found = {coupled: sorted(plan.coupled(plan.product.groups[0])) for coupled, plan in plans.items()}
    degrees = [(SMALL.in1[p.in1].l, SMALL.in2[p.in2].l, SMALL.out[p.out].l) for p in SMALL.paths]
    assert found == {0: [], 1: [0, 1, 2, 3], 2: [degrees.index((0, 1, 1))]}
    group = plans[0].product.groups[0]
    assert plans[0].coupled_rows(group) == plans[0].coupled_reals(group) == 0 and plans[2].coupled_rows(group) % 8 == 5
    assert "coupled" not in RadialSchedule().key and "coupled=2" in RadialSchedule(coupled=2).key
    spec = RadialSpec(SMALL, 8, forward(), RadialSchedule(coupled=2), "ieee", "ir_mul", "int64", FACTS)
    with pytest.raises(ScheduleError, match="coupled=2; expected 0"):
        radial_plan(spec)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_defaults_spill_little(arch: str) -> None:
    facts = cuda_facts(arch)
    spec = RadialSpec(SUITE["mace-mp-medium"], 64, backward("xyw"), RadialSchedule(), "ieee", "ir_mul", "int64", facts)
    plan = radial_plan(default_radial_schedule(spec))
    assert plan.spec.schedule.coupled == 4
    resources = compile_source(emit(plan), facts).resources
    assert resources["registers"] <= 255 and resources["spill_bytes"] <= 384


@pytest.mark.parametrize("more", [0, 1, 3])
@pytest.mark.parametrize("name", ["uneven", "deep"])
def test_blocks_with_edges_of_several_parts(name: str, more: int) -> None:
    """As many blocks as there are parts, or a few more: each has its share of the work, and loads several matrices."""
    problem, groups = CASES[name]
    schedule = RadialSchedule(groups, warps=4, coupled=2, **BY_ATTRIBUTES)
    plan = plan_of(problem, path_groups=groups, warps=4, coupled=2, **BY_ATTRIBUTES)
    facts = cuda_facts("sm_90", units=sum(map(plan.parts, plan.product.groups)) + more)
    given = make_radial_case(problem, 8, edges=150, num_out=7)
    assert_right(given, "xyw", 3e-7, schedule, "ieee", "ir_mul", None, facts)


def test_a_group_without_coupled_paths() -> None:
    """It is beside others in one kernel: only paths of 1o have more than one term for each component of x."""
    problem = TensorProductProblem.channelwise("8x0e+6x1o", "0e+1o", "1o")
    plan = plan_of(problem, path_groups=2, warps=2, coupled=4)
    assert not all(map(plan.coupled, plan.product.groups))
    given = make_radial_case(problem, 8, edges=50, num_out=3)
    for coupled in (2, 4):
        assert_right(given, "xyw", 3e-7, RadialSchedule(2, warps=2, coupled=coupled))
