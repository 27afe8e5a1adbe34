"""Small modules and graphs, and e3nn's own results and derivatives for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from reference import e3nn_product

from autotune.modules.convolution import TensorProductConv

TOLERANCE = 1e-10


def small_conv(**options: object) -> TensorProductConv:
    return TensorProductConv("8x0e+8x1o", "0e+1o", filter_irreps_out="0e+1o", **options)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


Function = Callable[..., torch.Tensor]


def derivatives(function: Function, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The value, its three first gradients for a random cotangent, and the gradients of a sum over those."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*inputs)
    cotangent = normal(*out.shape, seed=1).requires_grad_()
    first = torch.autograd.grad(out, inputs, cotangent, create_graph=True)
    tangents = [normal(*tensor.shape, seed=2) for tensor in first]
    second = torch.autograd.grad(first, [*inputs, cotangent], tangents)
    return [out, *first, *second]


def assert_equal_derivatives(mine: Function, e3nn: Function, inputs: Sequence[torch.Tensor]) -> None:
    for found, wanted in zip(derivatives(mine, inputs), derivatives(e3nn, inputs), strict=True):
        assert found.shape == wanted.shape
        if wanted.numel():
            scale = max(1.0, float(wanted.detach().abs().max()))
            assert float((found - wanted).detach().abs().max()) <= TOLERANCE * scale


def e3nn_conv(conv: TensorProductConv, sender: torch.Tensor, receiver: torch.Tensor, num_out: int) -> Function:
    product = e3nn_product(conv.problem)

    def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        messages = product(x[sender], y, w)
        return messages.new_zeros(num_out, messages.shape[1]).index_add(0, receiver, messages)

    return function


def random_graph(edges: int, num_in: int, num_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(edges)
    sender = torch.randint(0, num_in, (edges,), generator=generator)
    # The last destination has no edges: an isolated node.
    return sender, torch.randint(0, max(1, num_out - 1), (edges,), generator=generator)


def conv_inputs(conv: TensorProductConv, edges: int, nodes: int) -> list[torch.Tensor]:
    weights = normal(conv.weight_numel) if conv.shared_weights else normal(edges, conv.weight_numel)
    return [normal(nodes, conv.irreps_in1.dim), normal(edges, conv.irreps_in2.dim), weights]
