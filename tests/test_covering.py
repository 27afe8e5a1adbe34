"""What is left of a test with many parameters covers each pair of their values."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from covering import cover, leave_others_to_slow, outside


def test_each_pair_is_there_with_far_fewer_cases() -> None:
    cases = [dict(zip("abc", values, strict=True)) for values in itertools.product(range(5), range(4), range(3))]
    kept = cover(cases, 2)
    for one, other in itertools.combinations("abc", 2):
        assert {(cases[k][one], cases[k][other]) for k in kept} == {(case[one], case[other]) for case in cases}
    assert 20 <= len(kept) <= 24 < len(cases)
    assert len(cover(cases, 1)) == 5
    assert cover(cases[7:8], 2) == {0}, "a case that is asked for alone runs"
    assert len(cover(cases, 3)) == len(cases)


@dataclass
class FakeCase:
    """What is read of a pytest item, and the marks that it got."""

    nodeid: str
    callspec: Any
    marks: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> Any:
        return pytest.mark.covering(1).mark if name == "covering" or name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks += (mark.name,)


def test_shares_of_the_others_add_up_to_all_of_them() -> None:
    cases: list[Any] = [
        FakeCase(f"{test}[{a}-{b}]", SimpleNamespace(params={"a": a, "b": b}))
        for test, a, b in itertools.product(("first", "second"), range(5), range(3))
    ]
    others = leave_others_to_slow(cases)
    assert others == [case for case in cases if "slow" in case.marks] and len(others) == 30 - 2 * 5
    counts = Counter(case.nodeid for share in range(4, 8) for case in outside(f"{share}/4", others))
    assert counts == {case.nodeid: 3 for case in others}, "each is in one share of four"
    assert outside("0/1", others) == []


def test_a_case_for_a_gpu_stands_for_no_other() -> None:
    cases: list[Any] = [
        FakeCase("test[cuda-3]", SimpleNamespace(params={"device": "cuda", "size": 3}), ("gpu",)),
        FakeCase("test[cpu-3]", SimpleNamespace(params={"device": "cpu", "size": 3})),
        FakeCase("test[cpu-4]", SimpleNamespace(params={"device": "cpu", "size": 4})),
    ]
    leave_others_to_slow(cases)
    assert [case.marks for case in cases] == [("gpu",), (), ()]
