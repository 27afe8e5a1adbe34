"""Products of every connection mode against e3nn in float64: on the host, as CUDA text lane by lane, as binaries."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from cuda_emulator import run_direction
from e3nn import o3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pair_problems import MODES, direct, equal_channels, mixed, of_mode, single
from reference import assert_matches_e3nn, directions_with_one_part, expected, make_case, relative_error

from autotune.workload.config import load_problems
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.compile.compiler import compile_source
from kernelgen.device import cuda_facts
from kernelgen.errors import ProblemError, ScheduleError, UnsupportedError
from kernelgen.kernels.dispatch import emit, make_plan
from kernelgen.kernels.pairs.channels import ChannelPlan
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.ops.product import build
from kernelgen.problem.irreps import MODES as KNOWN_MODES
from kernelgen.problem.product import TensorProductProblem

FACTS = cuda_facts("sm_90")
# Of a spec, from the operation on.
PLAIN = ("plain", "float64", "ir_mul", "int64", FACTS)


def test_every_mode_of_e3nn_is_here() -> None:
    assert set(MODES) == set(KNOWN_MODES)


@pytest.mark.parametrize("mode", MODES)
def test_every_direction_of_every_mode(mode: str) -> None:
    """The other layout where kernels read every operand and write every output: the rest have no index of their own."""
    problem, both = of_mode(mode), ("forward", "double_backward")
    for layout, directions in (("mul_ir", directions_with_one_part(sorted(MODES).index(mode))), ("ir_mul", both)):
        operator = build(problem, operation="plain", dtype=torch.float64, layout=layout)
        assert_matches_e3nn(operator, make_case(problem, "plain", edges=9), directions, 1e-10)


@pytest.mark.covering(1)
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("problem", [mixed(), of_mode("uvw"), single()], ids=["mixed", "uvw", "single"])
def test_convolutions(problem: TensorProductProblem, fuse: bool) -> None:
    operator = build(problem, HostSchedule(accumulate="atomics", fuse=fuse, threads=2), dtype=torch.float64)
    assert_matches_e3nn(operator, make_case(problem, "conv"), DIRECTIONS, 1e-10)


@pytest.mark.parametrize(("mode", "place"), [("uvw", 0), ("uuu", 1), ("uvu", 2)])
def test_shared_weights(mode: str, place: int) -> None:
    problem = of_mode(mode, shared=True)
    operator = build(problem, HostSchedule(accumulate="atomics", threads=2), operation="plain", dtype=torch.float64)
    assert_matches_e3nn(operator, make_case(problem, "plain"), directions_with_one_part(place), 1e-10)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("operation", ["plain", "conv"])
def test_products_whose_copies_are_pairs(operation: str, layout: str) -> None:
    schedule = HostSchedule(accumulate="atomics", threads=2)
    operator = build(direct(), schedule, operation=operation, dtype=torch.float64, layout=layout)
    assert_matches_e3nn(operator, make_case(direct(), operation), DIRECTIONS, 1e-10)


def test_single_precision() -> None:
    problem = of_mode("uvw")
    operator = build(problem, operation="plain")
    assert_matches_e3nn(operator, make_case(problem, "plain"), ["forward", "backward", "double_backward"], 1e-5)


@st.composite
def problems(draw: st.DrawFn) -> TensorProductProblem:
    """Up to four paths of any modes, each with separate blocks."""
    blocks: tuple[list[str], list[str], list[str]] = ([], [], [])
    instructions = []
    for number in range(draw(st.integers(1, 4))):
        mode = KNOWN_MODES[draw(st.sampled_from(sorted(KNOWN_MODES)))]
        least = 2 if mode.pairs == "upper" else 1  # without pairs e3nn has nothing to differentiate
        mul1, mul2, mul3 = (draw(st.integers(least, 5)) for _ in range(3))
        mul2 = mul2 if mode.pairs == "all" else mul1
        mul3 = {"w": mul3, "u": mul1, "v": mul2, "pair": mode.count(mul1, mul2)}[mode.result]
        ir1, ir2 = (o3.Irrep(draw(st.integers(0, 2)), draw(st.sampled_from([-1, 1]))) for _ in range(2))
        ir3 = draw(st.sampled_from(list(ir1 * ir2)))
        weighted = mode.needs_weight or mode.result == "w" or draw(st.booleans())
        for texts, mul, ir in zip(blocks, (mul1, mul2, mul3), (ir1, ir2, ir3), strict=True):
            texts.append(f"{mul}x{ir}")
        instructions.append((number, number, number, mode.name, weighted, draw(st.sampled_from([1.0, 0.5]))))
    irreps = ["+".join(texts) for texts in blocks]
    return TensorProductProblem.from_instructions(*irreps, instructions, shared_weights=draw(st.booleans()))


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problem=problems(), layout=st.sampled_from(["mul_ir", "ir_mul"]))
def test_drawn_products(problem: TensorProductProblem, layout: str) -> None:
    assert TensorProductProblem.from_key(problem.key) == problem
    operator = build(problem, operation="plain", dtype=torch.float64, layout=layout)
    case = make_case(problem, "plain", edges=5)
    assert_matches_e3nn(operator, case, ["forward", "backward", "double_backward", "joint_backward"], 1e-10)


WIDE = TensorProductProblem.from_instructions(
    "10x1o+48x0e", "1x0e+1x1o", "48x0e+10x1o+70x1o", [(0, 1, 0, "uvw", True), (1, 0, 0, "uvw", True)]
    + [(0, 0, 1, "uvw", True), (1, 1, 1, "uvw", True), (0, 0, 2, "uvw", True)]
)  # fmt: skip


@pytest.mark.parametrize("direction", ["forward", "backward", "double_backward"])
@pytest.mark.parametrize(
    ("name", "layout", "operation"),
    [("wide", "mul_ir", "plain"), ("mixed", "ir_mul", "conv"), ("uvv", "mul_ir", "plain"), ("uvw", "ir_mul", "conv")],
)
def test_lane_by_lane(name: str, layout: str, operation: str, direction: str) -> None:
    """Fewer columns than lanes, more than a tile of them, and modes whose lanes hand values to each other."""
    problem = {"wide": WIDE, "mixed": mixed()}.get(name) or of_mode(name)
    case = make_case(problem, operation, edges=5)
    schedule = CudaSchedule(accumulate="atomics", block_size=64)
    found = run_direction(case, DIRECTIONS[direction], operation, layout, "float64", schedule)
    errors = {slot: relative_error(found[slot], rows) for slot, rows in expected(case, direction).items()}
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("operation", ["plain", "conv"])
def test_teams_that_share_an_edge_lane_by_lane(operation: str, direction: str) -> None:
    """Three teams of two warps a block: an edge's parts lie in different blocks too, and add to the same rows."""
    case = make_case(mixed(), operation, edges=5)
    schedule = CudaSchedule(accumulate="atomics", block_size=64, path_groups=3)
    found = run_direction(case, DIRECTIONS[direction], operation, "ir_mul", "float64", schedule)
    errors = {slot: relative_error(found[slot], rows) for slot, rows in expected(case, direction).items()}
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("direction", ["forward", "backward", "double_backward", "joint_backward"])
@pytest.mark.parametrize(
    ("name", "operation", "edges_per_warp"),
    [("single", "plain", 1), ("single", "conv", 8), ("uvw", "plain", 4), ("mixed", "conv", 2), ("direct", "plain", 2)],
)
def test_small_teams_lane_by_lane(name: str, operation: str, edges_per_warp: int, direction: str) -> None:
    """Teams of part of a warp, the last warp with fewer edges than teams; and paths of one pair, in registers."""
    problem = {"single": single(), "mixed": mixed(), "direct": direct()}.get(name) or of_mode(name)
    case = make_case(problem, operation, edges=5)
    schedule = CudaSchedule(accumulate="atomics", block_size=64, edges_per_warp=edges_per_warp)
    found = run_direction(case, DIRECTIONS[direction], operation, "mul_ir", "float64", schedule)
    errors = {slot: relative_error(found[slot], rows) for slot, rows in expected(case, direction).items()}
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(("path_groups", "edges_per_warp"), [(1, 1), (2, 1), (1, 4)])
def test_shared_weights_lane_by_lane(path_groups: int, edges_per_warp: int) -> None:
    case = make_case(of_mode("uvw", shared=True), "plain", edges=5)
    schedule = CudaSchedule(path_groups=path_groups, edges_per_warp=edges_per_warp)
    found = run_direction(case, DIRECTIONS["backward"], "plain", "mul_ir", "float64", schedule)
    errors = {slot: relative_error(found[slot], rows) for slot, rows in expected(case, "backward").items()}
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("direction", ["forward", "backward", "edge_backward", "double_backward", "joint_backward"])
@pytest.mark.parametrize(
    ("mul", "layout", "shared", "block_size"), [(32, "mul_ir", True, 64), (96, "ir_mul", False, 64)]
)
def test_a_thread_a_channel_lane_by_lane(mul: int, layout: str, shared: bool, block_size: int, direction: str) -> None:
    """Also where blocks have parts of edges, and where more threads than edges have work."""
    problem = equal_channels(mul, shared)
    case, schedule = make_case(problem, "plain", edges=5), CudaSchedule(accumulate="atomics", block_size=block_size)
    assert isinstance(make_plan(Spec(problem, DIRECTIONS[direction], schedule, *PLAIN)), ChannelPlan)
    found = run_direction(case, DIRECTIONS[direction], "plain", layout, "float64", schedule)
    errors = {slot: relative_error(found[slot], rows) for slot, rows in expected(case, direction).items()}
    assert max(errors.values()) < 1e-12, errors


