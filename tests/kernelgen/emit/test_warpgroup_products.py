"""Gradients of fused radial convolutions whose warps multiply four at a time (wgmma): lane by lane, against e3nn.

The emulator reads operands in shared memory as their descriptors say, gives sums only to who waits for them, and stops
where warps of four do not come to the same place. It does not see what the assembler makes of registers: that is tested
by its own remarks.
"""

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
from kernelgen.kernels.dispatch import emit, geometry
from kernelgen.kernels.knobs import read_schedule
from kernelgen.kernels.radial.plan import RadialPlan, RadialSchedule, RadialSpec, default_radial_schedule, radial_plan
from kernelgen.problem.product import TensorProductProblem

SUITE = load_problems()
SMALL = TensorProductProblem.channelwise("6x0e+6x1o", "0e+1o", "0e+1o")
# Blocks of different multiplicities, of which the last channels of a slice are missing; a row of y of odd length.
UNEVEN = TensorProductProblem.channelwise("18x0e+4x1o+2x2e", "0e+1o+2e", "0e+1o+2e")
# Nine paths of seven components: an odd number of gradients for hidden features, in several chains.
DEEP = TensorProductProblem.channelwise("24x1o+24x3o", "0e+1o+2e+3o", "1o+2e+3o")
CASES = {"small": (SMALL, 1), "uneven": (UNEVEN, 3), "deep": (DEEP, 1)}
BY_ATTRIBUTES = {"order": "in2", "edge_values": "reloaded"}


def schedule_of(groups: int = 1, **knobs: Any) -> RadialSchedule:
    return RadialSchedule(groups, **({"warps": 4, "coupled": 2, "products": "wgmma"} | knobs))


def assert_right(given: RadialCase, outputs: str, tolerance: float, schedule: RadialSchedule, *how: Any) -> None:
    wanted = given.expected()
    for name, value in run_radial(given, backward(outputs), schedule, *how).items():
        assert relative_error(value, wanted[name]) < tolerance, (name, relative_error(value, wanted[name]))


def plan_of(problem: TensorProductProblem, facts: DeviceFacts = FACTS, hidden: int = 8, **knobs: Any) -> RadialPlan:
    groups = knobs.pop("path_groups", 1)
    spec = RadialSpec(problem, hidden, backward("xyw"), schedule_of(groups, **knobs), "ieee", "ir_mul", "int64", facts)
    return radial_plan(spec)


