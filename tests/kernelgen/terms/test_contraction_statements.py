"""Statements of symmetric contractions, run in Python, against autograd; their directions and operation counts."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from contraction_cases import derivatives, operands, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelgen.arithmetic.contraction import (
    CONTRACTION_DIRECTIONS,
    FORWARD,
    ContractionDirection,
    Part,
    contraction_backward,
    contraction_double_backward,
    contraction_parts,
    operations,
)
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.problem.other_kinds import ContractionProblem

MACE = ContractionProblem("0e+1o+2e+3o", "0e+1o", 3, 1)
PROBLEMS = [
    ContractionProblem("0e+1o+2e", "0e+1o+2e", 3, 1),
    ContractionProblem("0e+1o", "0e+1o", 4, 1),
    ContractionProblem("1o+0e+0o", "1e+0e", 3, 1),
    ContractionProblem("0e", "0e", 2, 1),
    ContractionProblem("1o", "0o", 1, 1),  # no polynomial at all
]


def subsets(slots: str) -> list[str]:
    """Ordered choices of at least one slot."""
    return ["".join(some) for size in range(1, len(slots) + 1) for some in itertools.combinations(slots, size)]


EVERY = [
    FORWARD,
    *map(contraction_backward, subsets("xw")),
    *(contraction_double_backward(*both) for both in itertools.product(subsets("xw"), subsets("xwg"))),
]
# Sums of the statements by slot of the output.
SUMS = {"x": "ox", "w": "ow", "g": "og"}


def executed(
    problem: ContractionProblem, direction: ContractionDirection, given: dict[str, torch.Tensor], apart: bool
) -> dict[str, torch.Tensor]:
    """The outputs of a direction by slot. A name that is not an operand of the direction is not defined."""
    declared = {
        f"{name}{i}": float(value)
        for name in direction.operands
        for i, value in enumerate(given[name].flatten().tolist())
    }
    stems = {slot: "y" if direction is FORWARD else SUMS[slot] for slot in direction.outputs}
    sums = {f"{stem}{i}": 0.0 for slot, stem in stems.items() for i in range(given[slot].numel())}
    for part in contraction_parts(problem, direction, apart):
        names = {**declared, **sums}  # each part has a scope of its own
        for statement in part.statements:
            text = re.sub(r"^(const )?V ", "", statement.rstrip(";")).replace("Real(", "float(")
            exec(text, {"float": float}, names)
        sums = {name: names[name] for name in sums}
    return {
        slot: torch.tensor([sums[f"{stem}{i}"] for i in range(given[slot].numel())], dtype=torch.float64)
        for slot, stem in stems.items()
    }


def wanted_outputs(problem: ContractionProblem, direction: ContractionDirection, given: dict) -> dict:
    elements = torch.zeros(1, dtype=torch.int64)
    found = derivatives(lambda x, w: plain(problem, x, w, elements), given, direction.tangents)
    prefix = "2" if direction.tangents else ""
    return {slot: found["out" if direction is FORWARD else prefix + slot] for slot in direction.outputs}


def assert_is_autograds(problem: ContractionProblem, direction: ContractionDirection) -> None:
    """Gradients of x and all else by one walk, and by two."""
    given = operands(problem, 1, 1)
    wanted = wanted_outputs(problem, direction, given)
    for apart in (False, True):
        found = executed(problem, direction, given, apart)
        assert set(found) == set(direction.outputs)
        for slot, value in wanted.items():
            scale = max(1.0, float(value.abs().max())) if value.numel() else 1.0
            torch.testing.assert_close(found[slot], value.flatten(), rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_every_direction_is_autograds(problem: ContractionProblem) -> None:
    for direction in EVERY:
        assert_is_autograds(problem, direction)


@pytest.mark.parametrize("direction", CONTRACTION_DIRECTIONS.values(), ids=CONTRACTION_DIRECTIONS.keys())
def test_the_contraction_of_mace(direction: ContractionDirection) -> None:
    assert_is_autograds(MACE, direction)


irreps = st.lists(st.sampled_from(["0e", "0o", "1o", "1e", "2e"]), min_size=1, max_size=3).map("+".join)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(problem=st.builds(ContractionProblem, irreps, irreps, st.integers(1, 3), st.just(1)), data=st.data())
def test_drawn_irreps_and_correlation(problem: ContractionProblem, data: st.DataObject) -> None:
    for direction in data.draw(st.lists(st.sampled_from(EVERY), min_size=3, max_size=3, unique=True)):
        assert_is_autograds(problem, direction)


def test_parts_hold_each_weight_once() -> None:
    parts = contraction_parts(MACE, FORWARD)
    assert sorted(r for part in parts for r in part.weights) == list(range(len(polynomials(MACE))))
    assert all(part.uses("w") == sorted(part.weights) for part in parts)
    assert [part.title for part in parts] == [f"by way of {irrep}" for irrep in ("0e", "1o", "2e", "3o")]


def test_a_part_tells_names_from_others_that_end_alike() -> None:
    part = Part("", (3,), ("ow3 += g1 * dw12;", "tw4 = w5 * P3_1;", "V w10 = ow11;"))
    assert part.uses("w") == [5, 10] and part.uses("ow") == [3, 11] and part.uses("tw") == [4]


# cuEquivariance 0.13 has 94, 480 and 1203 terms of up to four factors in its forward kernel.
@pytest.mark.parametrize(
    ("irreps_out", "most"), [("0e", (178, 434, 474)), ("0e+1o", (303, 671, 767)), ("0e+1o+2e", (558, 1123, 1339))]
)
def test_operations_of_mace(irreps_out: str, most: tuple[int, ...]) -> None:
    """Fewer than those counted when this was written, and than a fifth of the sum as it is written."""
    problem = ContractionProblem("0e+1o+2e+3o", irreps_out, 3, 128)
    counts = {name: operations(contraction_parts(problem, d)) for name, d in CONTRACTION_DIRECTIONS.items()}
    assert all(counts[name] <= n for name, n in zip(("forward", "feature_backward", "backward"), most, strict=True))
    # The forward sum as it is written: each term by itself, with its coefficient, weight and factors.
    plain_operations = sum((one.degree + 1) * sum(map(len, one.components)) for one in polynomials(problem))
    assert 2 * counts["forward"] < plain_operations
    assert counts["backward"] < counts["forward"] + counts["feature_backward"]
    assert counts["double_backward"] < 2.2 * counts["backward"]
