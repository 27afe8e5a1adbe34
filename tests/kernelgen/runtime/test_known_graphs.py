"""Graphs are ordered and checked once for all operators, and a changed graph is never mistaken for a known one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from module_cases import conv_inputs, e3nn_conv, random_graph, small_conv

import kernelgen.ops.product
import kernelgen.runtime.call
from kernelgen import InputError
from kernelgen.ops.product import Operator, build
from kernelgen.runtime import graph as known_graphs
from kernelgen.runtime.graph import KnownGraphs, edge_order, known_in_capture


def small_operator() -> Operator:
    return build(small_conv().problem)


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Forget all graphs; each order that is really computed appends its number of destinations to the list."""
    made: list[int] = []

    make = Operator.order

    def counting(self: Operator, sender: torch.Tensor, receiver: torch.Tensor, *rest: int) -> object:
        made.append(rest[1])
        return make(self, sender, receiver, *rest)

    graphs = KnownGraphs()
    monkeypatch.setattr(Operator, "order", counting)
    monkeypatch.setattr(kernelgen.ops.product, "KNOWN_GRAPHS", graphs)
    monkeypatch.setattr(kernelgen.runtime.call, "KNOWN_GRAPHS", graphs)
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


def test_the_same_contents_in_other_tensors_are_the_same_graph_on_the_cpu(ordered: list[int]) -> None:
    conv = small_conv()
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    conv(*inputs, sender, receiver)
    conv(*inputs, sender.clone(), receiver.clone())
    with torch.inference_mode():
        conv(*inputs, sender.clone(), receiver.clone())
    conv(*inputs, sender.int(), receiver.int())
    assert ordered == [7, 7]


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


def test_an_order_made_in_inference_mode_serves_training(ordered: list[int]) -> None:
    conv = small_conv(dtype=torch.float64)
    sender, receiver = random_graph(40, 7, 7)
    x, *rest = conv_inputs(conv, 40, 7)
    with torch.inference_mode():
        conv(x, *rest, sender, receiver)
    conv(x.requires_grad_(), *rest, sender, receiver).sum().backward()
    assert x.grad is not None and ordered == [7]


def test_the_oldest_graphs_are_forgotten_first_and_large_ones_when_they_are_too_many(ordered: list[int]) -> None:
    graphs, operator = KnownGraphs(size=3), small_operator()
    for n in range(5):
        sender, receiver = random_graph(10 + n, 4, 4)
        graphs.order(sender, receiver, (4, 4, None), lambda s=sender, r=receiver: operator.order(s, r, 4, 4))
    assert len(graphs) == 3
    known = graphs.find(sender, receiver)
    assert known is not None and known.orders
    graphs.find(*random_graph(1 << 21, 4, 4))
    graphs.find(*random_graph(1 << 20, 4, 4))
    assert len(graphs) == 2  # the one of 32 MiB and the newest
    graphs.find(*random_graph(3, 4, 4))
    assert len(graphs) == 2


def test_a_graph_that_was_seen_is_found_again_and_no_new_one_is_kept() -> None:
    graphs, (sender, receiver) = KnownGraphs(), random_graph(10, 4, 4)
    assert graphs.seen(sender, receiver) is None and len(graphs) == 0
    known = graphs.find(sender, receiver)
    assert graphs.seen(sender, receiver) is known is not None
    receiver[3] = (receiver[3] + 1) % 4
    assert graphs.seen(sender, receiver) is None and len(graphs) == 1


def test_a_subclass_may_answer_otherwise_each_time_so_its_graph_is_not_kept() -> None:
    class Other(torch.Tensor):
        pass

    graphs = KnownGraphs()
    sender, receiver = random_graph(40, 7, 7)
    assert graphs.find(sender.as_subclass(Other), receiver) is None
    assert graphs.find(sender, receiver.as_subclass(Other)) is None
    assert graphs.find(sender, receiver) is not None


