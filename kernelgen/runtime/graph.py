"""Edges in the order of nodes: the spans of edges (and the permutation) that the owners of nodes loop over.

Uses only torch operations and no device synchronisation, so an order can be computed in a captured or compiled graph.
Edge indices on a GPU are checked by a small kernel.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.errors import InputError
from kernelgen.kernels.source import Source, included
from kernelgen.runtime.kernel import FixedKernel

# A GPU starts blocks in order. Up to this many nodes, the longest spans come first, so that none starts last. With more
# nodes the load balances by itself, and their own order keeps neighbours close in memory.
LONGEST_FIRST = 8192
# Spans, permutations and loops of a GPU's kernels count edges by 32 bits, and may step somewhat beyond the last one;
# a node has three numbers in the spans. Offsets of elements have 64 bits everywhere.
MOST_EDGES = (1 << 31) - (1 << 16)
MOST_NODES = MOST_EDGES // 3


class EdgeOrder(NamedTuple):
    """Edges ordered by node. A row of ``spans`` is (destination, begin, end); its edges are ``perm[begin:end]``.

    spans: int32 [num_out, 3], every destination once, in the order in which workers take them.
    perm: int32 [num_edges], or None if the edges are already ordered: then the edges are begin..end.
    sender_spans, sender_perm: the same by sender, [num_in, 3] and [num_edges]. Spans that no kernel needs may be None.
    """

    spans: Tensor | None
    perm: Tensor | None
    sender_spans: Tensor | None = None
    sender_perm: Tensor | None = None


NO_ORDER = EdgeOrder(None, None)


def edge_order(
    receiver: Tensor,
    num_out: int,
    *,
    is_sorted: bool = False,
    sender: Tensor | None = None,
    num_in: int | None = None,
) -> EdgeOrder:
    """The order of edges by ``receiver`` [num_edges]; edges of one destination keep their order.

    ``is_sorted`` promises that ``receiver`` does not decrease, so that no permutation is needed. A false promise gives
    wrong sums. With ``sender`` [num_edges] (indices below ``num_in``, by default num_out) the result has the order by
    sender too.
    """
    spans, perm = order_by("receiver", receiver, num_out, is_sorted)
    if sender is None:
        return EdgeOrder(spans, perm)
    return EdgeOrder(spans, perm, *order_by("sender", sender, num_out if num_in is None else num_in))


def check_sizes(num_edges: Any, *num_nodes: Any) -> None:
    """Raise InputError for more edges or nodes than kernels can count; sizes that are symbols pass."""
    for name, count, most in (("edges", num_edges, MOST_EDGES), *(("nodes", count, MOST_NODES) for count in num_nodes)):
        if type(count) is int and count > most:
            raise InputError(
                f"the graph has {count:,} {name}; expected at most {most:,}: give the edges in parts, and add the "
                "results"
            )


def order_by(
    name: str, nodes: Tensor, count: int, is_sorted: bool = False, by_length: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Spans and permutation of edges by one end, called ``name`` in errors. by_length: on a GPU, longest first."""
    check_is_tensor(name, nodes)
    count = row_count("num_out", count)
    if nodes.dim() != 1 or nodes.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{name} is {nodes.dtype} {tuple(nodes.shape)}; expected int32 or int64 of shape [num_edges]")
    if count < 0:
        raise InputError(f"num_out is {count}; expected the number of destinations, at least 0")
    check_sizes(nodes.shape[0], count)
    perm = None
    if is_sorted:
        nodes = nodes.int()
    else:
        nodes, perm = sorted_nodes(nodes, count, short_keys=nodes.is_cuda and type(count) is int)
    bounds = torch.arange(count + 1, dtype=torch.int32, device=nodes.device)
    ends = torch.searchsorted(nodes.contiguous(), bounds, out_int32=True)
    spans = torch.stack((bounds[:-1], ends[:-1], ends[1:]), 1)
    if by_length and nodes.is_cuda and count <= LONGEST_FIRST:
        spans = longest_first(spans)
    return spans, perm


def sorted_nodes(nodes: Tensor, count: int, *, short_keys: bool) -> tuple[Tensor, Tensor]:
    """Nodes in ascending order and their places before, both int32; equal ones keep their order.

    A GPU sorts digit by digit: keys of 32 bits take half the passes of 64, and short keys, of 16 bits, half of these.
    Indices that are not below ``count``, or are negative, come after or before all others with either.
    """
    fits = short_keys and count < torch.iinfo(torch.int16).max
    keys = nodes.clamp(-1, count).short() if fits else nodes.int()
    found, order = torch.sort(keys, stable=True)
    return found.int(), order.int()