def test_which_products_have_a_thread_a_channel() -> None:
    def plan_of(problem: TensorProductProblem, operation: str = "plain", **knobs: int) -> object:
        schedule = CudaSchedule(accumulate="atomics", **knobs)
        return make_plan(Spec(problem, DIRECTIONS["backward"], schedule, operation, *PLAIN[1:]))

    assert isinstance(plan_of(equal_channels()), ChannelPlan)
    irreps = "32x6e+32x5e+32x3e"  # too many components for registers
    large = TensorProductProblem.from_instructions(irreps, irreps, irreps, [(2, 2, 0, "uuu", True)])
    for problem in (equal_channels(24), of_mode("uuu"), large):
        assert not isinstance(plan_of(problem), ChannelPlan)
    assert not isinstance(plan_of(equal_channels(), "conv"), ChannelPlan)
    for knob in ("path_groups", "edges_per_warp"):
        with pytest.raises(ScheduleError, match=f"{knob}=2: a product of equal channels"):
            plan_of(equal_channels(), **{knob: 2})


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward", "double_backward", "joint_backward"])
def test_a_thread_a_channel_compiles_without_spills(direction: str) -> None:
    """Of Allegro-OAM-L's product."""
    irreps, degrees = "64x0e+64x1o+64x2e+64x3o", range(4)
    paths = [
        (a, b, out, "uuu", True)
        for out, a, b in itertools.product(degrees, repeat=3)
        if abs(a - b) <= out <= a + b and (a + b + out) % 2 == 0
    ]
    problem = TensorProductProblem.from_instructions(irreps, irreps, irreps, paths, shared_weights=True)
    schedule = CudaSchedule(accumulate="atomics")
    spec = Spec(problem, DIRECTIONS[direction], schedule, "plain", "float32", "ir_mul", "int64", FACTS)
    resources = compile_source(emit(make_plan(spec)), FACTS).resources
    assert 0 < resources["registers"] <= 255 and resources["spill_bytes"] == 0, resources


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward", "joint_backward"])
def test_cuda_text_compiles_without_spills(direction: str) -> None:
    spec = Spec(WIDE, DIRECTIONS[direction], CudaSchedule(), "plain", "float32", "ir_mul", "int64", FACTS)
    resources = compile_source(emit(make_plan(spec)), FACTS).resources
    assert 0 < resources["registers"] <= 128 and resources["spill_bytes"] == 0