def test_facts_of_one_graph_do_not_pile_up(ordered: list[int]) -> None:
    graphs = KnownGraphs()
    sender, receiver = random_graph(10, 4, 4)
    known = graphs.find(sender, receiver)
    assert known is not None
    for num_out in range(4, 100):
        graphs.check(sender, receiver, 4, num_out)
        graphs.order(sender, receiver, (4, num_out, None), lambda count=num_out: edge_order(receiver, count))
        assert known_graphs.kept_fact(known, ("twice", num_out), lambda count=num_out: 2 * count) == 2 * num_out
        for kept in (known.in_range, known.orders, known.facts):
            assert len(kept) == 1 + (num_out - 4) % 16, "all go when there would be a seventeenth"
    assert known_graphs.kept_fact(known, ("twice", 99), lambda: pytest.fail("it is kept")) == 198


def test_sorted_receivers_on_the_cpu_need_no_permutation() -> None:
    operator, sender = small_operator(), torch.arange(4)
    assert operator.order(sender, torch.tensor([0, 0, 1, 3]), 4, 4).perm is None
    assert operator.order(sender, torch.tensor([3, 0, 1, 0]), 4, 4).perm is not None
    with pytest.raises(InputError, match="not ascending"):
        operator.order(sender, torch.tensor([3, 0, 1, 0]), 4, 4, True)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recognise tensors of the CPU by what recognises those of a GPU."""
    monkeypatch.setattr(known_graphs, "_is_on_host", lambda index: False)


def rows(edges: int = 40) -> torch.Tensor:
    return torch.stack(random_graph(edges, 7, 7))


Views = Callable[[torch.Tensor], Iterable[torch.Tensor]]
VIEWS: dict[str, Views] = {
    "rows": lambda index: (index[0], index[1]),
    "unbind": lambda index: index,
    "views of views": lambda index: (index[0].view(40)[:], index[1].view(2, 20).flatten()),
    "without gradients": torch.no_grad()(lambda index: (index[0], index[1])),
    "in inference mode": torch.inference_mode()(lambda index: (index[0], index[1])),
}


@pytest.mark.parametrize("how", VIEWS)
def test_views_of_one_tensor_are_one_graph(as_on_a_gpu: None, ordered: list[int], how: str) -> None:
    """Model packages take a new ``edge_index[i]`` in every layer."""
    conv, edge_index = small_conv(), rows()
    inputs, before = conv_inputs(conv, 40, 7), edge_index.clone()
    for _ in range(3):
        found = conv(*inputs, *VIEWS[how](edge_index))
    assert ordered == [7]
    torch.testing.assert_close(found, e3nn_conv(conv, *before, 7)(*inputs), rtol=0, atol=1e-10)


def test_in_a_capture_a_graph_is_ordered_once_and_forgotten_at_its_end(
    as_on_a_gpu: None, ordered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    conv, edge_index = small_conv(), rows()
    inputs = conv_inputs(conv, 40, 7)
    conv(*inputs, *edge_index)
    monkeypatch.setattr(known_graphs, "_is_capturing", lambda index: True)
    for _ in range(2):
        conv(*inputs, *edge_index)
    assert ordered == [7, 7, 7], "without known_in_capture every call orders, and none uses an order from outside"
    ordered.clear()
    with known_in_capture():
        for _ in range(3):
            conv(*inputs, *edge_index)
        assert ordered == [7]
        edge_index.copy_(edge_index.roll(1, 1))
        found = conv(*inputs, *edge_index)
        assert ordered == [7, 7]
    torch.testing.assert_close(found, e3nn_conv(conv, *edge_index, 7)(*inputs), rtol=0, atol=1e-10)
    with known_in_capture():
        conv(*inputs, *edge_index)
    monkeypatch.setattr(known_graphs, "_is_capturing", lambda index: False)
    conv(*inputs, *edge_index)
    assert ordered == [7, 7, 7, 7], "an order of a capture is used nowhere else"


def test_copies_made_in_inference_mode_serve_training() -> None:
    sender, receiver = torch.stack(random_graph(40, 7, 7), 1).unbind(1)
    known = known_graphs.KnownGraph(sender, receiver, is_on_host=False)
    with torch.inference_mode():
        copies = known.contiguous(sender, receiver)
    assert all(copy.is_contiguous() and not copy.is_inference() for copy in copies)
    assert known.contiguous(sender, receiver) is copies and torch.equal(copies[1], receiver)


def test_a_graph_of_a_capture_is_said_to_be_none_that_is_known(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its order, and that its indices are in range, hold for one replay: nothing may be kept beside them."""
    graphs, (sender, receiver) = KnownGraphs(), rows()
    monkeypatch.setattr(known_graphs, "_is_capturing", lambda index: True)
    monkeypatch.setattr(known_graphs, "check_indices", lambda *_: pytest.fail("it would wait for the device"))
    with known_in_capture():
        assert graphs.check(sender, receiver, 7, 7) is None
        made = graphs.order(sender, receiver, (7, 7, None), lambda: edge_order(receiver, 7))
        assert made is not None and made[1] is None
        again = graphs.order(sender, receiver, (7, 7, None), lambda: pytest.fail("it was made"))
        assert again is not None and again[0] is made[0] and again[1] is None


