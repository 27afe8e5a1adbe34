"""The search space: choices are sensible and complete, and what has no effect on a kernel makes no new schedule."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from autotune.measure.space import Space, search_space
from autotune.workload.config import load_problems
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import DeviceFacts, cuda_facts, hip_facts
from kernelgen.kernels.dispatch import emit
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule, Schedule
from kernelgen.problem.product import TensorProductProblem

PROBLEMS = {
    "mace": TensorProductProblem.channelwise("128x0e+128x1o", "0e+1o+2e+3o", "0e+1o+2e+3o"),
    "unequal": TensorProductProblem.channelwise("10x0e+6x1o", "0e+1o", "0e+1o"),
    "single": TensorProductProblem.channelwise("1x0e", "0e", "0e"),
}
FACTS = {
    "cpu": DeviceFacts("cpu", "test cpu 8 cores", "x86_64", 8, vector_bytes=32),
    "cuda": cuda_facts("sm_90"),
}


def space_of(problem: str, backend: str, operation: str = "conv", direction: str = "forward") -> Space:
    return search_space(PROBLEMS[problem], operation, direction, "float32", FACTS[backend])


@pytest.mark.parametrize("problem", load_problems().values(), ids=load_problems())
def test_defaults_are_legal_for_graphs_of_any_size(problem: TensorProductProblem) -> None:
    """A form that means nothing to a kernel would not be the kernel's own schedule."""
    for direction, edges, dtype in itertools.product(DIRECTIONS, (300, 100_000), ("float32", "float64")):
        space = search_space(problem, "conv", direction, dtype, FACTS["cuda"], num_edges=edges)
        assert space.broken_limit(space.default) is None, (direction, edges, dtype)


