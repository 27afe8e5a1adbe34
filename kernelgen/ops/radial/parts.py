"""Parts of a graph: runs of receivers with all their edges, so that parts write different rows of a result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.ops.operator import Operator
from kernelgen.runtime.arguments import Graph
from kernelgen.runtime.known_graphs import kept_fact, stream_of


class Part(NamedTuple):
    """Edges of the receivers ``begin..end``. places: where these edges are in the caller's tensors."""

    begin: int
    end: int
    places: slice | Tensor
    graph: Graph

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of these edges, of a tensor [edges, ...]."""
        return tensor[self.places]

    def write(self, target: Tensor, rows: Tensor) -> None:
        """Write rows of these edges into a tensor of all edges."""
        target[self.places] = rows


class Parts:
    """The parts of a graph, made when they are first needed; see :func:`parts_of`."""

    def __init__(self, *of: Any) -> None:
        self._of = of
        self._parts: tuple[Part, ...] | None = None

    def __iter__(self) -> Iterator[Part]:
        if self._parts is None:
            self._parts = parts_of(*self._of)
        return iter(self._parts)


def parts_of(operator: Operator, whole: Graph, most_edges: int) -> tuple[Part, ...]:
    """The parts of a checked graph, each of at most ``most_edges`` edges unless one receiver has more.

    Kept with a graph that is recognised again. A new graph on a GPU waits for the device once, for the receivers at
    which parts end.
    """
    receiver = whole.receiver
    assert receiver is not None
    key = ("radial parts", operator.text, whole.num_in, whole.num_out, most_edges, stream_of(receiver))
    return kept_fact(whole.known, key, lambda: tuple(_parts(operator, whole, most_edges)))


def _parts(operator: Operator, whole: Graph, most_edges: int) -> list[Part]:
    sender, receiver = whole.sender, whole.receiver
    assert sender is not None and receiver is not None
    order = None
    if bool((receiver[1:] < receiver[:-1]).any()):
        receiver, order = torch.sort(receiver, stable=True)
        sender = sender[order]
    counts = torch.bincount(receiver, minlength=whole.num_out)
    found = []
    for begin, end, first, last in _ranges([0, *counts.cumsum(0).tolist()], most_edges):
        # Copies: a kernel takes aligned and contiguous tensors.
        of_part = sender[first:last].clone(), receiver[first:last] - begin
        in_order = operator.order(*of_part, whole.num_in, end - begin, is_sorted=True)
        shapes = whole.shapes | {slot: (last - first, *whole.shapes[slot][1:]) for slot in "yw"}
        shapes["g"] = (end - begin, *whole.shapes["g"][1:])
        graph = Graph(*of_part, in_order, last - first, whole.num_in, end - begin, shapes)
        found.append(Part(begin, end, slice(first, last) if order is None else order[first:last], graph))
    return found


def _ranges(ends: list[int], most_edges: int) -> list[tuple[int, int, int, int]]:
    """First and last receiver, first and last edge of each part. ends: the edges before each receiver, and all."""
    found, begin = [], 0
    for node in range(1, len(ends)):
        if node == len(ends) - 1 or ends[node + 1] - ends[begin] > most_edges:
            found.append((begin, node, ends[begin], ends[node]))
            begin = node
    return found
