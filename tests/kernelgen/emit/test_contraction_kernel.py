"""Kernels of symmetric contractions: CUDA text lane by lane, host binaries, compiled CUDA text; legal schedules."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from contraction_cases import assert_same, by_component, derivatives, from_components, operands, plain, some_elements
from cuda_emulator import emulate

from kernelgen.arithmetic.contraction import (
    CONTRACTION_DIRECTIONS,
    FORWARD,
    ContractionDirection,
    contraction_backward,
    contraction_double_backward,
)
from kernelgen.compile.compiler import compile_source
from kernelgen.compile.gpu import nvrtc_version
from kernelgen.device import cuda_facts, device_facts, hip_facts
from kernelgen.errors import ToolMissingError
from kernelgen.kernels.dispatch import emit, geometry
from kernelgen.kernels.symmetric_contraction import (
    ContractionCudaSchedule,
    ContractionHostSchedule,
    ContractionPlan,
    ContractionSchedule,
    ContractionSpec,
    contraction_plan,
    default_contraction_schedule,
    task_nodes,
)
from kernelgen.ops.symmetric_contraction import sums_by_element
from kernelgen.problem.other_kinds import ContractionProblem
from kernelgen.runtime.graph import order_by
from kernelgen.runtime.kernel import load_kernel

FACTS, HOST = cuda_facts("sm_90"), device_facts("cpu")
LAYOUTS = pytest.mark.parametrize("layout", ["ir_mul", "mul_ir"])
# A row of features of the first is whole pieces of 16 bytes, of the second it is not.
PROBLEMS = [ContractionProblem("0e+1o", "0e+1o", 3, 5), ContractionProblem("1o+0e+1o", "1o+0e", 2, 3)]
DIRECTIONS = [
    FORWARD,
    contraction_backward("x"),
    contraction_backward(),
    contraction_double_backward(),
    contraction_double_backward("xw", "wg"),
    contraction_double_backward("w", "x"),
]
# Elements after each output that must stay unchanged.
GUARD = 64


class Run:
    """A kernel's buffers for unsorted nodes of elements of which two never occur, and what it must give."""

    def __init__(self, plan: ContractionPlan, nodes: int, rows: int = 6) -> None:
        spec, self.plan = plan.spec, plan
        problem, direction, real = spec.problem, spec.direction, getattr(torch, spec.dtype)
        self.nodes, self.rows = nodes, rows
        self.elements = some_elements(nodes, rows, getattr(torch, spec.index))
        self.spans, perm = order_by("elements", self.elements, rows)
        self.given = {name: value.to(real).double() for name, value in operands(problem, nodes, rows).items()}
        self.buffers = {name: self.given[name].to(real) for name in direction.operands} | {"sender": self.elements}
        if spec.schedule.order == "element":
            self.buffers["perm"] = perm
        self.of_task = task_nodes(plan, nodes, 0)
        tasks = -(-nodes // self.of_task)
        sizes = {"x": nodes * problem.dim_in * problem.channels, "g": nodes * problem.dim_out * problem.channels}
        sizes["w"] = ((tasks if plan.has_rows else 0) + rows) * plan.weights * problem.channels
        for slot in direction.outputs:
            empty = 0.0 if slot in plan.zeroed and not plan.writes_zeros else torch.nan
            whole = torch.full((sizes[slot] + GUARD,), empty, dtype=real)
            whole[-GUARD:] = 12345.0
            self.buffers[f"out_{slot}"] = whole

    def assert_done(self, tolerance: float = 1e-12) -> None:
        problem, direction, layout = self.plan.spec.problem, self.plan.spec.direction, self.plan.spec.layout
        wanted = derivatives(
            lambda x, w: plain(problem, x, w, self.elements.long(), layout), self.given, direction.tangents
        )
        prefix = "2" if direction.tangents else ""
        for slot in direction.outputs:
            *_, found, guard = self.buffers[f"out_{slot}"].split([len(self.buffers[f"out_{slot}"]) - GUARD, GUARD])
            assert bool((guard == 12345.0).all()), f"written past the end of {slot}"
            found = found.double()
            if slot == "w" and self.plan.has_rows:
                found = found.view(-1, self.plan.weights * problem.channels)
                found = sums_by_element(self._written(found), self.spans, self.of_task)
            value = wanted["out" if direction is FORWARD else prefix + slot]
            assert_same({slot: found.view(value.shape)}, {slot: value}, tolerance)

    def _written(self, found: torch.Tensor) -> torch.Tensor:
        """Rows of a task and an element of its nodes; a GPU must write these alone, and all their columns."""
        perm = self.buffers["perm"].long()
        places = torch.arange(self.nodes) // self.of_task + self.elements[perm].long()
        is_written = torch.zeros(len(found), dtype=torch.bool).index_fill_(0, places, True)
        assert found[is_written].isfinite().all()
        if "w" not in self.plan.zeroed:
            assert found[~is_written].isnan().all()
        return torch.where(is_written[:, None], found, 0.0)


def planned(
    problem: ContractionProblem,
    direction: ContractionDirection,
    schedule: ContractionSchedule,
    layout: str = "ir_mul",
    dtype: str = "float64",
    index: str = "int64",
) -> ContractionPlan:
    facts = FACTS if schedule.backend == "cuda" else HOST
    return contraction_plan(ContractionSpec(problem, direction, schedule, dtype, layout, index, facts))


def assert_right_lane_by_lane(plan: ContractionPlan, nodes: int) -> None:
    run = Run(plan, nodes)
    emulate(plan, run.buffers, nodes, run.of_task, run.rows)
    run.assert_done(1e-12 if plan.spec.dtype == "float64" else 1e-5)


@LAYOUTS
@pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda direction: direction.text)
def test_lane_by_lane(direction: ContractionDirection, layout: str) -> None:
    """11 nodes in tasks of 4; a block of 32 threads ends among a task's channels, or has threads without a task."""
    for problem in PROBLEMS:
        for pace, sums, gradients in (("free", "registers", "together"), ("parts", "memory", "apart")):
            schedule = ContractionCudaSchedule(4, "element", gradients, 32, pace=pace, sums=sums)
            plan = planned(problem, direction, schedule, layout)
            assert geometry(plan, 11, 4, 11)[:2] == (1 if problem.channels * 3 <= 32 else 2, 32)
            assert_right_lane_by_lane(plan, 11)


