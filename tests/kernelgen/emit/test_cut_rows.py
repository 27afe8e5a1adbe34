"""Runs of edges that store the rows they have whole (``zeros="cut"``): lane by lane, against e3nn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from cuda_emulator import emulate_addresses
from reference import Case, expected, make_case, relative_error, relayout

from kernelgen.arithmetic.directions import DIRECTIONS, backward, double_backward, forward
from kernelgen.compile.compiler import compile_source
from kernelgen.device import assumed, cuda_facts, hip_facts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.dispatch import AnyPlan, emit, launch_rule, make_plan
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import BUFFERS, Spec
from kernelgen.ops.product import Operator, build
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime.call import Checks, Runner, recipe_of
from kernelgen.runtime.graph import EdgeOrder, longest_first

FACTS = cuda_facts("sm_90", units=2)
PROBLEM = TensorProductProblem.channelwise("32x0e+16x1o", "0e+1o", "0e+1o")
# Its rows have 19 elements: no vectors of several elements.
ODD = TensorProductProblem.channelwise("3x0e+4x1o", "0e+1o", "0e+1o")
BASE = CudaSchedule(accumulate="atomics", zeros="cut", edges_per_chunk=8, block_size=64, path_groups=2)


def changed(**knobs: object) -> CudaSchedule:
    return dataclasses.replace(BASE, **knobs)  # type: ignore[arg-type]


FORMS = {
    "fixed": BASE,
    "waves": changed(runs="waves", edges_per_chunk=32),
    "reload": changed(runs="waves", edge_operand="shared", stage_edges=8, prefetch="reload", path_groups=4),
    "half-warps": changed(edges_per_warp=2, stage_edges=16, channels_per_thread=1, prefetch="copy", warps_per_edge=2),
    "many-units": changed(edges_per_warp=4, stage_edges=4, path_groups=4, warps_per_edge=4, writes="rows"),
    "one-warp-a-block": changed(block_size=32, edges_per_chunk=16, ahead="all"),
}
# Edges of each receiver. The long ones are in more than three runs of eight.
GRAPHS = {
    "hubs": [70, 0, 3, 1, 0, 0, 45, 8, 2, 0, 0],
    "hubs-last": [0, 1, 5, 2, 0, 91],
    "whole-runs": [8, 8, 16, 0, 8],
    "one-node": [50],
    "one-edge": [0, 1, 0],
    "none-is-cut": [1, 2, 3],
    "many-rows": [1, 0, 2, 0, 0] * 50,
}


@dataclass(frozen=True)
class Emulated:
    """What a runner needs of a kernel. held: blocks that each multiprocessor holds at a time, 0 if unknown."""

    plan: AnyPlan
    held: int

    def run(self, pointers: Sequence[int], num_edges: int, num_in: int, num_out: int, device: int) -> None:
        emulate_addresses(self.plan, pointers, num_edges, num_in, num_out, self.held)


def spec_of(schedule: CudaSchedule, dtype: str = "float64", layout: str = "ir_mul", **options: object) -> Spec:
    given = {"problem": PROBLEM, "direction": forward(), "facts": FACTS} | options
    return Spec(schedule=schedule, operation="conv", dtype=dtype, layout=layout, index="int64", **given)  # type: ignore[arg-type]


def case_of(degrees: list[int], is_sorted: bool, problem: TensorProductProblem = PROBLEM) -> Case:
    """Edges in the order of their receivers, or in any."""
    receiver = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees))
    if not is_sorted:
        receiver = receiver[torch.randperm(len(receiver), generator=torch.Generator().manual_seed(1))]
    case = make_case(problem, "conv", edges=len(receiver), num_out=len(degrees))
    return dataclasses.replace(case, receiver=receiver)


def order_of(case: Case, how: str) -> EdgeOrder | None:
    """``none``: none is known. ``given``: of an operator's own, with a permutation where edges are not sorted."""
    if how == "none":
        return None
    with assumed(FACTS):
        operator = build(case.problem, {"forward": BASE}, device="cuda")
    assert isinstance(operator, Operator) and operator.by_receiver
    assert case.sender is not None and case.receiver is not None
    return operator.order(case.sender, case.receiver, len(case.tensors["x"]), case.num_out)


