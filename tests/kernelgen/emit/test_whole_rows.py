"""Fused radial convolutions store the rows that one share of the edges has whole: lane by lane, against e3nn."""

from __future__ import annotations

import itertools

import pytest
import torch
from cuda_emulator import FACTS
from emulated_radial import run_radial
from radial_cases import GRAPHS, case_of
from reference import relative_error

from kernelgen.arithmetic.directions import backward, forward
from kernelgen.device import cuda_facts
from kernelgen.kernels.dispatch import emit, geometry
from kernelgen.kernels.radial.plan import RadialPlan, RadialSchedule, RadialSpec, radial_plan
from kernelgen.problem.product import TensorProductProblem

# One part and one group; three groups with up to two parts each, the last channels of a part missing.
SMALL = TensorProductProblem.channelwise("6x0e+6x1o", "0e+1o", "0e+1o")
UNEVEN = TensorProductProblem.channelwise("18x0e+4x1o+2x2e", "0e+1o+2e", "0e+1o+2e")
FORMS = {
    "one-part": (SMALL, RadialSchedule(warps=2)),
    "two-tiles": (SMALL, RadialSchedule(warps=4, tiles=2)),
    "parts": (UNEVEN, RadialSchedule(3, warps=2)),
    "groups": (UNEVEN, RadialSchedule(5, warps=4)),
}


def plan_of(problem: TensorProductProblem, schedule: RadialSchedule, hidden: int = 8) -> RadialPlan:
    return radial_plan(RadialSpec(problem, hidden, forward(), schedule, "ieee", "ir_mul", "int64", FACTS))


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", ["ir_mul", "mul_ir"])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("form", FORMS)
def test_against_e3nn(form: str, graph: str, layout: str) -> None:
    """In memory that held NaN: each row is stored, or zeroed."""
    problem, schedule = FORMS[form]
    given = case_of(problem, GRAPHS[graph], is_sorted=layout == "mul_ir")
    assert plan_of(problem, schedule).zeroed == frozenset()
    out = run_radial(given, forward(), schedule, "ieee", layout)["out"]
    assert relative_error(out, given.expected()["out"]) < 3e-7


