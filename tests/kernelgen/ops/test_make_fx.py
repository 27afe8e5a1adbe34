"""``make_fx`` traces modules through their ops: the traced graph is right for other tensors too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from module_cases import conv_inputs, e3nn_conv, normal, random_graph, small_conv
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autotune.modules.convolution import TensorProductConv
from autotune.modules.product import FullyConnectedTensorProduct
from autotune.modules.rows import SphericalHarmonics, SphericalHarmonicsConv

MODES = ("real", "fake", "symbolic")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def called_ops(graph: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in graph.graph.nodes if node.op == "call_function" and "equitune" in str(node.target)]


def assert_close(found: object, wanted: object) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("mode", MODES)
def test_a_convolution_is_traced_for_any_graph_of_its_size(mode: str, known: bool, device: str) -> None:
    """The traced program computes the order: the present graph's must not become a constant in it."""
    conv = small_conv()
    inputs = [tensor.to(device) for tensor in conv_inputs(conv, 30, 6)]
    edges = [index.to(device) for index in random_graph(30, 6, 6)]
    others = [index.flip(0).add(1).remainder(6) for index in edges]
    if known:
        conv(*inputs, *edges)
    traced = make_fx(conv, tracing_mode=mode)(*inputs, *edges)
    assert called_ops(traced) == ["tp_forward"]
    for sender, receiver in (edges, others):
        wanted = e3nn_conv(conv, sender.cpu(), receiver.cpu(), 6)(*(tensor.cpu() for tensor in inputs))
        assert_close(traced(*inputs, sender, receiver).cpu(), wanted)
        assert_close(conv(*inputs, sender, receiver).cpu(), wanted)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_traced(mode: str) -> None:
    conv = small_conv()
    inputs, edges = conv_inputs(conv, 20, 5), random_graph(20, 5, 5)

    def gradients(*given: Tensor) -> tuple[Tensor, ...]:
        wanted = [tensor.detach().requires_grad_() for tensor in given[:3]]
        return torch.autograd.grad(conv(*wanted, *given[3:]).square().sum(), wanted)

    traced = make_fx(gradients, tracing_mode=mode)(*inputs, *edges)
    assert called_ops(traced) == ["tp_forward", "tp_backward"]
    assert_close(traced(*inputs, *edges), gradients(*inputs, *edges))


def product() -> torch.nn.Module:
    return FullyConnectedTensorProduct("2x0e+3x1o", "0e+1o", "2x0e+1o", shared_weights=False)


def vector_conv() -> TensorProductConv:
    return SphericalHarmonicsConv("2x0e+3x1o", SphericalHarmonics([0, 1, 2], True), filter_irreps_out="0e+1o")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("make", "ops"),
    [
        (product, ["tp_forward"]),
        (lambda: SphericalHarmonics([0, 1, 2], True), ["sh_forward"]),
        (vector_conv, ["sh_forward", "tp_forward"]),
    ],
    ids=["product", "harmonics", "vectors"],
)
def test_other_modules_are_traced_and_work_as_before(make: Callable, ops: list[str], mode: str) -> None:
    """A first call under a trace records no lookup or building in the program, and keeps no fake tensors."""
    module = make()
    inputs = {
        1: lambda: [normal(9, 3)],
        2: lambda: [normal(5, 11), normal(9, 3), normal(9, module.weight_numel), *random_graph(9, 5, 5)],
    }
    if isinstance(module, FullyConnectedTensorProduct):
        given = [normal(7, 11), normal(7, 4), normal(7, module.weight_numel)]
    else:
        given = inputs[len(ops)]()
    traced = make_fx(module, tracing_mode=mode)(*given)
    again = make_fx(module, tracing_mode=mode)(*given)
    assert called_ops(traced) == ops
    assert len(traced.graph.nodes) == len(again.graph.nodes)
    assert_close(module(*given), make()(*given))
    assert_close(traced(*given), module(*given))