def test_keys_of_channelwise_problems_did_not_change() -> None:
    keys = {problem.key for problem in load_problems().values() if problem.is_channelwise}
    assert len(keys) > 10 and all(key.startswith("uvu|") and ":" not in key for key in keys)


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ProblemError, match="uvx"):
        TensorProductProblem.from_instructions("2x0e", "1x0e", "2x0e", [(0, 0, 0, "uvx", True)])
    with pytest.raises(ProblemError, match="mul_in1 = mul_out"):
        TensorProductProblem.from_instructions("2x0e", "1x0e", "3x0e", [(0, 0, 0, "uvu", True)])
    with pytest.raises(ProblemError, match="needs weights"):
        TensorProductProblem.from_instructions("2x0e", "1x0e", "3x0e", [(0, 0, 0, "uvw", False)])
    with pytest.raises(ProblemError, match="needs weights"):
        TensorProductProblem.from_instructions("2x0e", "2x0e", "3x0e", [(0, 0, 0, "uuw", False)])


def test_limits_are_said() -> None:
    problem = of_mode("uvw")
    with pytest.raises(ScheduleError, match="accumulate='atomics'"):
        build(problem, HostSchedule())
    with pytest.raises(UnsupportedError, match="fixed order"):
        build(problem, deterministic=True)
    spec = Spec(
        TensorProductProblem.from_instructions("64x1o", "64x1o", "4096x0e", [(0, 0, 0, "uvuv", True)]),
        *(DIRECTIONS["backward"], CudaSchedule(block_size=512), "plain", "float64", "mul_ir", "int64", FACTS),
    )
    with pytest.raises(ScheduleError, match="bytes of shared memory"):
        make_plan(spec)
    with pytest.raises(ScheduleError, match="path_groups=2: this problem allows 1 to 1"):
        make_plan(dataclasses.replace(spec, schedule=CudaSchedule(path_groups=2)))
    with pytest.raises(ScheduleError, match="in no fixed order; a deterministic kernel"):
        make_plan(dataclasses.replace(spec, problem=WIDE, deterministic=True, schedule=CudaSchedule(path_groups=2)))
    with pytest.raises(ScheduleError, match="a warp each"):
        make_plan(dataclasses.replace(spec, problem=WIDE, schedule=CudaSchedule(path_groups=2, edges_per_warp=2)))
    with pytest.raises(ScheduleError, match="cores"):
        make_plan(dataclasses.replace(spec, schedule=HostSchedule(threads=256), facts=build(problem).spec(
            DIRECTIONS["forward"]).facts))  # fmt: skip
