"""Values of fused radial convolutions whose weights four warps form by wgmma: lane by lane, against e3nn."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cuda_emulator import FACTS
from emulated_radial import run_radial
from radial_cases import GRAPHS, RadialCase, case_of, make_radial_case
from reference import relative_error

from autotune.workload.config import load_problems
from kernelgen.arithmetic.directions import forward
from kernelgen.compile.compiler import compile_source
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.dispatch import emit, geometry
from kernelgen.kernels.radial.plan import RadialPlan, RadialSchedule, RadialSpec, radial_plan
from kernelgen.problem.product import TensorProductProblem

SUITE = load_problems()
# A part of 64 channels has 6 of them; 18, 4 and 2 in groups of their own; 128 are two parts, 72 one and an eighth.
SMALL = TensorProductProblem.channelwise("6x0e+6x1o", "0e+1o", "0e+1o")
UNEVEN = TensorProductProblem.channelwise("18x0e+4x1o+2x2e", "0e+1o+2e", "0e+1o+2e")
WIDE = TensorProductProblem.channelwise("128x0e", "0e+1o", "0e+1o")
REST = TensorProductProblem.channelwise("72x0e+32x1o", "0e+1o", "0e+1o")
PROBLEMS = {"small": (SMALL, 1), "uneven": (UNEVEN, 3), "groups": (UNEVEN, 5), "wide": (WIDE, 1), "rest": (REST, 2)}
FORMS: dict[str, dict[str, Any]] = {
    "one-tile": {"paths_at_once": 1},
    "two-tiles": {"tiles": 2, "warps": 8, "edge_values": "reloaded"},
    "four-tiles": {"tiles": 4, "paths_at_once": 2},
    "ahead": {"tiles": 4, "ahead": "hidden", "edge_values": "four"},
    "two-ahead": {"tiles": 2, "ahead": "hidden", "warps": 12, "paths_at_once": 10},
}


def schedule_of(path_groups: int = 1, **knobs: Any) -> RadialSchedule:
    return RadialSchedule(path_groups, **({"warps": 4, "products": "wgmma"} | knobs))


def plan_of(problem: TensorProductProblem, facts: DeviceFacts = FACTS, hidden: int = 8, **knobs: Any) -> RadialPlan:
    schedule = schedule_of(**knobs)
    return radial_plan(RadialSpec(problem, hidden, forward(), schedule, "ieee", "ir_mul", "int64", facts))


def assert_right(given: RadialCase, schedule: RadialSchedule, *how: Any, tolerance: float = 5e-7, **more: Any) -> None:
    found = run_radial(given, forward(), schedule, *how, **more)["out"]
    assert relative_error(found, given.expected()["out"]) < tolerance


@pytest.mark.covering(2)
@pytest.mark.parametrize(("edges", "num_out"), [(100, 4), (12, 9)])
@pytest.mark.parametrize("layout", ["ir_mul", "mul_ir"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_against_e3nn(name: str, form: str, layout: str, edges: int, num_out: int) -> None:
    """Receivers with less than a tile of edges, several, more than are staged at a time; one has none."""
    problem, groups = PROBLEMS[name]
    given = make_radial_case(problem, 20, edges=edges, num_out=num_out)
    assert_right(given, schedule_of(groups, **FORMS[form]), "ieee", layout)


@pytest.mark.covering(2)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("form", ["two-tiles", "ahead"])
@pytest.mark.parametrize("name", ["small", "wide"])
def test_rows_in_memory_that_held_nan(name: str, form: str, graph: str) -> None:
    """Each is stored, added to behind the share that stored it, or zeroed; also with few blocks."""
    problem, groups = PROBLEMS[name]
    schedule = schedule_of(groups, **FORMS[form])
    assert plan_of(problem, path_groups=groups, **FORMS[form]).zeroed == frozenset()
    for is_sorted, units in ((True, 132), (False, 3)):
        given = case_of(problem, GRAPHS[graph], is_sorted=is_sorted)
        assert_right(given, schedule, facts=cuda_facts("sm_90", units=units))


def test_a_step_of_few_edges_takes_half_of_four_tiles() -> None:
    few, whole = (emit(plan_of(WIDE, tiles=tiles)).text for tiles in (4, 1))
    assert "if (count > 16)" in few and "if (count > 16)" not in whole


def test_each_warp_has_marks() -> None:
    """Of a row that shares cut; all of these say at the end that the warp's channels were stored."""
    given, plan = case_of(SMALL, [150, 0, 100]), plan_of(SMALL, warps=8)
    assert plan.marks == 4 and plan_of(WIDE).marks == 8 and plan_of(SMALL, warps=12).teams == 3
    marks = torch.zeros(plan.marks, 3)
    assert_right(given, schedule_of(warps=8), marks=marks)
    assert torch.equal(marks.view(torch.int32), torch.tensor([2, 0, 2], dtype=torch.int32).expand(4, 3))


@pytest.mark.covering(1)
@pytest.mark.parametrize("hidden", [4, 32, 64, 128])
@pytest.mark.parametrize("form", FORMS)
def test_hidden_sizes(form: str, hidden: int) -> None:
    given = case_of(SMALL, [20, 0, 3, 37], hidden)
    assert_right(given, schedule_of(**FORMS[form]))


