"""Entries serve every problem of their shape: other parities, and paths in another order."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from database_samples import HOST, PROBLEM, entry, store
from e3nn import o3

from autotune.database.lookup import Tuning, find_schedule
from autotune.measure.space import search_space
from autotune.search.starting_points import starting_points
from autotune.workload.config import load_problems
from autotune.workload.workload import GraphClass
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.problem.product import TensorProductProblem, shape_of

EVEN = TensorProductProblem.from_instructions(
    *(text.replace("o", "e") for text in (PROBLEM.irreps_in1, PROBLEM.irreps_in2, PROBLEM.irreps_out)),
    PROBLEM.e3nn_instructions,
)


def of_nequip(irreps_in1: str, irreps_in2: str, irreps_out: str) -> TensorProductProblem:
    """The product of a NequIP layer: blocks of the result are sorted, but its paths follow the inputs."""
    first, second, keep = (o3.Irreps(text) for text in (irreps_in1, irreps_in2, irreps_out))
    found = [
        (i, j, (mul, ir))
        for (i, (mul, a)), (j, (_, b)) in itertools.product(enumerate(first), enumerate(second))
        for ir in a * b
        if ir in keep
    ]
    out, places, _ = o3.Irreps([block for _, _, block in found]).sort()
    paths = [(i, j, places[k], "uvu", True) for k, (i, j, _) in enumerate(found)]
    return TensorProductProblem.from_instructions(first, second, out, paths)


def test_the_shape_of_nequips_product_is_that_of_the_problem_in_the_config() -> None:
    named = load_problems()["nequip-oam-l"]
    built = of_nequip("128x0e+64x1o+32x2e+32x3o", "1x0e+1x1o+1x2e+1x3o", "0e+1o+2e+3o")
    assert built.key != named.key, "the weights of its paths have another order"
    assert shape_of(built.key) == shape_of(named.key)


def test_shapes_differ_where_kernels_do() -> None:
    problems = load_problems()
    uvu = {shape_of(problem.key) for problem in problems.values()}
    assert len(uvu) == len(problems)
    weighted = TensorProductProblem.from_instructions("8x0e", "0e", "8x0e", [(0, 0, 0, "uvu", True, 2.0)])
    plain = TensorProductProblem.from_instructions("8x0e", "0e", "8x0e", [(0, 0, 0, "uvu", True)])
    assert shape_of(weighted.key) != shape_of(plain.key)
    assert shape_of("sh|0,1,2|component|normalize") == "sh|0,1,2|component|normalize"


def find(problem: TensorProductProblem) -> Tuning:
    return find_schedule(problem, "conv", "forward", "float32", "mul_ir", HOST, "conv-e14-d5")


def test_an_entry_of_the_same_shape_is_found_after_the_problems_own(shipped: Path) -> None:
    assert EVEN.key != PROBLEM.key
    schedules = [HostSchedule(path_groups=2, channel_block=block) for block in (4, 8)]
    like = entry(schedules[0], problem=EVEN.key)
    store(shipped, HOST, like)
    found = find(PROBLEM)
    assert (found.schedule, found.origin, found.entry) == (schedules[0], "nearest", like)
    assert "paths in another order or irreps of other parities" in found.reason
    own = entry(schedules[1], graph_class="conv-e14-d5")
    store(shipped, HOST, own)
    assert find(PROBLEM).entry == own and find(EVEN).entry == like


@pytest.mark.parametrize("kept", [EVEN, PROBLEM])
def test_a_search_starts_from_winners_of_its_shape(kept: TensorProductProblem) -> None:
    space = search_space(PROBLEM, "conv", "forward", "float32", HOST)
    other = TensorProductProblem.channelwise("16x0e", "0e", "0e")
    schedule = HostSchedule(path_groups=2, channel_block=8)
    far = entry(HostSchedule(path_groups=4, channel_block=4), problem=other.key)
    first, *_ = starting_points(space, GraphClass("conv", 14, 5), [far, entry(schedule, problem=kept.key)])
    assert first == space.nearest(schedule)
