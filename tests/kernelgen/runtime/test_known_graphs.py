"""Graphs are ordered and checked once for all operators, and a changed graph is never mistaken for a known one."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from module_cases import conv_inputs, e3nn_conv, random_graph, small_conv
from places import SUPPORT

import kernelgen.ops.operator
import kernelgen.runtime.arguments
from kernelgen import InputError, build
from kernelgen.compile.compiler import compile_source
from kernelgen.device import cuda_facts
from kernelgen.ops.operator import Operator
from kernelgen.runtime.index_check import source
from kernelgen.runtime.known_graphs import KnownGraphs, _DeviceGraph


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
    monkeypatch.setattr(kernelgen.ops.operator, "KNOWN_GRAPHS", graphs)
    monkeypatch.setattr(kernelgen.runtime.arguments, "KNOWN_GRAPHS", graphs)
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


def test_facts_of_one_graph_do_not_pile_up(ordered: list[int]) -> None:
    graphs = KnownGraphs()
    sender, receiver = random_graph(10, 4, 4)
    for num_out in range(4, 100):
        graphs.check(sender, receiver, 4, num_out)
    known = graphs.find(sender, receiver)
    assert known is not None and 0 < len(known.in_range) <= 16


def test_sorted_receivers_on_the_cpu_need_no_permutation() -> None:
    operator, sender = small_operator(), torch.arange(4)
    assert operator.order(sender, torch.tensor([0, 0, 1, 3]), 4, 4).perm is None
    assert operator.order(sender, torch.tensor([3, 0, 1, 0]), 4, 4).perm is not None
    with pytest.raises(InputError, match="not ascending"):
        operator.order(sender, torch.tensor([3, 0, 1, 0]), 4, 4, True)


def test_a_graph_of_a_gpu_is_known_by_tensors_memory_and_counted_writes() -> None:
    """The logic for GPU tensors, which needs no GPU, on tensors of the CPU."""
    sender, receiver = random_graph(10, 4, 4)
    known = _DeviceGraph(sender, receiver)
    assert known.is_still(sender, receiver)
    assert not known.is_still(sender, receiver.data)
    assert not known.is_still(sender.view(10), receiver)
    receiver.detach().add_(0)
    assert not known.is_still(sender, receiver)
    known = _DeviceGraph(sender, receiver)
    sender.data = sender.clone()
    assert not known.is_still(sender, receiver)
    known = _DeviceGraph(sender, receiver)
    torch.utils.swap_tensors(sender, torch.zeros_like(sender))
    assert not known.is_still(sender, receiver)


def test_index_tensors_that_were_used_can_be_swapped() -> None:
    conv = small_conv(dtype=torch.float64)
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    conv(*inputs, sender, receiver)
    torch.utils.swap_tensors(receiver, receiver.flip(0))
    wanted = e3nn_conv(conv, sender, receiver, 7)(*inputs)
    torch.testing.assert_close(conv(*inputs, sender, receiver), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["eager", "order", "compiled", "vmap"])
def test_indices_out_of_range_are_told_by_default_on_the_cpu(form: str) -> None:
    conv = small_conv(dtype=torch.float64)
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    call = torch.compile(conv, backend="eager") if form == "compiled" else conv
    order = small_operator().order(sender, receiver, 7, 7) if form == "order" else None
    call(*inputs, sender, receiver, order=order)
    sender[3] = 7
    with pytest.raises(InputError, match=r"sender\[3\] is 7, outside 0..6"):
        if form == "vmap":
            torch.vmap(lambda x: conv(x, *inputs[1:], sender, receiver))(inputs[0][None])
        else:
            call(*inputs, sender, receiver, order=order)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checks_that_were_asked_for_stay_in_compiled_graphs(backend: str) -> None:
    conv = small_conv(check_indices=True, dtype=torch.float64)
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    compiled = torch.compile(conv, fullgraph=True, backend=backend)
    assert torch.equal(compiled(*inputs, sender, receiver), conv(*inputs, sender, receiver))
    with pytest.raises(RuntimeError, match="receiver is not ascending"):
        compiled(*inputs, sender, receiver, edges_sorted=True)
    receiver[0] = 7
    with pytest.raises(RuntimeError, match="receiver has an index"):
        compiled(*inputs, sender, receiver)


def test_checks_that_were_asked_for_stay_in_exported_programs() -> None:
    conv = small_conv(check_indices=True, dtype=torch.float64)
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    program = torch.export.export(conv, (*inputs, sender, receiver)).module()
    assert torch.equal(program(*inputs, sender, receiver), conv(*inputs, sender, receiver))
    sender[0] = -1
    with pytest.raises(RuntimeError, match="sender has an index"):
        program(*inputs, sender, receiver)


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


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_the_check_of_a_gpu_compiles(index: torch.dtype) -> None:
    for arch in ("sm_80", "sm_90"):
        assert compile_source(source(index), cuda_facts(arch)).resources["registers"] > 0


GPU_PROGRAM = """
import torch
from module_cases import conv_inputs, random_graph, small_conv
conv = small_conv(device="cuda", dtype=torch.float64)
sender, receiver = (index.cuda(){dtype} for index in random_graph(40, 7, 7))
inputs = [tensor.cuda() for tensor in conv_inputs(conv, 40, 7)]
conv(*inputs, sender, receiver)
torch.cuda.synchronize()
print("in range")
{change}
conv(*inputs, sender, receiver{options})
torch.cuda.synchronize()
print("not told")
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "dtype", "options", "told"),
    [
        ("sender[3] = 7", "", "", "sender[edge] < num_in"),
        ("receiver[39] = -1", ".int()", "", "receiver[edge] < num_out"),
        ("receiver[0] = 6", "", ", edges_sorted=True", "receiver is ascending"),
    ],
)
def test_a_gpu_stops_at_what_the_cpu_tells(change: str, dtype: str, options: str, told: str) -> None:
    """In a separate process, because the assertion makes the GPU unusable in it."""
    program = GPU_PROGRAM.format(change=change, dtype=dtype, options=options)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=SUPPORT, check=False)
    assert ran.returncode != 0 and "in range" in ran.stdout and "not told" not in ran.stdout
    assert told in ran.stderr + ran.stdout and "device-side assert" in ran.stderr
