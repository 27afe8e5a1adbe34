"""The elements of nodes: their range, the order of nodes by element, and sums over the nodes of each element."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from kernelgen.errors import InputError
from kernelgen.runtime.graph import EdgeOrder, order_by
from kernelgen.runtime.known_graphs import KNOWN_GRAPHS


def node_order(elements: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Nodes ordered by element, as spans and permutation, kept for the graphs that come again."""

    def make() -> EdgeOrder:
        return EdgeOrder(*order_by("elements", elements, rows))

    with _naming(elements, rows):
        known = KNOWN_GRAPHS.order(elements, elements, (rows, rows, "elements"), make)
    if known is None:
        check_range(elements, rows)
    order = make() if known is None else known[0]
    assert order.spans is not None and order.perm is not None
    return order.spans, order.perm


def check_range(elements: Tensor, rows: int) -> None:
    """InputError, on a GPU a device-side assertion, for elements that are no rows of the weights."""
    with _naming(elements, rows):
        KNOWN_GRAPHS.check(elements, elements, rows, rows)


@contextlib.contextmanager
def _naming(elements: Tensor, rows: int) -> Iterator[None]:
    """Say which of this operator's arguments is out of range."""
    try:
        yield
    except InputError as error:
        least, most = (int(bound) for bound in torch.aminmax(elements))
        raise InputError(f"elements are {least}..{most}; w has {rows} rows: expected 0..{rows - 1}") from error


def sums_by_element(rows: Tensor, spans: Tensor, nodes_per_task: int) -> Tensor:
    """Sums over the rows of each element, see ``kernelgen.plan.symmetric_contraction``; always in the same order."""
    begins = spans[:, 1].sort().values.long()
    count = begins.shape[0]
    firsts = begins // nodes_per_task + torch.arange(count, device=rows.device)
    if rows.is_cpu:
        # Adds row after row, four times as fast as segment_reduce; on a GPU it would add in any order.
        elements = torch.searchsorted(firsts, torch.arange(rows.shape[0]), right=True) - 1
        return rows.new_zeros((count, rows.shape[1])).index_add_(0, elements, rows)
    offsets = torch.cat((firsts, firsts.new_full((1,), rows.shape[0])))
    return torch.segment_reduce(rows, "sum", offsets=offsets, axis=0, unsafe=True)
