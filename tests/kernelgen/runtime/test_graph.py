"""Edge orders: spans and permutations against a plain loop, and the opt-in index check."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import autotune
from kernelgen import InputError
from kernelgen.ops.product import build
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime import graph
from kernelgen.runtime.graph import EdgeOrder, check_indices, edge_order, is_in_order, longest_first, sorted_nodes


def by_destination(receiver: list[int], num_out: int) -> list[list[int]]:
    return [[edge for edge, node in enumerate(receiver) if node == d] for d in range(num_out)]


def walked(receiver: list[int], num_out: int, dtype: torch.dtype, *, is_sorted: bool) -> list[list[int]]:
    spans, perm, *_ = edge_order(torch.tensor(receiver, dtype=dtype), num_out, is_sorted=is_sorted)
    assert spans.dtype == torch.int32 and spans.shape == (num_out, 3)
    if is_sorted:
        assert perm is None
    else:
        assert perm is not None and perm.dtype == torch.int32 and perm.shape == (len(receiver),)
    edges = list(range(len(receiver))) if perm is None else perm.tolist()
    by_node = {node: edges[begin:end] for node, begin, end in spans.tolist()}
    return [by_node[d] for d in range(num_out)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("receiver", "num_out"), [([2, 0, 2, 1, 0, 5], 8), ([0], 1), ([3, 3, 3], 4), ([], 3), ([], 0), ([1, 1, 0], 2)]
)
def test_unsorted_edges_of_a_destination_keep_their_order(
    receiver: list[int], num_out: int, dtype: torch.dtype
) -> None:
    assert walked(receiver, num_out, dtype, is_sorted=False) == by_destination(receiver, num_out)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("receiver", "num_out"), [([0, 0, 2, 2, 2, 5], 8), ([0], 1), ([], 3)])
def test_sorted_edges_need_no_permutation(receiver: list[int], num_out: int, dtype: torch.dtype) -> None:
    assert walked(receiver, num_out, dtype, is_sorted=True) == by_destination(receiver, num_out)


def test_each_end_has_its_order_whatever_is_promised_of_the_other() -> None:
    sender, receiver = torch.tensor([2, 0, 1, 0]), torch.tensor([0, 0, 1, 2])
    order = edge_order(receiver, 3, is_sorted=True, sender=sender, num_in=4)
    assert order.perm is None and order.spans.tolist() == [[0, 0, 2], [1, 2, 3], [2, 3, 4]]
    assert order.sender_perm.tolist() == [1, 3, 2, 0]
    assert order.sender_spans.tolist() == [[0, 0, 2], [1, 2, 3], [2, 3, 4], [3, 4, 4]]
    assert len(edge_order(receiver, 3, sender=sender).sender_spans) == 3, "as many nodes as destinations"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("count", [0, 1, 300, 32_766, 32_767, 40_000])
def test_short_keys_give_the_same_order(count: int, device: str) -> None:
    """Nodes that do not exist are beyond all others, not among them."""
    nodes = torch.randint(max(count, 1), (5000,), generator=torch.Generator().manual_seed(0)).to(device)
    nodes[::7], nodes[3], nodes[5], nodes[11] = max(count - 1, 0), count, 65_536 + 1, -1
    (short, places), (long, wanted) = (sorted_nodes(nodes, count, short_keys=keys) for keys in (True, False))
    assert short.dtype is places.dtype is torch.int32
    assert places.sort().values.tolist() == list(range(5000))
    exist = (long >= 0) & (long < count)
    assert torch.equal(short[exist], long[exist]) and torch.equal(places[exist], wanted[exist])
    assert torch.equal((short >= 0) & (short < count), exist)


def test_order_is_made_without_reading_values() -> None:
    """Fake tensors have no values, so an order of them proves that nothing is read back from a device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        order = edge_order(torch.zeros(5, dtype=torch.int64), 3)
    assert order.spans.shape == (3, 3)
    assert order.perm is not None and order.perm.shape == (5,)


