"""The problem of a symmetric contraction: its sizes, its key, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from e3nn import o3

from kernelgen.errors import ProblemError
from kernelgen.problem.other_kinds import ContractionProblem

MACE = ContractionProblem("0e+1o+2e+3o", "0e+1o", 3, 128)


def test_sizes_and_blocks() -> None:
    assert (MACE.dim_in, MACE.dim_out) == (16, 4)
    assert [(block.offset, block.l, block.mul) for block in MACE.out] == [(0, 0, 1), (1, 1, 1)]


@pytest.mark.parametrize(
    "given", ["0e+1o+2e+3o", "1x0e+1x1o+1x2e+1x3o", o3.Irreps("0e+1o+2e+3o"), " 0e + 1o + 2e + 3o "], ids=str
)
def test_every_spelling_is_one_problem(given: Any) -> None:
    assert ContractionProblem(given, o3.Irreps("0e+1o"), 3, 128) == MACE


@pytest.mark.parametrize(
    "problem", [MACE, ContractionProblem("1o+0e+0e+1e", "2o", 1, 1), ContractionProblem("0o", "0e", 4, 5)], ids=str
)
def test_a_key_reads_back(problem: ContractionProblem) -> None:
    assert ContractionProblem.from_key(problem.key) == problem


def test_a_key_is_what_records_hold() -> None:
    assert MACE.key == "sc|0e+1o+2e+3o|0e+1o|3|128"


@pytest.mark.parametrize(
    "key",
    [
        "sc|0e+1o|0e|3",
        "sc|0e+1o|0e|3|128|1",
        "sc|0e+1o|0e|three|128",
        "sc|0e+1o|0e|3|-128",
        "sc|0e+1o|0e|03|128",
        "sc|1x0e+1x1o|0e|3|128",
        "tp|0e+1o|0e|3|128",
        "",
    ],
)
def test_other_texts_are_no_keys(key: str) -> None:
    with pytest.raises(ProblemError, match="is not a key of a contraction; expected 'sc|"):
        ContractionProblem.from_key(key)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("", "0e", 3, 128), "irreps_in is ''; expected irreps of one channel, for example '0e.1o.2e'"),
        (("0e+1o", "", 3, 128), "irreps_out is ''; expected irreps of one channel"),
        (("128x0e+128x1o", "0e", 3, 128), "irreps_in is '128x0e.128x1o'; expected irreps of one channel"),
        (("0e", "2x0e", 3, 128), "irreps_out is '2x0e'; expected irreps of one channel"),
        (("0e+1", "0e", 3, 128), "irreps_in: '0e.1' is not an irreps string"),
        (("0e", 5, 3, 128), "irreps_out: 5 is not an irreps string"),
        (("0e", "0e", 0, 128), r"correlation is 0; expected an integer of 1\.\.4"),
        (("0e", "0e", 5, 128), r"correlation is 5; expected an integer of 1\.\.4"),
        (("0e", "0e", 3.0, 128), r"correlation is 3\.0; expected an integer"),
        (("0e", "0e", True, 128), "correlation is True; expected an integer"),
        (("0e", "0e", 3, 0), "channels is 0; expected a positive integer"),
        (("0e", "0e", 3, "128"), "channels is '128'; expected a positive integer"),
    ],
)
def test_what_is_no_problem(arguments: tuple, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        ContractionProblem(*arguments)
