"""Every direction of generated operators against e3nn in float64, on the CPU backend."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from e3nn import o3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Case, assert_matches_e3nn, directions_with_one_part, float64, make_case

from autotune.workload.config import load_problems
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.ops.product import build
from kernelgen.problem.product import TensorProductProblem

SUITE = load_problems()


CASES = [(name, "conv") for name in SUITE] + [(name, "plain") for name in ("mace-mp-medium", "sevennet-0")]
# All parts of problems with a number of paths between these, one part of each other: the small ones are many, and the
# large ones take long.
FEW_PATHS, MANY_PATHS = 10, 20


@pytest.mark.covering(0)
@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize(("name", "operation"), CASES)
def test_suite_problems(name: str, operation: str) -> None:
    problem = SUITE[name]
    operator = build(problem, operation=operation, dtype=torch.float64)
    is_some = FEW_PATHS < len(problem.instructions) <= MANY_PATHS
    directions = DIRECTIONS if is_some else directions_with_one_part(CASES.index((name, operation)))
    assert_matches_e3nn(operator, make_case(problem, operation, edges=23), directions, 1e-10)


def test_single_precision() -> None:
    problem = SUITE["mace-mp-medium"]
    directions = ["forward", "backward", "double_backward"]
    assert_matches_e3nn(build(problem), make_case(problem, "conv", edges=60), directions, 1e-5)


SCHEDULES = {
    "by-node": HostSchedule(channel_block=8, path_groups=2, edges_per_chunk=4),
    "by-edge": HostSchedule(accumulate="atomics", channel_block=16, path_groups=1, edges_per_chunk=8),
    "one-thread": HostSchedule(channel_block=32, path_groups=4, threads=1),
    "wide": HostSchedule(channel_block=64, path_groups=5),
    "unfused": HostSchedule(fuse=False, channel_block=8, path_groups=2),
}
SMALL = TensorProductProblem.channelwise("72x0e+72x1o", "0e+1o", "0e+1o+2e")


FORMS = [
    ("conv", "mul_ir", False),
    ("conv", "ir_mul", True),
    ("plain", "mul_ir", True),
    ("plain", "ir_mul", False),
]


# The plain product has no order by node and nothing to fuse.
COMBINATIONS = [
    (schedule, *form)
    for schedule in SCHEDULES
    for form in FORMS
    if form[0] == "conv" or schedule in ("by-node", "wide")
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("schedule", "operation", "layout", "shared"), COMBINATIONS)
def test_every_schedule_form(schedule: str, operation: str, layout: str, shared: bool) -> None:
    problem = dataclasses.replace(SMALL, shared_weights=shared)
    operator = build(problem, SCHEDULES[schedule], operation=operation, dtype=torch.float64, layout=layout)
    directions = directions_with_one_part(list(SCHEDULES).index(schedule))
    assert_matches_e3nn(operator, make_case(problem, operation, edges=37), directions, 1e-10)


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("mul", [1, 89, pytest.param(320, marks=pytest.mark.slow)])
def test_multiplicities(mul: int) -> None:
    problem = TensorProductProblem.channelwise(f"{mul}x0e+{mul}x1o", "0e+1o+2e", "0e+1o+2e")
    operator = build(problem, dtype=torch.float64)
    assert_matches_e3nn(operator, make_case(problem, "conv"), DIRECTIONS, 1e-10)


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.slow
def test_high_degrees() -> None:
    problem = TensorProductProblem.channelwise("2x6e+3x5o", "4e+6e", "2e+6e+5o+6o")
    operator = build(problem, dtype=torch.float64)
    assert_matches_e3nn(operator, make_case(problem, "conv", edges=12), DIRECTIONS, 1e-10)


@pytest.mark.parametrize(
    ("operation", "irrep", "path"),
    [("conv", "component", "path"), ("plain", "norm", "element"), ("conv", "none", "none")],
)
def test_repeated_unsorted_unsimplified_outputs(operation: str, irrep: str, path: str) -> None:
    """Several paths into one block, blocks out of order, a block without any path, and path weights."""
    problem = TensorProductProblem.from_instructions(
        "8x1o+8x0e+4x1o",
        "1x1o+1x0e+1x1o",
        "8x1o+8x0e+8x0e+8x1o+4x2e+3x0o",
        [
            (0, 1, 0, "uvu", True),
            (1, 0, 0, "uvu", True, 0.5),
            (0, 0, 1, "uvu", True),
            (0, 2, 1, "uvu", True, 2.0),
            (1, 1, 2, "uvu", True),
            (1, 2, 3, "uvu", True),
            (2, 2, 4, "uvu", True),
        ],
        irrep_normalization=irrep,
        path_normalization=path,
    )
    operator = build(problem, operation=operation, dtype=torch.float64)
    assert_matches_e3nn(operator, make_case(problem, operation), DIRECTIONS, 1e-10)


@st.composite
def problems(draw: st.DrawFn) -> TensorProductProblem:
    """Channelwise problems with few channels, any parities and degrees up to 3."""
    irreps = st.tuples(st.integers(0, 3), st.sampled_from("eo")).map(lambda pair: f"{pair[0]}{pair[1]}")
    first = draw(st.lists(st.tuples(st.integers(1, 9), irreps), min_size=1, max_size=3))
    second = draw(st.lists(irreps, min_size=1, max_size=3))
    product = {str(ir) for _, a in first for b in second for ir in o3.Irrep(a) * o3.Irrep(b)}
    keep = draw(st.lists(st.sampled_from(sorted(product)), min_size=1, max_size=4, unique=True))
    return TensorProductProblem.channelwise(
        "+".join(f"{mul}x{ir}" for mul, ir in first),
        "+".join(second),
        "+".join(keep),
        shared_weights=draw(st.booleans()),
    )


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problem=problems(), operation=st.sampled_from(["conv", "plain"]), layout=st.sampled_from(["mul_ir", "ir_mul"]))
def test_drawn_irreps(problem: TensorProductProblem, operation: str, layout: str) -> None:
    operator = build(problem, operation=operation, dtype=torch.float64, layout=layout)
    assert_matches_e3nn(operator, make_case(problem, operation, edges=11), DIRECTIONS, 1e-10)


@pytest.mark.parametrize("parity", [0, 1], ids=["rotation", "reflection"])
def test_commutes_with_rotations_and_reflections(parity: int) -> None:
    problem = SUITE["nequip-lips"]
    case = make_case(problem, "conv")
    operator = build(problem, dtype=torch.float64)
    alpha, beta, gamma = torch.tensor([0.3, 1.1, -2.0], dtype=torch.float64)
    k = torch.tensor(parity)
    with float64():  # e3nn makes the generators of rotations in the default precision
        turns = [
            o3.Irreps(irreps).D_from_angles(alpha, beta, gamma, k)
            for irreps in (problem.irreps_in1, problem.irreps_in2, problem.irreps_out)
        ]
    turn_x, turn_y, turn_out = turns

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return operator(x, y, case.tensors["w"], case.sender, case.receiver, num_out=case.num_out)

    x, y = case.tensors["x"], case.tensors["y"]
    torch.testing.assert_close(product(x @ turn_x.T, y @ turn_y.T), product(x, y) @ turn_out.T, rtol=0, atol=1e-10)


@pytest.mark.parametrize("slots", ["x", "y", "w", "xy"])
def test_only_needed_gradients_match_all_gradients(slots: str) -> None:
    """Forces need some gradients only; each subset has its own kernels."""
    case = make_case(SMALL, "conv")
    operator = build(SMALL, dtype=torch.float64)
    assert isinstance(case, Case)
    results = []
    for wanted in (slots, "xyw"):
        leaf = {n: case.tensors[n].clone().requires_grad_(n in wanted) for n in "xyw"}
        g = case.tensors["g"].clone().requires_grad_()
        out = operator(leaf["x"], leaf["y"], leaf["w"], case.sender, case.receiver, num_out=case.num_out)
        first = torch.autograd.grad(out, [leaf[n] for n in slots], g, create_graph=True)
        total = sum((grad * case.tensors["t" + n]).sum() for grad, n in zip(first, slots, strict=True))
        second = torch.autograd.grad(total, [leaf[n] for n in slots] + [g], allow_unused=True)
        results.append([*first, *second])
    for some, every in zip(*results, strict=True):
        if every is None or some is None:
            assert some is None or not some.any(), "a gradient that does not exist must be zero"
            assert every is None or not every.any()
        else:
            torch.testing.assert_close(some, every, rtol=0, atol=1e-10)
