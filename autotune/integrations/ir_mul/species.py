"""Nodes by element: which rows of one-hot ``node_attrs`` belong together, found once a tensor for all layers.

On a CPU nodes are sorted by element. On a GPU, where the counts are not known without waiting for it, every element's
nodes fill chunks of ``CHUNK`` rows, the last one padded; elements and nodes bound the number of chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernelgen.compat import is_eager
from kernelgen.ops.node_matrices import CHUNK, Groups
from kernelgen.runtime.known_graphs import KnownGraphs


class Species(NamedTuple):
    """elements: int64 [nodes]. On a CPU ``order`` is the sorted nodes (None if they are sorted), ``place`` where each
    went, and ``spans`` are (element, begin, end). On a GPU ``place`` is each node's row in the chunks, ``chunks`` their
    elements, and ``groups`` the same for kernels.
    """

    elements: Tensor
    place: Tensor | None
    order: Tensor | None = None
    spans: tuple[tuple[int, int, int], ...] = ()
    chunks: Tensor | None = None
    groups: Groups | None = None


def sorted_species(elements: Tensor) -> Species:
    """By sorting; waits for the device."""
    ordered, order = torch.sort(elements, stable=True)
    found, counts = torch.unique_consecutive(ordered, return_counts=True)
    ends = counts.cumsum(0).tolist()
    spans = tuple(zip(found.tolist(), [0, *ends[:-1]], ends, strict=True))
    if torch.equal(ordered, elements):
        return Species(elements, None, None, spans)
    return Species(elements, torch.argsort(order), order, spans)


def chunked_species(elements: Tensor, count: int) -> Species:
    """By chunks, for ``count`` elements; does not wait for the device."""
    nodes, device = len(elements), elements.device
    ordered, order = torch.sort(elements, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(count + 1, device=device))
    ends = ((starts.diff() + CHUNK - 1) // CHUNK).cumsum(0)
    begins = torch.cat((ends.new_zeros(1), ends))
    rows = torch.arange(nodes, device=device) - starts[ordered] + begins[ordered] * CHUNK
    most = min(nodes, count) + nodes // CHUNK
    chunks = torch.searchsorted(ends, torch.arange(most, device=device), right=True).clamp_(max=count - 1)
    place = torch.empty_like(rows).index_copy_(0, order, rows)
    slots = rows.new_full((most * CHUNK,), -1).index_copy_(0, rows, order)
    return Species(elements, place, chunks=chunks, groups=Groups(nodes, slots, chunks, begins))


_KNOWN = KnownGraphs()
# Devices and numbers of elements for which rows were one-hot: later tensors are checked without waiting.
_MET: set[tuple[torch.device, int]] = set()


def species_of(node_attrs: Tensor) -> Species | None:
    """The nodes by element; None if rows are not one-hot, need gradients, or are traced or transformed.

    On a GPU the first tensor of a device is checked with a wait. Should a later one not be one-hot, a device-side
    assertion fails.
    """
    if node_attrs.requires_grad or not is_eager(node_attrs):
        return None
    known = _KNOWN.find(node_attrs, node_attrs)
    if known is None:
        return _found(node_attrs)
    stream = torch.cuda.current_stream(node_attrs.device).cuda_stream if node_attrs.is_cuda else 0
    if stream not in known.facts:
        with torch.inference_mode(False):
            known.facts[stream] = _found(node_attrs)
    return known.facts[stream]


def types_of(types: Tensor, count: int) -> tuple[Species, Tensor]:
    """The nodes by type, int64 [nodes] below ``count``, and a node of each type.

    On a CPU types are numbered anew, those that occur alone. On a GPU there are as many numbers as types, or as so few
    nodes may have; those that do not occur have node 0.
    """
    known = _KNOWN.find(types, types)
    if known is None:
        return _by_types(types, count)
    stream = torch.cuda.current_stream(types.device).cuda_stream if types.is_cuda else 0
    key = ("types", count, stream)
    if key not in known.facts:
        with torch.inference_mode(False):
            known.facts[key] = _by_types(types, count)
    return known.facts[key]


def types_without_waiting(types: Tensor, count: int) -> tuple[Species, Tensor]:
    """What :func:`types_of` gives on a GPU."""
    most = -(-len(types) // 8) * 8  # a multiple, so that few numbers of nodes make products of their own
    if most < count:
        occurs = types.new_zeros(count).scatter_(0, types, 1)
        types, count = (occurs.cumsum(0) - 1).index_select(0, types), most
    nodes = torch.arange(len(types), device=types.device)
    return chunked_species(types, count), types.new_zeros(count).scatter_(0, types, nodes)


def _by_types(types: Tensor, count: int) -> tuple[Species, Tensor]:
    if types.is_cuda:
        return types_without_waiting(types, count)
    nodes = torch.arange(len(types), device=types.device)
    found, elements = torch.unique(types, return_inverse=True)
    return sorted_species(elements), torch.empty_like(found).scatter_(0, elements, nodes)


def elements_of(node_attrs: Tensor) -> Tensor | None:
    """The number of each node's element, int64; also in traced code, which asserts that rows are one-hot."""
    if torch.compiler.is_compiling() and not node_attrs.requires_grad:
        elements, are_one_hot = _largest(node_attrs)
        torch._assert_async(are_one_hot, "node_attrs has rows that are not one-hot")
        return elements
    species = species_of(node_attrs)
    return None if species is None else species.elements


@torch.no_grad()
def _found(node_attrs: Tensor) -> Species | None:
    if 0 in node_attrs.shape:
        return None
    is_captured = node_attrs.is_cuda and torch.cuda.is_current_stream_capturing()
    if is_captured:
        # Rows of a graph that is being captured cannot be looked at; those that were not one-hot before are not now.
        before = _KNOWN.seen(node_attrs, node_attrs)
        if before is not None and None in before.facts.values():
            return None
    elements, are_one_hot = _largest(node_attrs)
    key = (node_attrs.device, node_attrs.shape[1])
    if is_captured or (node_attrs.is_cuda and key in _MET):
        torch._assert_async(are_one_hot, "node_attrs has rows that are not one-hot, after one-hot ones on this device")
    elif not are_one_hot:
        return None
    else:
        _MET.add(key)
    return chunked_species(elements, node_attrs.shape[1]) if node_attrs.is_cuda else sorted_species(elements)


def _largest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The place of each row's largest number, and whether all rows are one-hot."""
    largest, places = rows.max(1)
    return places, ((largest == 1) & (rows.count_nonzero(1) == 1)).all()