def check_is_tensor(name: str, index: object) -> None:
    """Raise InputError for a list, a NumPy array or anything else that is not a tensor."""
    if not isinstance(index, Tensor):
        raise InputError(
            f"{name} is of type {type(index).__name__}; expected a tensor of int32 or int64 [num_edges]: make one with "
            f"torch.as_tensor({name}, device=...)"
        )


def row_count(name: str, given: Any) -> int:
    """A number of rows; InputError if it is not an integer (20.0 is not)."""
    if isinstance(given, (int, torch.SymInt)):
        return given  # type: ignore[return-value]
    try:
        return operator.index(given)
    except TypeError as error:
        raise InputError(f"{name} is {given!r}; expected an integer, the number of destinations") from error


def longest_first(spans: Tensor) -> Tensor:
    """``spans`` [nodes, 3] sorted by decreasing number of edges; equal ones keep their order."""
    return spans[torch.argsort(spans[:, 1] - spans[:, 2], stable=True)]


def is_in_order(receiver: Tensor) -> bool:
    """Whether ``receiver`` does not decrease; synchronises a GPU."""
    return bool((receiver[1:] >= receiver[:-1]).all())


def check_indices(sender: Tensor, receiver: Tensor, num_in: int, num_out: int) -> None:
    """Raise InputError for the first edge whose sender or receiver is out of range; synchronises a GPU."""
    for name, index, count in (("sender", sender, num_in), ("receiver", receiver, num_out)):
        check_is_tensor(name, index)
        if index.shape[0] == 0:
            continue
        least, most = (int(bound) for bound in torch.aminmax(index))
        if least >= 0 and most < count:
            continue
        bad = ((index < 0) | (index >= count)).nonzero()
        edge = int(bad[0])
        raise InputError(
            f"{name}[{edge}] is {int(index[edge])}, outside 0..{count - 1}"
            f" ({bad.shape[0]} of {index.shape[0]} edges are); check the graph, or num_out"
        )


def check_ascending(receiver: Tensor) -> None:
    """Raise InputError for a receiver that decreases despite ``is_sorted``; synchronises a GPU."""
    if not is_in_order(receiver):
        raise InputError("edges are said to be sorted (edges_sorted, is_sorted), but receiver is not ascending")


def assert_indices(sender: Tensor, receiver: Tensor, num_in: int, num_out: int, is_sorted: bool) -> None:
    """Both checks as assertions that a traced graph keeps; without synchronisation."""
    for name, index, count in (("sender", sender, num_in), ("receiver", receiver, num_out)):
        in_range = ((index >= 0) & (index < count)).all()
        torch._assert_async(in_range, f"{name} has an index that is negative or at least the number of nodes")
    if is_sorted:
        torch._assert_async((receiver[1:] >= receiver[:-1]).all(), "edges_sorted=True, but receiver is not ascending")


# Checks edge indices on a GPU with a small kernel, without synchronisation.

ENTRY = "equitune_index_check"
_THREADS, _MOST_BLOCKS = 256, 1024
_TYPES = {torch.int32: "int", torch.int64: "long long"}


@functools.cache
def source(index: torch.dtype) -> Source:
    """The source of the kernel for indices of a dtype."""
    return Source(f"#define INDEX {_TYPES[index]}\n" + included("index_check.cuh"), "cuda", ENTRY)


def source_of(index: str) -> Source:
    """The same, by the name of a dtype."""
    return source(getattr(torch, index))


@functools.cache
def _kernel(index: torch.dtype) -> FixedKernel:
    return FixedKernel(source(index), 5, _THREADS)


def check_on_device(name: str, index: Tensor, count: int) -> None:
    """Stop the program with a device-side assertion if ``name`` (sender or receiver) is not in 0..count-1."""
    _launch(index, count, name == "receiver", False)


def check_ascending_on_device(receiver: Tensor) -> None:
    """Stop the program with a device-side assertion if ``receiver`` decreases anywhere."""
    _launch(receiver, 0, True, True)


def _launch(index: Tensor, count: int, is_receiver: bool, ascending: bool) -> None:
    index = index.contiguous()
    edges = index.shape[0]
    if edges:
        blocks = min(_MOST_BLOCKS, -(-edges // _THREADS))
        values = (index.data_ptr(), edges, count, int(is_receiver), int(ascending))
        _kernel(index.dtype).launch(index.get_device(), blocks, *values)
