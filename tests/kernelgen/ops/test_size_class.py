"""The size class in integers against logarithms."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kernelgen.problem.product import size_class

COUNTS = st.one_of(st.integers(0, 200), st.integers(0, 2**40))


@given(edges=COUNTS, nodes=COUNTS)
def test_it_is_the_rounded_logarithm(edges: int, nodes: int) -> None:
    exact = math.log2(max(1, edges)), math.log2(max(1.0, edges / max(1, nodes)))
    for found, logarithm in zip(size_class(edges, nodes), exact, strict=True):
        assert abs(found - logarithm) <= 0.5 + 1e-12


def test_borders() -> None:
    assert [size_class(edges, 1)[0] for edges in (0, 1, 2, 3, 5, 6, 11, 12)] == [0, 0, 1, 2, 2, 3, 3, 4]
    assert [size_class(edges, 100)[1] for edges in (10, 141, 142, 282, 283)] == [0, 0, 1, 1, 2]
