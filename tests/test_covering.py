"""What is left of a test with many parameters covers each pair of their values."""

from __future__ import annotations

import itertools

from covering import cover


def test_each_pair_is_there_with_far_fewer_cases() -> None:
    cases = [dict(zip("abc", values, strict=True)) for values in itertools.product(range(5), range(4), range(3))]
    kept = cover(cases, 2)
    for one, other in itertools.combinations("abc", 2):
        assert {(cases[k][one], cases[k][other]) for k in kept} == {(case[one], case[other]) for case in cases}
    assert 20 <= len(kept) <= 24 < len(cases)
    assert len(cover(cases, 1)) == 5
    assert cover(cases[7:8], 2) == {0}, "a case that is asked for alone runs"
    assert len(cover(cases, 3)) == len(cases)