def error_of(
    case: Case, schedule: CudaSchedule, monkeypatch: pytest.MonkeyPatch, order: str, held: int, dtype: str, layout: str
) -> float:
    """Of the runner's values, in memory that held NaN."""
    monkeypatch.setattr("kernelgen.kernels.product.plan.REGISTER_SLACK", 10)
    monkeypatch.setattr("kernelgen.runtime.call.load_kernel", lambda spec: Emulated(make_plan(spec), held))
    real = getattr(torch, dtype)
    checks = Checks(case.problem, "conv", real, "cpu")
    runner = Runner(spec_of(schedule, dtype, layout, problem=case.problem), checks)
    x = case.tensors["x"]
    x = relayout(x, case.problem.irreps_in1, to_ir_mul=True) if layout == "ir_mul" else x
    x, y, w = (tensor.to(real).contiguous() for tensor in (x, case.tensors["y"], case.tensors["w"]))
    graph = checks.graph(x, y, case.sender, case.receiver, case.num_out, order_of(case, order))
    rows = runner((x, None, y, None, w, None, None, None), graph, poison=True)["g"]
    rows = relayout(rows, case.problem.irreps_out, to_ir_mul=False) if layout == "ir_mul" else rows
    return relative_error(rows, expected(case, "forward")["g"])


