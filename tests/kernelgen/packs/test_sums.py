"""Scattered additions into one row become sums of the rows; others stay, and so do the results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kernelgen.packs.library import with_plain_sums

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def scatter_add(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, dtype=rows.dtype).scatter_add(0, index, rows)


def scatter_add_in_place(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    result = torch.ones(1, 1, dtype=rows.dtype)
    result.scatter_add_(0, index[:, None], rows[:, None])
    return 2 * result


def scatter_reduce(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, dtype=rows.dtype).scatter_reduce(0, index, rows, "sum")


def index_add(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, 3, dtype=rows.dtype).index_add_(0, index, rows[:, None].expand(-1, 3))


def two_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.ones(2, dtype=rows.dtype).scatter_add(0, index, rows)


def largest(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, dtype=rows.dtype).scatter_reduce(0, index, rows, "amax")


def some_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, dtype=rows.dtype).scatter_add(0, index[:4], rows)


def scaled(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, dtype=rows.dtype).index_add(0, index, rows, alpha=3)


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        *((step, True) for step in (scatter_add, scatter_add_in_place, scatter_reduce, index_add)),
        *((step, False) for step in (two_rows, largest, some_rows, scaled)),
    ],
)
def test_sums_into_one_row(step: Step, changes: bool) -> None:
    index = torch.zeros(9, dtype=torch.int64)
    example = (torch.randn(9, dtype=torch.float64), index)
    traced = with_plain_sums(make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example))
    assert ("aten.sum.dim_IntList" in traced.code) == changes
    assert any(name in traced.code for name in ("scatter", "index_add")) != changes
    for count in (9, 5):
        given = (torch.randn(count, dtype=torch.float64), index[:count])
        torch.testing.assert_close(traced(*given), step(*given))
    shapes = ({0: (rows := torch.export.Dim("rows", min=5))}, {0: rows})
    program = torch.export.export(traced, example, dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(*example), step(*example))
