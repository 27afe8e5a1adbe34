"""Statements of symmetric contractions, run in Python, against autograd; their directions and operation counts."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from contraction_cases import derivatives, operands, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelgen.errors import ProblemError
from kernelgen.problem.symmetric_contraction import ContractionProblem
from kernelgen.terms.contraction_statements import (
    CONTRACTION_DIRECTIONS,
    FORWARD,
    ContractionDirection,
    Part,
    contraction_backward,
    contraction_double_backward,
    contraction_parts,
    operations,
    plain_operations,
)
from kernelgen.terms.equivariant_polynomials import polynomials

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
    """Gradients of x and all else by one walk over the monomials, and by two."""
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


def test_parts_hold_each_weight_once_and_share_no_monomial() -> None:
    parts = contraction_parts(MACE, FORWARD)
    assert sorted(r for part in parts for r in part.weights) == list(range(len(polynomials(MACE))))
    assert len({part.title for part in parts}) == len(parts)
    assert all(part.uses("w") == sorted(part.weights) for part in parts)
    assert parts[0].title == "0e" and "0e 1o 1o" in {part.title for part in parts}


def test_a_part_tells_names_from_others_that_end_alike() -> None:
    part = Part("", (3,), ("ow3 += g1 * dw12;", "tw4 = w5 * P3_1;", "V w10 = ow11;"))
    assert part.uses("w") == [5, 10] and part.uses("ow") == [3, 11] and part.uses("tw") == [4]


@pytest.mark.parametrize("irreps_out", ["0e", "0e+1o", "0e+1o+2e"])
def test_fewer_operations_than_the_plain_sum(irreps_out: str) -> None:
    """And the gradients of x fewer than half of what differentiating each term by each of its factors takes."""
    problem = ContractionProblem("0e+1o+2e+3o", irreps_out, 3, 128)
    counts = {name: operations(contraction_parts(problem, d)) for name, d in CONTRACTION_DIRECTIONS.items()}
    gradient = sum(one.degree * (one.degree + 1) * sum(map(len, one.components)) for one in polynomials(problem))
    assert 4 * counts["forward"] < 3 * plain_operations(problem)
    assert 2 * counts["feature_backward"] < gradient
    assert counts["backward"] < counts["forward"] + counts["feature_backward"]
    assert counts["double_backward"] < 2 * counts["backward"]


def test_operations_of_a_hand_written_part() -> None:
    lines = ("const V p1 = x0 * x1;", "y0 += w0 * p1;", "V a = -x0;", "const V c = v1 - Real(2.0) * v2 + v3;")
    assert operations([Part("", (0,), lines), Part("", (1,), lines[:1])]) == 1 + 1 + 0 + 2 + 1


def test_plain_operations_count_each_factor() -> None:
    """x_0, and x_0 x_0 with the dot product of a vector with itself: three terms of three factors."""
    assert plain_operations(ContractionProblem("0e", "0e", 2, 1)) == 2 + 3
    assert plain_operations(ContractionProblem("1o", "0e", 2, 1)) == 3 * 3


@pytest.mark.parametrize(
    "direction, operands",
    [
        (FORWARD, "x w"),
        (contraction_backward("x"), "x w g"),
        (contraction_backward("w"), "x g"),
        (contraction_double_backward("x", "x"), "x tx w g"),
        (contraction_double_backward("x", "w"), "x tx g"),
        (contraction_double_backward("x", "g"), "x tx w"),
        (contraction_double_backward("w", "x"), "x tw g"),
        (contraction_double_backward("w", "g"), "x tw"),
        (contraction_double_backward("xw", "xwg"), "x tx w tw g"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.text,
)
def test_a_direction_reads_no_more_than_it_needs(direction: ContractionDirection, operands: str) -> None:
    assert direction.operands == tuple(operands.split())
    used = {
        name
        for part in contraction_parts(PROBLEMS[0], direction)
        for name in ("x", "tx", "w", "tw", "g")
        if part.uses(name)
    }
    assert used == set(direction.operands)


@pytest.mark.parametrize("tangents, outputs", [("wx", "x"), ("g", "x"), ("x", "gx"), ("x", "y"), ("x", "xx")])
def test_what_is_no_direction(tangents: str, outputs: str) -> None:
    with pytest.raises(ProblemError, match="is not an ordered choice from"):
        contraction_double_backward(tangents, outputs)