@pytest.mark.parametrize("graph", GRAPHS)
def test_only_the_rows_are_shared_that_the_end_of_a_share_cuts(graph: str) -> None:
    """All of their marks say at the end that the row was stored; no other row has been looked at."""
    problem, schedule = FORMS["one-part"]
    degrees = torch.tensor(GRAPHS[graph])
    given, plan, marks = case_of(problem, GRAPHS[graph]), plan_of(problem, schedule), torch.zeros(1, len(degrees))
    run_radial(given, forward(), schedule, marks=marks)
    edges, ends = int(degrees.sum()), degrees.cumsum(0)
    blocks, each = geometry(plan, edges, 7, len(degrees))[0], schedule.warps
    # A receiver has the work of 12 edges besides its own, up to the last with edges; it comes before its edges.
    work = torch.ones(edges + 12 * (int(degrees.nonzero().max()) + 1), dtype=torch.int64)
    first = ends - degrees + 12 * torch.arange(len(degrees))
    for receiver in range(int(degrees.nonzero().max()) + 1):
        work[first[receiver] : first[receiver] + 12] = 0
    ends_of_blocks = [len(work) * block // blocks for block in range(blocks + 1)]
    places = [a + (b - a) * warp // each for a, b in itertools.pairwise(ends_of_blocks) for warp in range(each)]
    cuts = torch.tensor([int(work[:place].sum()) for place in places])
    cut = ((ends - degrees)[:, None] < cuts) & (cuts < ends[:, None])
    assert torch.equal(marks[0].view(torch.int32), 2 * cut.any(1).int())
    if graph == "hubs":
        assert cut.sum(1).max() >= 2, "no row is in three shares"


@pytest.mark.covering(2)
@pytest.mark.parametrize("graph", ["hubs", "one-node", "whole-shares", "many"])
@pytest.mark.parametrize("form", ["parts", "groups"])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_blocks_with_edges_of_several_parts(form: str, graph: str, more: int) -> None:
    """Fewer blocks than these edges would have: as many as there are parts, or a few more; each has its share."""
    problem, schedule = FORMS[form]
    units = plan_of(problem, schedule).marks + more
    facts = cuda_facts("sm_90", units=units)
    degrees = GRAPHS.get(graph, [13, 0, 40, 1] * 20)
    given = case_of(problem, degrees)
    marks = torch.zeros(units - more, len(degrees))
    out = run_radial(given, forward(), schedule, marks=marks, facts=facts)["out"]
    assert relative_error(out, given.expected()["out"]) < 3e-7
    if graph == "many" and more:
        states = marks.view(torch.int32)
        assert not torch.equal(states[0].expand_as(states), states), "parts are divided at different edges"


def test_any_number_of_receivers() -> None:
    """The search for a warp's first receiver looks at 32 places at a time: it ends after one, two or three looks."""
    for count in (31, 32, 33, 64, 65, 1023, 1025):
        degrees = [int(node % 97 == 5) for node in range(count)]
        degrees[-1] = 20
        given = case_of(SMALL, degrees, is_sorted=True)
        out = run_radial(given, forward(), RadialSchedule(warps=2))["out"]
        assert relative_error(out, given.expected()["out"]) < 3e-7, count


@pytest.mark.parametrize(("hidden", "warps"), [(8, 16), (20, 8), (32, 8), (64, 12), (128, 2), (128, 4)])
def test_hidden_sizes_and_warps(hidden: int, warps: int) -> None:
    given = case_of(SMALL, [20, 0, 3, 17], hidden)
    out = run_radial(given, forward(), RadialSchedule(warps=warps))["out"]
    assert relative_error(out, given.expected()["out"]) < 3e-7


def test_the_matrix_is_loaded_at_once_if_it_fits_into_registers() -> None:
    """A thread holds 8 pairs of each of 11 paths with 2 warps, 2 with 8."""
    problem = TensorProductProblem.channelwise("6x0e+6x1o+6x2e", "0e+1o+2e", "0e+1o+2e")
    given = case_of(problem, [20, 0, 3, 17], 60)
    for warps, at_once in ((2, False), (8, True)):
        schedule = RadialSchedule(warps=warps)
        plan = plan_of(problem, schedule, 60)
        assert plan.loads_matrix_at_once is at_once and ("leave_path" in emit(plan).text) is at_once
        out = run_radial(given, forward(), schedule)["out"]
        assert relative_error(out, given.expected()["out"]) < 3e-7
    several = plan_of(problem, RadialSchedule(2, warps=2), 128)
    assert several.paths_held == 4 and [len(group.paths) for group in several.product.groups] == [7, 4]
    assert not several.loads_matrix_at_once, "the larger group's does not fit"


def test_a_block_of_several_groups_starts_from_zero() -> None:
    """Two groups would both store it; and nobody would store a block without paths."""
    paths = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True)]
    sums = TensorProductProblem.from_instructions("16x0e+16x1o", "0e+1o", "16x0e", paths)
    unwritten = TensorProductProblem.from_instructions("16x0e", "0e", "16x0e+16x1o", paths[:1])
    for problem, groups, stores in ((sums, 1, True), (sums, 2, False), (unwritten, 1, False)):
        schedule = RadialSchedule(groups, warps=2)
        plan = plan_of(problem, schedule)
        assert plan.stores_rows is stores and plan.zeroed == (frozenset() if stores else {"out_g"})
        assert ("put_row<MUL>" in emit(plan).text) is stores
        given = case_of(problem, GRAPHS["hubs"])
        out = run_radial(given, forward(), schedule)["out"]
        assert relative_error(out, given.expected()["out"]) < 3e-7


def test_gradients_are_added_to_zeros() -> None:
    spec = RadialSpec(SMALL, 8, backward("xyw"), RadialSchedule(), "ieee", "ir_mul", "int64", FACTS)
    plan = radial_plan(spec)
    assert plan.zeroed == {"out_x", "out_y", "out_w"} and plan.marks == 0 and "end_row" not in emit(plan).text