def test_longest_spans_come_first_and_equal_ones_keep_their_order() -> None:
    spans = edge_order(torch.tensor([0, 1, 1, 3, 4, 4]), 5, is_sorted=True).spans
    assert spans is not None and spans[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert longest_first(spans).tolist() == [[1, 1, 3], [4, 4, 6], [0, 0, 1], [3, 3, 4], [2, 3, 3]]


def test_order_rejects_what_is_no_index() -> None:
    with pytest.raises(InputError, match=r"float32 \(3,\)"):
        edge_order(torch.zeros(3), 2)
    with pytest.raises(InputError, match=r"int64 \(3, 1\)"):
        edge_order(torch.zeros(3, 1, dtype=torch.int64), 2)


def test_is_in_order() -> None:
    assert is_in_order(torch.tensor([0, 0, 1, 4]))
    assert is_in_order(torch.tensor([], dtype=torch.int64))
    assert not is_in_order(torch.tensor([0, 2, 1]))


def test_index_check_names_the_first_bad_edge() -> None:
    good = torch.tensor([0, 1, 2])
    check_indices(good, good, 3, 3)
    with pytest.raises(InputError, match=r"sender\[2\] is 2, outside 0\.\.1"):
        check_indices(good, good, 2, 3)
    with pytest.raises(InputError, match=r"receiver\[1\] is -1, outside 0\.\.2 \(2 of 3 edges"):
        check_indices(good, torch.tensor([0, -1, 7]), 3, 3)


def test_more_edges_than_32_bits_count_are_refused() -> None:
    """Indices of one stored element: nothing of the graph's size may be made before."""
    many = graph.MOST_EDGES + 1
    index = torch.zeros(1, dtype=torch.int32).expand(many)
    with pytest.raises(InputError, match=r"the graph has 2,147,418,113 edges; expected at most 2,147,418,112"):
        edge_order(index, 1)
    nodes = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(InputError, match=r"the graph has 715,806,038 nodes; expected at most 715,806,037"):
        edge_order(nodes, graph.MOST_NODES + 1)
    with pytest.raises(InputError, match="715,806,038 nodes"):
        edge_order(nodes, 1, sender=nodes, num_in=graph.MOST_NODES + 1)
    problem = TensorProductProblem.channelwise("2x0e", "0e", "0e")
    x, y, w = torch.zeros(1, 2), torch.zeros(1, 1).expand(many, 1), torch.zeros(1, 2).expand(many, 2)
    for backend_order in (None, EdgeOrder(None, None)):
        with pytest.raises(InputError, match="2,147,418,113 edges"):
            build(problem)(x, y, w, index, index, num_out=1, order=backend_order)
    with pytest.raises(InputError, match="2,147,418,113 edges"):
        build(problem, operation="plain")(x.expand(many, 2), y, w)


@pytest.mark.parametrize("spare", [0, 1])
def test_every_convolution_knows_the_limits(spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of edges in parts, and traced ones, whose sizes are known when they run."""
    index, few = torch.tensor([0, 1, 2, 1, 0, 2]), {"filter_irreps_out": "0e"}
    monkeypatch.setattr(graph, "MOST_EDGES", 5 + spare)
    x, y, w = torch.randn(3, 2), torch.randn(6, 1), torch.randn(6, 2)
    radial, harmonics = torch.randn(6, 4), autotune.SphericalHarmonics("0e", True)
    conv = autotune.TensorProductConv("2x0e", "0e", **few)
    calls: list[Callable[[], Tensor]] = [
        lambda: conv(x, y, w, index, index),
        lambda: torch.func.vmap(lambda each: conv(each, y, w, index, index))(x[None]),
        lambda: autotune.SphericalHarmonicsConv("2x0e", harmonics, **few)(x, torch.randn(6, 3), w, index, index),
        *(
            lambda most=most: autotune.RadialTensorProductConv("2x0e", "0e", edges_at_a_time=most, **few)(
                x, y, radial, torch.randn(4, 2), index, index
            )
            for most in (None, 2)
        ),
    ]
    for call in calls:
        with contextlib.nullcontext() if spare else pytest.raises(InputError, match="has 6 edges; expected at most 5"):
            call()