@pytest.mark.parametrize("form", FORMS)
def test_one_product_has_the_errors_of_tf32(form: str) -> None:
    given = make_radial_case(SMALL, 64, edges=30)
    assert_right(given, schedule_of(**FORMS[form]), "tf32", tolerance=5e-4)
    with pytest.raises(AssertionError):
        assert_right(given, schedule_of(**FORMS[form]), "tf32", tolerance=1e-5)


@pytest.mark.parametrize("size", [1e-20, 1e15])
def test_any_size_of_the_operands(size: float) -> None:
    """Scales of hidden features and of the matrix go into attributes."""
    given = make_radial_case(SMALL, 16, edges=40, range_of_h=1e5)
    given = RadialCase(given.case, given.h * size, given.matrix / size)
    assert_right(given, schedule_of(tiles=4))


def test_the_matrix_is_loaded_once_if_it_fits_into_registers() -> None:
    """A thread holds 16 pairs of each of 11 paths with 4 warps, 8 with 8."""
    problem = TensorProductProblem.channelwise("4x0e+4x1o+4x2e", "0e+1o+2e", "0e+1o+2e")
    for warps, at_once in ((4, False), (8, True)):
        knobs = {"warps": warps, "tiles": 2}
        plan = plan_of(problem, hidden=60, **knobs)
        assert plan.loads_matrix_at_once is at_once and plan.paths_held == (6 if warps == 4 else 12)
        assert emit(plan).text.count("Real held[") == (1 if at_once else 4)
        assert_right(case_of(problem, [20, 0, 3, 17], 60), schedule_of(**knobs))


@pytest.mark.parametrize("form", FORMS)
def test_one_place_for_staged_edges_where_two_do_not_fit(form: str) -> None:
    """Then warps wait twice for each other."""
    given, two = case_of(SMALL, [20, 0, 3, 77], 16), plan_of(SMALL, hidden=16, **FORMS[form])
    size = two.shared_bytes - 16
    facts = dataclasses.replace(FACTS, shared_per_block=size, shared_per_unit=size)
    one = plan_of(SMALL, facts, hidden=16, **FORMS[form])
    assert (two.buffers, one.buffers) == (2, 1) and one.shared_bytes < size
    assert emit(one).text.count(" meet();") == emit(two).text.count(" meet();") + 1
    assert_right(given, schedule_of(**FORMS[form]), facts=facts)


def test_values_that_are_no_numbers_stay_with_their_receiver() -> None:
    """Also where what is loaded ahead is of the next receiver's edges."""
    given = case_of(SMALL, [20, 3, 40], is_sorted=True)
    given.h[20:23] = torch.nan
    for form in FORMS.values():
        found = run_radial(given, forward(), schedule_of(**form))["out"]
        assert torch.equal(found.isnan().any(1), torch.tensor([False, True, False]))
    given, every_second = case_of(SMALL, [5] * 10, is_sorted=True), torch.arange(10) % 2 == 1
    given.h[every_second.repeat_interleave(5)] = torch.nan
    for form in ("ahead", "two-ahead"):
        found = run_radial(given, forward(), schedule_of(**FORMS[form]))["out"]
        assert torch.equal(found.isnan().any(1), every_second), "short spans, with others' edges right behind them"


def test_no_edges_are_no_blocks() -> None:
    assert geometry(plan_of(SMALL), 0, 6, 6)[0] == 0 < geometry(plan_of(SMALL), 1, 6, 6)[0]


def test_a_block_of_several_groups_starts_from_zero() -> None:
    paths = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True)]
    sums = TensorProductProblem.from_instructions("16x0e+16x1o", "0e+1o", "16x0e", paths)
    assert plan_of(sums, path_groups=2).zeroed == {"out_g"} and plan_of(sums, path_groups=2).marks == 0
    for tiles in (1, 2, 4):
        assert_right(case_of(sums, GRAPHS["hubs"]), schedule_of(2, tiles=tiles))


def test_what_has_no_such_kernel() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"warps": 2}, "expected a multiple of 4"),
        ({"tiles": 4, "products": "mma", "paths_at_once": 4}, "expected at most 2"),
        ({"facts": cuda_facts("sm_80")}, "sm_80 has no wgmma"),
        ({"facts": cuda_facts("sm_100")}, "sm_100 has no wgmma"),
    ]
    for knobs, why in refused:
        with pytest.raises(ScheduleError, match=why):
            plan_of(SMALL, **knobs)
    with pytest.raises(ScheduleError, match="use more path_groups or fewer warps"):
        plan_of(SUITE["mace-mp-large"], hidden=64, warps=8)


@pytest.mark.slow
@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("name", "accuracy", "knobs"),
    [
        ("mace-mp-medium", "ieee", {"warps": 8, "tiles": 4, "ahead": "hidden", "paths_at_once": 1}),
        ("mace-mp-medium", "ieee", {"warps": 12, "tiles": 2, "paths_at_once": 1}),
        ("mace-mp-large", "ieee", {"path_groups": 2, "warps": 8, "tiles": 2, "paths_at_once": 1}),
        ("mace-mp-medium", "tf32", {"warps": 8, "tiles": 4}),
    ],
)
def test_sums_stay_in_registers(name: str, accuracy: str, knobs: dict[str, Any]) -> None:
    schedule = schedule_of(**knobs)
    plan = radial_plan(RadialSpec(SUITE[name], 64, forward(), schedule, accuracy, "ir_mul", "int64", FACTS))
    resources = compile_source(emit(plan), FACTS).resources
    assert "serialized" not in resources
    assert 0 < resources["registers"] <= 255 and resources["spill_bytes"] <= 256