@LAYOUTS
@pytest.mark.parametrize("direction", DIRECTIONS[2:5], ids=lambda direction: direction.text)
def test_sums_added_to_the_gradient_itself(direction: ContractionDirection, layout: str) -> None:
    for order, pace, sums in (
        ("element", "free", "registers"),
        ("given", "free", "registers"),
        ("given", "parts", "memory"),
    ):
        for zeros in ContractionCudaSchedule.choices["zeros"]:
            schedule = ContractionCudaSchedule(4, order, "together", 32, 0, pace, sums, "atomic", zeros)
            plan = planned(PROBLEMS[0], direction, schedule, layout)
            blocks, *_ = geometry(plan, 11, 4, 6)
            assert blocks == (129 if plan.writes_zeros else 1) and plan.writes_zeros == (zeros == "inside")
            assert_right_lane_by_lane(plan, 11)


def test_zeros_of_a_gradient_that_several_blocks_write() -> None:
    """6 rows of 4 weights and 70 channels are a block's share of zeros, 600 rows many."""
    problem = ContractionProblem("1o", "0e", 2, 70)
    schedule = ContractionCudaSchedule(2, "given", block_size=32, sums="memory", adds="atomic", zeros="inside")
    plan = planned(problem, contraction_backward("w"), schedule)
    run = Run(plan, 5, rows=600)
    emulate(plan, run.buffers, 5, run.of_task, run.rows)
    run.assert_done()


@pytest.mark.parametrize("adds", ContractionCudaSchedule.choices["adds"])
@pytest.mark.parametrize("sums", ContractionCudaSchedule.choices["sums"])
@pytest.mark.parametrize("pace", ContractionCudaSchedule.choices["pace"])
def test_pace_and_sums_in_all_combinations(pace: str, sums: str, adds: str) -> None:
    """70 channels take more than two blocks of 32, of which the last is not full."""
    problem = ContractionProblem("1o", "0e", 2, 70)
    for nodes_per_task, nodes in ((1, 2), (8, 3), (2, 4)):
        schedule = ContractionCudaSchedule(nodes_per_task, "element", block_size=32, pace=pace, sums=sums, adds=adds)
        assert_right_lane_by_lane(planned(problem, contraction_backward(), schedule), nodes)


@pytest.mark.parametrize("direction", DIRECTIONS[:4], ids=lambda direction: direction.text)
def test_the_hip_form_lane_by_lane(direction: ContractionDirection) -> None:
    for adds in ContractionCudaSchedule.choices["adds"]:
        schedule = ContractionCudaSchedule(4, "element", "apart", 64, pace="parts", sums="memory", adds=adds)
        plan = planned(PROBLEMS[0], direction, schedule)
        assert_right_lane_by_lane(contraction_plan(dataclasses.replace(plan.spec, facts=hip_facts("gfx942"))), 11)


@LAYOUTS
def test_nodes_as_they_are_given_in_single_precision(layout: str) -> None:
    for direction in (FORWARD, contraction_backward("x")):
        schedule = ContractionCudaSchedule(2, "given", block_size=64)
        assert_right_lane_by_lane(planned(PROBLEMS[0], direction, schedule, layout, "float32", "int32"), 7)