@pytest.mark.parametrize("direction", ["forward", "backward", "double_backward"])
@pytest.mark.parametrize("operation", ["conv", "plain"])
@pytest.mark.parametrize("backend", FACTS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_default_is_a_legal_member(problem: str, backend: str, operation: str, direction: str) -> None:
    space = space_of(problem, backend, operation, direction)
    assert space.broken_limit(space.default) is None
    values = space.values(space.default)
    assert values is not None
    assert space.schedule(values) == space.default
    assert "fuse" not in space.knobs


def test_choices_fit_the_problem() -> None:
    unequal = space_of("unequal", "cuda")
    assert unequal.knobs["channels_per_thread"] == (1, 2), "4 divides neither 10 nor 6"
    assert min(unequal.knobs["path_groups"]) == 2, "two multiplicities need two groups"
    assert max(unequal.knobs["path_groups"]) == len(PROBLEMS["unequal"].paths)
    assert space_of("mace", "cuda").knobs["edges_per_warp"] == (1, 2, 4), "8 lanes at least"
    assert space_of("single", "cuda").knobs["edges_per_warp"] == (8,), "one channel does not"
    assert space_of("mace", "cpu").knobs["channel_block"] == (4, 8, 16, 32), "half a vector to four vectors"
    assert space_of("single", "cpu").knobs["channel_block"] == (4,)
    assert space_of("mace", "cpu").knobs["threads"] == (0, 4)


def test_half_of_few_cores_is_not_tried() -> None:
    for cores, threads in ((1, (0,)), (3, (0,)), (4, (0, 2)), (7, (0, 3))):
        facts = dataclasses.replace(FACTS["cpu"], units=cores)
        assert search_space(PROBLEMS["single"], "conv", "forward", "float32", facts).knobs["threads"] == threads


def test_small_graphs_may_have_their_gradients_written_by_owners() -> None:
    def choices(direction: str, num_edges: int | None, backend: str = "cuda") -> Space:
        return search_space(PROBLEMS["mace"], "conv", direction, "float32", FACTS[backend], num_edges=num_edges)

    for direction in ("backward", "edge_backward", "joint_backward"):
        small = choices(direction, 300)
        assert "owners" in small.knobs["accumulate"]
        assert "owners" not in choices(direction, 300_000).knobs["accumulate"]
        probes = [schedule for schedule in small.probes if schedule.accumulate == "owners"]
        teams = [schedule.warps_per_edge for schedule in probes]
        assert len(probes) > 1 and len(set(teams)) == len(teams), "as many teams an edge as there are ways to share it"
        for schedule in probes:
            assert small.broken_limit(schedule) is None and small.schedule(small.values(schedule)) == schedule
            assert not {"out_x", "out_y", "out_w"} & small.plan(schedule).zeroed
        odd = small.schedule({"accumulate": "owners", "block_size": 512, "warps_per_edge": 2, "teams_per_node": 8})
        assert (odd.warps_per_edge, odd.block_size, odd.teams_per_node) == (4, 128, 1), "knobs that follow from others"
    for direction, backend in (("forward", "cuda"), ("source_backward", "cuda"), ("backward", "cpu")):
        assert "owners" not in choices(direction, 300, backend).knobs["accumulate"]


def test_teams_of_a_deterministic_gradient_are_a_block_where_they_can_be() -> None:
    space = search_space(PROBLEMS["mace"], "conv", "backward", "float32", FACTS["cuda"], deterministic=True)
    legal = [s for s in itertools.islice(space.shuffled(0), 400) if space.broken_limit(s) is None]
    plans = [space.plan(schedule) for schedule in (space.default, *space.probes, *legal)]
    assert {plan.units for plan in plans if plan.joins_y} >= {2, 4}, "two and one channels a lane of 128"
    for plan in plans:
        assert not plan.partial_y or plan.lanes < 32 or plan.units not in (2, 4, 8, 16)


def test_probes_of_a_plain_gradient_have_one_writer() -> None:
    space = search_space(PROBLEMS["mace"], "plain", "backward", "float32", FACTS["cuda"])
    plans = [space.plan(schedule) for schedule in space.probes if schedule.zeros == "apart"]
    assert not any("out_y" in plan.zeroed for plan in plans)
    assert [plan.units for plan in plans if not plan.joins_y] == [1], "a team with all channels"
    assert len([plan for plan in plans if plan.joins_y]) > 1, "or teams that are a block"
    # What no team shares is no kernel of its own.
    lone = space.schedule({"accumulate": "owners", "path_groups": 1, "edges_per_warp": 1, "channels_per_thread": 4})
    assert lone.accumulate == "registers"
    assert not search_space(PROBLEMS["mace"], "plain", "forward", "float32", FACTS["cuda"]).probes


def test_one_writer_of_a_plain_gradient_may_take_two_edges() -> None:
    narrow = TensorProductProblem.channelwise("32x0e+32x1o", "0e+1o", "0e+1o")
    space = search_space(narrow, "plain", "backward", "float32", FACTS["cuda"])
    pairs = [s for s in space.probes if s.edges_per_chunk == 2 and s.edge_operand == "inline"]
    (pair,) = [s for s in pairs if s.zeros == "apart"]
    assert space.plan(pair).units == 1 and "out_y" not in space.plan(pair).zeroed


def test_shuffled_visits_every_combination_once() -> None:
    space = space_of("unequal", "cpu")
    every = [space.schedule(dict(zip(space.knobs, v, strict=True))) for v in itertools.product(*space.knobs.values())]
    first, second = list(space.shuffled(0)), list(space.shuffled(1))
    assert sorted(s.key for s in first) == sorted(s.key for s in every)
    assert len(first) == space.size == math.prod(len(choices) for choices in space.knobs.values())
    assert first != second, "the order depends on the seed"
    assert first == list(space.shuffled(0)), "and on nothing else"


def test_count_legal_counts_distinct_schedules() -> None:
    space = space_of("unequal", "cpu")
    legal = {schedule for schedule in space.shuffled(0) if space.broken_limit(schedule) is None}
    assert space.count_legal(10_000) == len(legal) + len(space.probes) < space.size
    assert space.count_legal(3) == 3


def kernel_text(space: Space, schedule: object) -> str:
    """The source without its comments, which print the schedule."""
    text = emit(space.plan(schedule)).text  # type: ignore[arg-type]
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("//", "/*", "*")))


@pytest.mark.parametrize("operation", ["conv", "plain"])
@pytest.mark.parametrize("backend", FACTS)
def test_knobs_without_effect_are_canonical(backend: str, operation: str) -> None:
    """Every legal neighbour of the default that the space calls the same schedule makes the same kernel."""
    space = space_of("unequal", backend, operation)
    compared = 0
    starts = [space.default] if operation == "plain" else [
        space.default, space.schedule({"fuse": False}), space.schedule({"accumulate": "atomics"})
    ]  # fmt: skip
    for start, (knob, choices) in itertools.product(starts, type(space.default).choices.items()):
        for value in choices[:4]:
            changed = dataclasses.replace(start, **{knob: value})
            if changed == start or space.broken_limit(changed) or space.canonical(changed) != space.canonical(start):
                continue
            if changed.fuse == start.fuse:
                assert kernel_text(space, changed) == kernel_text(space, start), f"{knob}={value}"
                compared += 1
            assert space.canonical(space.canonical(changed)) == space.canonical(changed)
    assert compared >= 1


