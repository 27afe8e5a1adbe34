"""Fewer cases of a test with many parameters: ``@pytest.mark.covering(2)`` leaves the others to ``slow``.

covering(0): one case stays. covering(1): each value of each parameter is in some case. covering(2): each pair of values
of two parameters is. Few faults need three at once; those that do are for the full product, which ``-m slow`` runs
(D. R. Kuhn, D. R. Wallace and A. M. Gallo, "Software fault interactions", IEEE Trans. Softw. Eng. 30, 2004).
``--others K/N`` runs every N-th of these, from the K-th: so CI comes to all of them within N commits. Cases marked
``gpu`` stand outside: they run elsewhere. ``--slow K/N`` does the same with tests that are marked ``slow`` themselves.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import pytest


def leave_others_to_slow(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Mark the cases that add nothing to the cover of their test, and return them."""
    tests = defaultdict(list)
    others = []
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("gpu"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        (strength,) = cases[0].get_closest_marker("covering").args
        kept = cover([_values(case) for case in cases], strength)
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(pytest.mark.slow)
                others.append(case)
    return others


def outside(share: str, items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Those that a share of them leaves out. share: ``K/N``, every N-th from the K-th."""
    first, step = map(int, share.split("/"))
    return [item for number, item in enumerate(items) if number % step != first % step]


def _values(case: pytest.Item) -> dict[str, Hashable]:
    """What tells the values of each parameter apart."""
    plain = (str, int, float, type(None))
    return {
        name: value if isinstance(value, plain) else id(value)
        for name, value in case.callspec.params.items()  # type: ignore[attr-defined]
    }


def cover(cases: Sequence[Mapping[str, Hashable]], strength: int) -> set[int]:
    """Numbers of cases that have every combination of ``strength`` values that is in some case, chosen greedily."""
    combinations = [set(itertools.combinations(sorted(case.items()), strength)) for case in cases]
    left, kept = set().union(*combinations), set()
    while left:
        best = max(range(len(cases)), key=lambda number: len(combinations[number] & left))
        kept.add(best)
        left -= combinations[best]
    return kept