@LAYOUTS
@pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda direction: direction.text)
def test_host_kernels(direction: ContractionDirection, layout: str) -> None:
    """7 channels are vectors of 4 and 2 and a rest; 19 with vectors of 16 also leave a rest of 3."""
    for channels, channel_block, gradients in ((7, 4, "together"), (19, 16, "apart"), (2, 2, "together")):
        problem = dataclasses.replace(PROBLEMS[0], channels=channels)
        schedule = ContractionHostSchedule(4, "element", gradients, channel_block=channel_block)
        run = Run(plan := planned(problem, direction, schedule, layout), 11)
        load_kernel(plan.spec).launch(run.buffers, 11, run.of_task, 11)
        run.assert_done()


@LAYOUTS
@pytest.mark.parametrize("channel_block", ContractionHostSchedule.choices["channel_block"])
def test_every_width_of_the_host_in_single_precision(channel_block: int, layout: str) -> None:
    """70 channels are a vector of 64 (several registers), one of 4 and one of 2."""
    problem = ContractionProblem("0e+1o", "0e+1o", 2, 70)
    schedule = ContractionHostSchedule(2, "element", channel_block=channel_block)
    run = Run(plan := planned(problem, contraction_backward(), schedule, layout, "float32", "int32"), 5)
    load_kernel(plan.spec).launch(run.buffers, 5, run.of_task, 5)
    run.assert_done(1e-5)


def test_only_the_widths_that_channels_need_are_compiled() -> None:
    """Each width is a function of thousands of statements."""

    def calls(channels: int, channel_block: int) -> list[int]:
        problem = dataclasses.replace(PROBLEMS[0], channels=channels)
        text = emit(planned(problem, FORWARD, ContractionHostSchedule(channel_block=channel_block))).text
        return [int(width) for width in re.findall(r"channels<.*, (\d+)>\(rows, u\)", text)]

    assert calls(128, 16) == [16]
    assert calls(7, 4) == [4, 2, 1]
    assert calls(20, 16) == [16, 4]
    assert calls(2, 2) == [2] and calls(3, 1) == [1]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "irreps_out, dtype, directions",
    [
        *((out, "float32", tuple(CONTRACTION_DIRECTIONS)) for out in ("0e", "0e+1o", "0e+1o+2e")),
        ("0e+1o", "float64", ("forward", "feature_backward", "backward")),
    ],
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_cuda_text_of_mace_compiles_without_spills(
    arch: str, irreps_out: str, dtype: str, directions: tuple[str, ...]
) -> None:
    try:
        nvrtc_version()
    except ToolMissingError as error:
        pytest.skip(str(error))
    facts, problem = cuda_facts(arch), ContractionProblem("0e+1o+2e+3o", irreps_out, 3, 128)
    for direction in (CONTRACTION_DIRECTIONS[name] for name in directions):
        schedule = default_contraction_schedule(problem, direction, dtype, facts)
        spec = ContractionSpec(problem, direction, schedule, dtype, "ir_mul", "int64", facts)
        resources = compile_source(emit(contraction_plan(spec)), facts).resources
        assert 0 < resources["registers"] <= 255, direction
        assert resources["spill_bytes"] == resources["stack_bytes"] == 0, direction


@pytest.mark.parametrize("schedule", [ContractionHostSchedule(), ContractionCudaSchedule()], ids=lambda s: s.backend)
def test_equal_specs_have_equal_text_that_names_them(schedule: ContractionSchedule) -> None:
    plan = planned(PROBLEMS[0], FORWARD, schedule)
    text = emit(plan).text
    assert text == emit(contraction_plan(dataclasses.replace(plan.spec))).text
    assert text.startswith(f"// problem    {PROBLEMS[0].key}\n") and schedule.key in text
    others = [
        {"direction": contraction_backward("x")},
        {"dtype": "float32"},
        {"layout": "mul_ir"},
        {"index": "int32"},
        {"problem": PROBLEMS[1]},
    ]
    texts = {emit(contraction_plan(dataclasses.replace(plan.spec, **other))).text for other in others}
    assert len({text, *texts}) == len(others) + 1


def test_layouts_of_the_tests() -> None:
    """What the kernels are compared with puts blocks where e3nn has them."""
    problem = PROBLEMS[1]
    x = torch.arange(7 * 3.0)[None]
    assert by_component(problem, x, "mul_ir")[0, :, 1].tolist() == list(range(7, 14))
    y = torch.arange(4 * 3.0).view(1, 4, 3)
    assert from_components(problem, y, "mul_ir").tolist() == [[0, 3, 6, 1, 4, 7, 2, 5, 8, 9, 10, 11]]