@pytest.mark.gpu
@pytest.mark.parametrize("how", VIEWS)
def test_views_on_a_gpu_are_one_graph_that_nothing_waits_for(ordered: list[int], how: str) -> None:
    conv, edge_index = small_conv(device="cuda", dtype=torch.float64), rows().cuda()
    on_host = conv_inputs(conv, 40, 7)
    inputs = [tensor.cuda() for tensor in on_host]
    conv(*inputs, *edge_index.clone())  # compiles and loads the kernels
    del ordered[:]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [conv(*inputs, *VIEWS[how](edge_index)) for _ in range(3)]
        assert ordered == [7]
        edge_index.copy_(edge_index.flip(1))
        found.append(conv(*inputs, *VIEWS[how](edge_index)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ordered == [7, 7]
    for values, index in ((found[2], edge_index.flip(1)), (found[3], edge_index)):
        wanted = e3nn_conv(conv, *index.cpu(), 7)(*on_host)
        torch.testing.assert_close(values.cpu(), wanted, rtol=0, atol=1e-10)


def test_columns_are_copied_once(as_on_a_gpu: None, ordered: list[int]) -> None:
    conv, pairs = small_conv(), rows().t().contiguous()
    inputs, operator = conv_inputs(conv, 40, 7), small_operator()
    graphs = [
        operator.graph(*inputs[:2], *operator.edges(inputs[0], pairs[:, 0], pairs[:, 1], None, None)) for _ in range(3)
    ]
    assert ordered == [7] and len({(g.sender.data_ptr(), g.receiver.data_ptr()) for g in graphs}) == 1
    assert torch.equal(graphs[2].sender, pairs[:, 0]) and graphs[2].sender.is_contiguous()


def _write_base(index: torch.Tensor, new: torch.Tensor) -> None:
    index.copy_(new)


def _write_view(index: torch.Tensor, new: torch.Tensor) -> None:
    index[1].copy_(new[1])
    index[0, :].view(2, 20).copy_(new[0].view(2, 20))


def _write_detached(index: torch.Tensor, new: torch.Tensor) -> None:
    index.detach().copy_(new)


def _write_out(index: torch.Tensor, new: torch.Tensor) -> None:
    torch.add(new, 0, out=index)


def _resize(index: torch.Tensor, new: torch.Tensor) -> None:
    index.resize_(0).resize_(2, 40).copy_(new)


def _set(index: torch.Tensor, new: torch.Tensor) -> None:
    index.set_(new)


def _assign(index: torch.Tensor, new: torch.Tensor) -> None:
    index.data = new


def _in_a_thread(index: torch.Tensor, new: torch.Tensor) -> None:
    writer = threading.Thread(target=index.copy_, args=(new,))
    writer.start()
    writer.join()


CHANGES = (_write_base, _write_view, _write_detached, _write_out, _resize, _set, _assign, _in_a_thread)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rows_kept", [False, True])
def test_no_change_that_torch_counts_leaves_an_old_order(
    as_on_a_gpu: None, ordered: list[int], change: Callable, rows_kept: bool
) -> None:
    conv, edge_index = small_conv(), rows()
    inputs, new = conv_inputs(conv, 40, 7), rows().flip(1)
    kept = list(edge_index) if rows_kept else []
    conv(*inputs, edge_index[0], edge_index[1])
    change(edge_index, new.clone())
    found = conv(*inputs, edge_index[0], edge_index[1])
    torch.testing.assert_close(found, e3nn_conv(conv, *new, 7)(*inputs), rtol=0, atol=1e-10)
    assert ordered == [7, 7]
    if kept:  # views from before the change: of the new entries, or of the old memory
        wanted = e3nn_conv(conv, *(row.clone() for row in kept), 7)(*inputs)
        torch.testing.assert_close(conv(*inputs, *kept), wanted, rtol=0, atol=1e-10)


def test_a_view_that_left_its_base_is_not_mistaken(as_on_a_gpu: None, ordered: list[int]) -> None:
    """After ``set_`` torch still names the view's old base, whose counter misses writes to the new memory."""
    conv, edge_index, other = small_conv(), rows(), rows().flip(1)[1].clone()
    inputs, receiver = conv_inputs(conv, 40, 7), edge_index[1]
    receiver.set_(other)
    assert receiver._base is edge_index
    for _ in range(2):
        found = conv(*inputs, edge_index[0], receiver)
        torch.testing.assert_close(found, e3nn_conv(conv, edge_index[0], other, 7)(*inputs), rtol=0, atol=1e-10)
        other.copy_(other.flip(0))
    assert ordered == [7, 7]


def test_memory_that_was_freed_and_used_again_is_another_graph(as_on_a_gpu: None, ordered: list[int]) -> None:
    conv, graphs = small_conv(), KnownGraphs()
    inputs, seen = conv_inputs(conv, 40, 7), set()
    for seed in range(30):
        edge_index = torch.randint(0, 7, (2, 40), generator=torch.Generator().manual_seed(seed))
        seen.add(edge_index.data_ptr())
        wanted = e3nn_conv(conv, *edge_index, 7)(*inputs)
        torch.testing.assert_close(conv(*inputs, *edge_index), wanted, rtol=0, atol=1e-10)
        assert graphs.find(*edge_index) is graphs.find(*edge_index)
        del edge_index
    assert len(ordered) == 30 and len(seen) > 1, "memory of a graph that is known must not be given to another"


@pytest.mark.parametrize(
    "other",
    [
        lambda e: (e[0], e[1].data),
        lambda e: (e[0].detach(), e[1]),
        lambda e: (e[1], e[0]),
        lambda e: (e[0, 1:], e[1, 1:]),
        lambda e: (e[0].view(torch.int32)[::2], e[1]),
        lambda e: (torch.empty(0, dtype=e.dtype).set_(e[0]), e[1]),
        lambda e: (torch.from_dlpack(e[0]), e[1]),
    ],
)
def test_a_graph_of_a_gpu_is_known_by_memory_form_and_counted_writes(other: Callable) -> None:
    """The logic for GPU tensors, which needs no GPU, on tensors of the CPU."""
    edge_index = rows()
    known = known_graphs.KnownGraph(edge_index[0], edge_index[1], is_on_host=False)
    assert known.is_still(edge_index[0], edge_index[1])
    assert not known.is_still(*other(edge_index)), "torch counts the writes of this tensor separately, or it differs"


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_index_tensors_that_were_used_can_be_swapped(on_a_gpu: bool, request: pytest.FixtureRequest) -> None:
    if on_a_gpu:
        request.getfixturevalue("as_on_a_gpu")
    conv = small_conv(dtype=torch.float64)
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    conv(*inputs, sender, receiver)
    torch.utils.swap_tensors(receiver, receiver.flip(0))
    wanted = e3nn_conv(conv, sender, receiver, 7)(*inputs)
    torch.testing.assert_close(conv(*inputs, sender, receiver), wanted, rtol=0, atol=1e-10)


def test_memory_of_numpy_is_compared(ordered: list[int]) -> None:
    conv = small_conv(dtype=torch.float64)
    sender, buffer = random_graph(40, 7, 7)[0], random_graph(40, 7, 7)[1].numpy()
    receiver, inputs = torch.from_numpy(buffer), conv_inputs(conv, 40, 7)
    conv(*inputs, sender, receiver)
    np.copyto(buffer, buffer[::-1].copy())
    wanted = e3nn_conv(conv, sender, receiver, 7)(*inputs)
    torch.testing.assert_close(conv(*inputs, sender, receiver), wanted, rtol=0, atol=1e-10)


def test_a_traced_module_asks_for_no_known_graph_and_agrees(ordered: list[int]) -> None:
    conv = small_conv(dtype=torch.float64)
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    traced = torch.compile(conv, backend="eager", fullgraph=True)
    wanted = e3nn_conv(conv, sender, receiver, 7)(*inputs)
    torch.testing.assert_close(traced(*inputs, sender, receiver), wanted, rtol=0, atol=1e-10)
