"""Orders of graphs are made once for all modules that see them, and never go stale."""

from __future__ import annotations

import gc

import pytest
import torch
from module_cases import conv_inputs, e3nn_conv, random_graph, small_conv

from autotune import modules
from autotune.order_cache import OrderCache
from kernelgen.operators import Operator, build


def small_operator() -> Operator:
    conv = small_conv()
    return build(conv.problem)


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A fresh cache of orders; the list grows by one number of destinations at each order that is really made."""
    made: list[int] = []

    make = Operator.order

    def counting(self: Operator, sender: torch.Tensor, receiver: torch.Tensor, *rest: int) -> object:
        made.append(rest[1])
        return make(self, sender, receiver, *rest)

    monkeypatch.setattr(Operator, "order", counting)
    monkeypatch.setattr(modules, "_ORDERS", OrderCache())
    return made


def test_a_graph_is_ordered_once_for_all_calls_and_layers(ordered: list[int]) -> None:
    first, second = small_conv(), small_conv()
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(first, 40, 7)
    for conv in (first, second, first):
        conv(*inputs, sender, receiver)
    assert ordered == [7]
    first(*inputs, sender, receiver, num_nodes=9)
    assert ordered == [7, 9]


def test_a_changed_receiver_is_ordered_again(ordered: list[int]) -> None:
    conv = small_conv()
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    conv(*inputs, sender, receiver)
    receiver.copy_(receiver.flip(0))
    wanted = e3nn_conv(conv, sender, receiver, 7)(*inputs)
    torch.testing.assert_close(conv(*inputs, sender, receiver), wanted, rtol=0, atol=1e-10)
    receiver.data = receiver.roll(3)
    wanted = e3nn_conv(conv, sender, receiver, 7)(*inputs)
    torch.testing.assert_close(conv(*inputs, sender, receiver), wanted, rtol=0, atol=1e-10)
    assert len(ordered) == 3


def test_orders_die_with_their_graph_and_the_oldest_go_first(ordered: list[int]) -> None:
    cache, operator = OrderCache(size=3), small_operator()
    graphs = [random_graph(10 + n, 4, 4) for n in range(5)]
    for graph in graphs:
        cache.order(operator, *graph, 4, 4, False)
    assert len(cache) == 3
    cache.order(operator, *graphs[4], 4, 4, False)
    assert len(ordered) == 5
    cache.order(operator, *graphs[0], 4, 4, False)
    assert len(ordered) == 6
    graphs.clear()
    del graph
    gc.collect()
    assert len(cache) == 0


def test_sorted_receivers_on_the_cpu_need_no_permutation() -> None:
    cache, operator = OrderCache(), small_operator()
    sender, ascending, mixed = torch.arange(4), torch.tensor([0, 0, 1, 3]), torch.tensor([3, 0, 1, 0])
    assert cache.order(operator, sender, ascending, 4, 4, False).perm is None
    assert cache.order(operator, sender, mixed, 4, 4, False).perm is not None


def test_inference_tensors_are_ordered_each_time(ordered: list[int]) -> None:
    with torch.inference_mode():
        receiver = torch.tensor([2, 0, 1])
    cache, operator = OrderCache(), small_operator()
    cache.order(operator, torch.arange(3), receiver, 3, 3, False)
    cache.order(operator, torch.arange(3), receiver, 3, 3, False)
    assert (len(cache), len(ordered)) == (0, 2)


def test_a_traced_module_skips_the_cache_and_agrees(ordered: list[int]) -> None:
    conv = small_conv(dtype=torch.float64)
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    traced = torch.compile(conv, backend="eager", fullgraph=True)
    wanted = e3nn_conv(conv, sender, receiver, 7)(*inputs)
    torch.testing.assert_close(traced(*inputs, sender, receiver), wanted, rtol=0, atol=1e-10)
    assert len(modules._ORDERS) == 0