@pytest.mark.covering(2)
@pytest.mark.parametrize(("order", "is_sorted"), [("given", True), ("given", False), ("none", False)])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(("form", "held"), [*((form, 0) for form in FORMS), ("waves", 1), ("waves", 7), ("reload", 3)])
def test_against_e3nn(
    form: str, held: int, graph: str, order: str, is_sorted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(GRAPHS[graph], is_sorted)
    assert (order_of(case, order) is None) == (order == "none")
    assert error_of(case, FORMS[form], monkeypatch, order, held, "float64", "ir_mul") < 1e-10


def test_a_wave_of_one_run_takes_all_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two multiprocessors hold a block each: one warp for each of two path groups."""
    one_run = changed(runs="waves", edges_per_chunk=32, block_size=32)
    assert error_of(case_of([9, 0, 8, 5, 0, 7], False), one_run, monkeypatch, "given", 1, "float64", "ir_mul") < 1e-10


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("problem", [PROBLEM, ODD], ids=["wide", "odd"])
def test_types_layouts_and_rows_of_any_length(
    problem: TensorProductProblem, dtype: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(GRAPHS["hubs"], False, problem)
    error = error_of(case, BASE, monkeypatch, "given", 0, dtype, layout)
    assert error < (1e-10 if dtype == "float64" else 1e-5)


def test_without_edges_all_rows_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner launches nothing then; a kernel that is launched writes the zeros too."""
    case = case_of([0, 0, 0], True)
    assert error_of(case, BASE, monkeypatch, "given", 0, "float64", "ir_mul") == 0
    for form in ("fixed", "waves"):
        rows = torch.full((3, PROBLEM.dim_out), float("nan"), dtype=torch.float64)
        spans = torch.tensor([[0, 0, 0], [1, 0, 0], [2, 0, 0]], dtype=torch.int32)
        addresses = [0] * len(BUFFERS)
        addresses[BUFFERS.index("out_g")], addresses[BUFFERS.index("spans")] = rows.data_ptr(), spans.data_ptr()
        emulate_addresses(make_plan(spec_of(FORMS[form])), addresses, 0, 1, 3)
        assert not rows.any()


@pytest.mark.parametrize("form", ["fixed", "one-warp-a-block"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_exactly_the_rows_that_no_run_stores_are_zeroed(graph: str, form: str) -> None:
    """First blocks alone. On a GPU nobody waits for them before a row is stored."""
    degrees, each = torch.tensor(GRAPHS[graph]), FORMS[form].edges_per_chunk
    ends = degrees.cumsum(0)
    begins = ends - degrees
    spans = longest_first(torch.stack((torch.arange(len(degrees)), begins, ends), 1).int())
    rows = torch.full((len(degrees), PROBLEM.dim_out), float("nan"), dtype=torch.float64)
    addresses = [0] * len(BUFFERS)
    addresses[BUFFERS.index("out_g")], addresses[BUFFERS.index("spans")] = rows.data_ptr(), spans.data_ptr()
    emulate_addresses(make_plan(spec_of(FORMS[form])), addresses, 0, 1, len(degrees))
    wanted = (degrees == 0) | (begins // each != (ends - 1) // each)
    assert torch.equal((rows == 0).all(1), wanted) and torch.equal(rows.isnan().all(1), ~wanted)


@pytest.mark.parametrize("form", FORMS)
def test_the_compiler_takes_it(form: str) -> None:
    source = emit(make_plan(spec_of(FORMS[form], "float32")))
    assert compile_source(source, FACTS).resources["registers"] > 0
    for text in ("zero_cut_rows", "b.num_edges", "Store", "Add"):
        assert text in source.text


def test_whole_rows_are_stored_and_the_cut_ones_alone_wait() -> None:
    text = emit(make_plan(spec_of(BASE))).text
    loop = text[text.index("void group_0") : text.index("struct Row1")]
    assert loop.count("await_zeros") == 2 and loop.count("put_block<Add") == loop.count("put_block<Store") > 0


def test_it_needs_the_order_and_writes_its_own_zeros() -> None:
    """Programs without Python do the same, from the same recipe."""
    recipe = recipe_of(spec_of(BASE), True)
    assert (recipe.order, recipe.permuted, recipe.writes) == ("receiver", None, {"g": "inside"})
    apart = recipe_of(spec_of(changed(zeros="apart")), True)
    assert (apart.order, apart.writes) == ("", {"g": "zero"}) and apart.permuted is not None
    plan = make_plan(spec_of(BASE))
    assert launch_rule(plan).fixed == 4096 // 64 and plan.owner == ""


def test_where_it_is_refused() -> None:
    for direction in (backward(), double_backward("y", "xwg"), DIRECTIONS["joint_backward"]):
        with pytest.raises(ScheduleError, match="sum values at receivers and nothing else"):
            make_plan(spec_of(BASE, direction=direction))
    for schedule in (changed(accumulate="registers"), changed(edges_per_chunk=4)):
        with pytest.raises(ScheduleError, match="edges_per_chunk of at least 8"):
            make_plan(spec_of(schedule))
    with pytest.raises(ScheduleError, match="edges_per_chunk of at least 8"):
        make_plan(dataclasses.replace(spec_of(BASE), operation="plain"))
    with pytest.raises(ScheduleError, match="zeros='cut' relies on the order in which blocks start"):
        make_plan(spec_of(BASE, facts=hip_facts("gfx942")))
    assert make_plan(spec_of(BASE, direction=double_backward("y", "g"))).zeroed == {"out_g"}


def test_blocks_of_a_row_have_one_group_each() -> None:
    """Two groups that add to one block would both store it; a block without paths would keep what was there."""
    paths = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True)]
    sums = TensorProductProblem.from_instructions("16x0e+16x1o", "0e+1o", "16x0e", paths)
    assert make_plan(spec_of(changed(path_groups=1), problem=sums)).stores_whole_rows
    unwritten = TensorProductProblem.from_instructions("16x0e", "0e", "16x0e+16x1o", paths[:1])
    for problem in (sums, unwritten):
        with pytest.raises(ScheduleError, match="written by several groups or by none"):
            make_plan(spec_of(BASE if problem is sums else changed(path_groups=1), problem=problem))


def test_harmonics_inside() -> None:
    spec = dataclasses.replace(spec_of(BASE, "float32"), harmonics=HarmonicsProblem((0, 1), "component", True))
    assert compile_source(emit(make_plan(spec)), FACTS).resources["registers"] > 0
