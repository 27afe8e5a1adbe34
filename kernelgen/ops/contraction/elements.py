"""The elements of nodes: their range, the order of nodes by element, and sums over the nodes of each element."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from kernelgen.emit.source import Source, included
from kernelgen.emit.symmetric_contraction import C_TYPES
from kernelgen.errors import InputError
from kernelgen.ops.base import DTYPES
from kernelgen.runtime.allocation import empty
from kernelgen.runtime.graph import EdgeOrder, order_by
from kernelgen.runtime.kernel import FixedKernel
from kernelgen.runtime.known_graphs import KNOWN_GRAPHS

_THREADS, _COLUMNS = 512, 128


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


def sums_by_element(rows: Tensor, spans: Tensor, of_task: int) -> Tensor:
    """Sums over the rows of each element [elements, columns], always in the same order.

    rows: those of ``kernelgen.plan.symmetric_contraction``, of tasks of ``of_task`` nodes. spans: of ``node_order``.
    """
    count, width = spans.shape[0], rows.shape[1]
    if rows.is_cpu:
        begins = spans[:, 1].sort().values.long()
        firsts = begins // of_task + torch.arange(count)
        # Adds row after row, four times as fast as segment_reduce.
        elements = torch.searchsorted(firsts, torch.arange(rows.shape[0]), right=True) - 1
        return rows.new_zeros((count, width)).index_add_(0, elements, rows)
    out, parts = empty((count, width), rows), -(-width // _COLUMNS)
    if count:
        values = (rows.data_ptr(), spans.data_ptr(), out.data_ptr(), width, of_task, parts)
        _sums(rows.dtype).launch(rows.get_device(), count * parts, *values)
    return out


@functools.cache
def _sums(dtype: torch.dtype) -> FixedKernel:
    return FixedKernel(sums_source(dtype), 6, _THREADS)


def sums_source(dtype: torch.dtype) -> Source:
    """The source of the kernel that sums rows of a dtype."""
    text = f"#define REAL {C_TYPES[DTYPES[dtype]]}\n" + included("sums_by_element.cuh")
    return Source(text, "cuda", "equitune_contraction_sums")