def test_in_tf32_shared_memory_has_one_half_of_each_value() -> None:
    ieee = plan_of(SMALL)
    tf32 = radial_plan(dataclasses.replace(ieee.spec, accuracy="tf32"))
    group = ieee.product.groups[0]
    assert ieee.coupled_reals(group) == 2 * tf32.coupled_reals(group) > 0
    assert ieee.hidden_halves == 2 * tf32.hidden_halves > 0


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", ["ir_mul", "mul_ir"])
@pytest.mark.parametrize("paths_at_once", [1, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_all_gradients(name: str, paths_at_once: int, layout: str) -> None:
    """Receivers with less than a step of edges, several steps, more than are staged at a time; one has none."""
    problem, groups = CASES[name]
    given = make_radial_case(problem, 20, edges=75, num_out=4)
    knobs = {} if paths_at_once == 3 else BY_ATTRIBUTES | {"slices": 2}
    schedule = schedule_of(groups, paths_at_once=paths_at_once, **knobs)
    assert_right(given, "xyw", 3e-7, schedule, "ieee", layout)


@pytest.mark.parametrize("outputs", ["x", "y", "w", "xy", "yw"])
@pytest.mark.parametrize("name", CASES)
def test_some_gradients(name: str, outputs: str) -> None:
    """Without gradients of h there is one product, and without those of x and y the other one."""
    problem, groups = CASES[name]
    given = make_radial_case(problem, 8, edges=40, num_out=3)
    assert_right(given, outputs, 3e-7, schedule_of(groups, **BY_ATTRIBUTES))


@pytest.mark.parametrize("accuracy", ["ieee", "tf32"])
@pytest.mark.parametrize("hidden", [4, 8, 32, 64, 128])
def test_hidden_sizes(hidden: int, accuracy: str) -> None:
    """Few edges a receiver: 12 edges of 9 receivers."""
    given = make_radial_case(SMALL, hidden, edges=12, num_out=9)
    assert_right(given, "xyw", 3e-7 if accuracy == "ieee" else 6e-4, schedule_of(2), accuracy)


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("edges", [1, 15, 16, 17, 33, 65, 300])
def test_numbers_of_edges(edges: int, warps: int) -> None:
    """Fewer steps than warps, and numbers that no warp divides; a warp without edges adds nothing."""
    given = make_radial_case(SMALL, 8, edges=edges, num_out=2)
    assert_right(given, "xyw", 3e-7, schedule_of(warps=warps, coupled=1))


@pytest.mark.parametrize("channels", [32, 128])
def test_channels(channels: int) -> None:
    problem = TensorProductProblem.channelwise(f"{channels}x0e+{channels}x1o", "0e+1o", "0e+1o")
    given = make_radial_case(problem, 16, edges=40, num_out=3)
    for slices in (1, 4):
        assert_right(given, "xyw", 3e-7, schedule_of(coupled=4, slices=slices))


def of_degrees(problem: TensorProductProblem, degrees: list[int], hidden: int = 8) -> RadialCase:
    """A case whose receivers have given numbers of edges, in an order that is not theirs."""
    given = make_radial_case(problem, hidden, edges=sum(degrees), num_out=len(degrees))
    receiver = torch.repeat_interleave(torch.arange(len(degrees)), torch.tensor(degrees))
    receiver = receiver[torch.randperm(len(receiver), generator=torch.Generator().manual_seed(1))]
    return dataclasses.replace(given, case=dataclasses.replace(given.case, receiver=receiver))


@pytest.mark.parametrize(
    "degrees",
    [
        [0, 0, 200, 0],
        [1] * 70,
        [0, 3, 0, 0, 150, 1, 1, 16, 0, 33, 17, 0],
        [*(0 for _ in range(40)), 40, *(0 for _ in range(40)), 7],
    ],
    ids=["one", "ones", "skewed", "far"],
)
def test_skewed_degrees(degrees: list[int]) -> None:
    """Steps that warps divide begin in any receiver; those without edges are passed over, more than 32 at a time."""
    for units in (2, FACTS.units):
        facts = cuda_facts("sm_90", units=units)
        given = of_degrees(SMALL, degrees)
        assert_right(given, "xyw", 3e-7, schedule_of(warps=8), "ieee", "ir_mul", None, facts)


def test_a_warp_goes_from_receiver_to_receiver() -> None:
    """One block; each warp has several receivers, one of them with more edges than are staged at a time."""
    given = of_degrees(SMALL, [1, 0, 2, 70, 3, 0, 0, 17, 1, 1, 1, 5])
    assert_right(given, "xyw", 3e-7, schedule_of(), "ieee", "ir_mul", None, cuda_facts("sm_90", units=1))


def test_one_product_has_the_errors_of_tf32() -> None:
    for problem, groups in CASES.values():
        given, schedule = make_radial_case(problem, 32, edges=30), schedule_of(groups)
        assert_right(given, "xyw", 5e-4, schedule, "tf32")
        with pytest.raises(AssertionError):
            assert_right(given, "xyw", 1e-5, schedule, "tf32")


@pytest.mark.parametrize("powers", [3.0, 12.0])
def test_each_edge_is_accurate_whatever_the_others_are(powers: float) -> None:
    """Rows of h over many magnitudes, of edges that are multiplied together."""
    given = make_radial_case(SMALL, 16, edges=40)
    factors = 10 ** (powers * (2 * torch.rand(40, 1, generator=torch.Generator().manual_seed(3)).double() - 1))
    given = dataclasses.replace(given, h=given.h * factors)
    found, wanted = run_radial(given, backward("xyw"), schedule_of(**BY_ATTRIBUTES)), given.expected()
    for name in "yh":
        errors = (found[name].double() - wanted[name]).norm(dim=1)
        assert (errors <= 2e-6 * wanted[name].norm(dim=1)).all(), name
    assert relative_error(found["x"], wanted["x"]) < 5e-7


@pytest.mark.parametrize("more", [0, 1, 3])
def test_blocks_with_edges_of_several_parts(more: int) -> None:
    """As many blocks as there are parts, or a few more: each has its share of the work, and loads several matrices."""
    problem, groups = CASES["uneven"]
    plan = plan_of(problem, path_groups=groups, **BY_ATTRIBUTES)
    facts = cuda_facts("sm_90", units=sum(map(plan.parts, plan.product.groups)) + more)
    given = make_radial_case(problem, 8, edges=150, num_out=7)
    assert_right(given, "xyw", 3e-7, plan.spec.schedule, "ieee", "ir_mul", None, facts)


def test_a_group_without_coupled_paths() -> None:
    """It is beside others in one kernel: only paths of 1o have more than one term for each component of x."""
    problem = TensorProductProblem.channelwise("8x0e+6x1o", "0e+1o", "1o")
    plan = plan_of(problem, path_groups=2, coupled=4)
    assert not all(map(plan.coupled, plan.product.groups))
    given = make_radial_case(problem, 8, edges=50, num_out=3)
    for coupled in (2, 4):
        assert_right(given, "xyw", 3e-7, schedule_of(2, coupled=coupled))


def test_less_shared_memory() -> None:
    """A block then has fewer slices than asked for, and stages half as many edges."""
    most = plan_of(DEEP, slices=2)
    given, seen = make_radial_case(DEEP, 8, edges=75, num_out=3), set()
    for size in range(most.shared_bytes, 16384, -512):
        facts = dataclasses.replace(FACTS, shared_per_block=size, shared_per_unit=size + 1024)
        try:
            plan = plan_of(DEEP, facts, slices=2)
        except ScheduleError:
            break
        form = plan.stage, plan.slices(plan.product.groups[0])
        if form not in seen:
            seen.add(form)
            assert_right(given, "xyw", 3e-7, plan.spec.schedule, "ieee", "ir_mul", None, facts)
    assert seen == {(32, 2), (32, 1), (16, 1)}


def test_no_edges_are_no_blocks() -> None:
    assert geometry(plan_of(SMALL), 0, 6, 6)[0] == 0 < geometry(plan_of(SMALL), 1, 6, 6)[0]


def test_operands_lie_on_whole_blocks() -> None:
    """A descriptor has addresses and distances of 16 bytes, the latter below 2^18."""
    for hidden in (8, 64, 128):
        plan = plan_of(SUITE["mace-mp-medium"], hidden=hidden, warps=4)
        for halves in (plan.hidden_halves, plan.path_halves, plan.slice_halves(plan.product.groups[0])):
            assert 2 * halves % 128 == 0 and 2 * halves < 2**18
        assert plan.hidden_halves == 64 * 16 * plan.spec.steps * 2


def test_where_it_is_legal() -> None:
    for arch in ("sm_80", "sm_89", "sm_100", "sm_120"):
        with pytest.raises(ScheduleError, match=f"{arch} has no wgmma"):
            plan_of(SMALL, cuda_facts(arch))
    with pytest.raises(ScheduleError, match="only gradients with coupled cotangents"):
        plan_of(SMALL, coupled=0)
    with pytest.raises(ScheduleError, match="2 warps; expected a multiple of 4"):
        plan_of(SMALL, warps=2)
    with pytest.raises(ScheduleError, match="paths_at_once=2; expected 4: without products=wgmma it has no effect"):
        plan_of(SMALL, products="mma", paths_at_once=2)


def test_older_entries_load() -> None:
    """Without the knobs, which texts of schedules omit at their default values."""
    known = RadialSchedule(coupled=2).to_dict()
    assert not {"products", "paths_at_once"} & set(known)
    assert read_schedule(known, {"cuda": RadialSchedule}) == RadialSchedule(coupled=2)
    assert "products=wgmma" in schedule_of().key and read_schedule(
        schedule_of(paths_at_once=2).to_dict(), {"cuda": RadialSchedule}
    ) == schedule_of(paths_at_once=2)


def test_default_where_there_are_such_products() -> None:
    """Gradients with as many slices as without them; values with one path group more at most."""
    spec = RadialSpec(SUITE["mace-mp-medium"], 64, backward("xyw"), RadialSchedule(), "ieee", "ir_mul", "int64", FACTS)
    found = default_radial_schedule(spec)
    assert (found.schedule.products, found.schedule.paths_at_once) == ("wgmma", 10)
    value = dataclasses.replace(spec, direction=forward())
    assert default_radial_schedule(value).schedule == RadialSchedule(
        tiles=4, ahead="hidden", products="wgmma", paths_at_once=1
    )
    for one in (spec, value):
        assert default_radial_schedule(dataclasses.replace(one, facts=cuda_facts("sm_80"))).schedule.products == "mma"
        assert default_radial_schedule(dataclasses.replace(one, accuracy="tf32")).schedule.products == "wgmma"
    large = dataclasses.replace(value, problem=SUITE["mace-mp-large"])
    several = RadialSchedule(path_groups=3, tiles=4, products="wgmma", paths_at_once=2)
    assert default_radial_schedule(large).schedule == several
    one_group = RadialSchedule(tiles=2, products="wgmma", paths_at_once=1)
    assert default_radial_schedule(dataclasses.replace(large, accuracy="tf32")).schedule == one_group
    assert default_radial_schedule(dataclasses.replace(value, hidden=128)).schedule.products == "mma"
    schedule = dataclasses.replace(found.schedule, products="mma", paths_at_once=RadialSchedule.paths_at_once)
    size = radial_plan(dataclasses.replace(found, schedule=schedule)).shared_bytes
    tight = dataclasses.replace(FACTS, shared_per_block=size, shared_per_unit=size + 1024)
    assert default_radial_schedule(dataclasses.replace(spec, facts=tight)).schedule.products == "mma"


def test_its_code_is_for_one_architecture() -> None:
    assert emit(plan_of(SMALL)).arch_suffix == "a" and emit(plan_of(SMALL, products="mma")).arch_suffix == ""


@pytest.mark.slow
@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("name", "accuracy", "knobs", "most"),
    [
        ("mace-mp-medium", "ieee", {"paths_at_once": 5}, 128),
        ("mace-mp-medium", "ieee", {"paths_at_once": 10, "coupled": 2}, 192),
        ("mace-mp-medium", "tf32", {"paths_at_once": 5}, 256),
        ("mace-mp-large", "ieee", {"paths_at_once": 5}, 512),
        ("mace-mp-large", "tf32", {"paths_at_once": 10}, 384),
        ("sevennet-l3i5", "ieee", {"paths_at_once": 10}, 704),
    ],
)
def test_products_run_beside_the_rest(name: str, accuracy: str, knobs: dict[str, Any], most: int) -> None:
    """The assembler does not make each product wait for the one before, and spills little."""
    spec = RadialSpec(SUITE[name], 64, backward("xyw"), RadialSchedule(), accuracy, "ir_mul", "int64", FACTS)
    spec = default_radial_schedule(spec)
    schedule = dataclasses.replace(spec.schedule, products="wgmma", **knobs)
    resources = compile_source(emit(radial_plan(dataclasses.replace(spec, schedule=schedule))), FACTS).resources
    assert "serialized" not in resources
    assert 0 < resources["registers"] <= 255 and resources["spill_bytes"] <= most