def test_known_equivalences() -> None:
    conv, plain = space_of("mace", "cuda"), space_of("mace", "cuda", "plain")
    owned = CudaSchedule(accumulate="registers", edges_per_chunk=8)
    assert conv.canonical(owned) == CudaSchedule()
    assert conv.canonical(CudaSchedule(accumulate="atomics", edges_per_chunk=8)).edges_per_chunk == 8
    assert conv.canonical(CudaSchedule(fuse=False, accumulate="atomics")) == CudaSchedule(fuse=False)
    assert plain.canonical(CudaSchedule(fuse=False, accumulate="atomics")) == CudaSchedule()
    assert conv.canonical(CudaSchedule(edges_per_warp=2)).stage_edges == 16, "a team of 16 lanes stages 16 edges"


def test_broken_limit_names_the_limit() -> None:
    space = space_of("mace", "cuda")
    reason = space.broken_limit(CudaSchedule(block_size=512, min_blocks=8))
    assert reason is not None and "2048" in reason


def test_nearest_moves_a_foreign_schedule_in() -> None:
    space = space_of("mace", "cpu")
    moved = space.nearest(HostSchedule(path_groups=30, channel_block=64, threads=200))
    assert space.values(moved) is not None
    assert (moved.path_groups, moved.channel_block, moved.threads) == (10, 32, 4)  # type: ignore[attr-defined]


def test_default_gives_each_edge_of_a_small_graph_a_worker() -> None:
    facts = cuda_facts("sm_90", "NVIDIA Test", 132)

    def default(direction: str, num_edges: int | None, deterministic: bool = False) -> Schedule:
        kernel = (PROBLEMS["mace"], "conv", direction, "float32", facts, "ir_mul", deterministic)
        return search_space(*kernel, num_edges).default

    assert default("forward", 300).teams_per_node == 8
    assert (default("backward", 300).accumulate, default("backward", 300).edges_per_chunk) == ("atomics", 1)
    assert default("backward", 300, deterministic=True).accumulate == "registers"
    for direction in ("forward", "backward"):
        assert default(direction, 10**6) == default(direction, None)
        assert default(direction, None).accumulate == "registers"


def test_rows_are_stored_where_long_runs_of_edges_are_taken() -> None:
    """Elsewhere the value means nothing, so that no kernel is measured twice."""
    space = search_space(PROBLEMS["mace"], "conv", "forward", "float32", FACTS["cuda"], num_edges=100_000, skewed=True)
    assert {64, 128} <= set(space.knobs["edges_per_chunk"])
    runs = space.schedule({"accumulate": "atomics", "zeros": "cut"})
    assert runs.zeros == "cut" and space.broken_limit(runs) is None
    for other in ({"accumulate": "registers"}, {"accumulate": "atomics", "edges_per_chunk": 2}):
        assert space.schedule({**other, "zeros": "cut"}) == space.schedule(other)
    longest = space.schedule({"accumulate": "atomics", "zeros": "cut", "edges_per_chunk": 128, "runs": "waves"})
    assert space.broken_limit(longest) is None
    even = search_space(PROBLEMS["mace"], "conv", "forward", "float32", FACTS["cuda"], num_edges=100_000)
    assert "zeros" not in even.knobs and 64 not in even.knobs["edges_per_chunk"]
    plain = search_space(PROBLEMS["mace"], "plain", "forward", "float32", FACTS["cuda"], skewed=True)
    backward = search_space(PROBLEMS["mace"], "conv", "backward", "float32", FACTS["cuda"], skewed=True)
    amd = search_space(PROBLEMS["mace"], "conv", "forward", "float32", hip_facts("gfx942"), skewed=True)
    host = search_space(PROBLEMS["mace"], "conv", "forward", "float32", FACTS["cpu"], skewed=True)
    assert all("zeros" not in other.knobs for other in (plain, backward, amd, host))
