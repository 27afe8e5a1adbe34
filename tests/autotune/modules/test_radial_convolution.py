"""The convolution with the last layer of its radial network inside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune import RadialTensorProductConv, TensorProductConv
from kernelgen.errors import InputError, ProblemError

IRREPS = ("8x0e+8x1o", "0e+1o+2e")
EDGES, NODES, WIDTH = 300, 20, 5


def made(**options: Any) -> RadialTensorProductConv:
    return RadialTensorProductConv(*IRREPS, filter_irreps_out="0e+1o", **options)


def given(conv: TensorProductConv) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {
        "node_feats": draw(NODES, conv.irreps_in1.dim),
        "edge_attrs": draw(EDGES, conv.irreps_in2.dim),
        "hidden": draw(EDGES, WIDTH),
        "matrix": draw(WIDTH, conv.weight_numel),
        "scale": draw(EDGES),
    }


INDICES = tuple(torch.randint(NODES, (EDGES,), generator=torch.Generator().manual_seed(i)) for i in range(2))


def loss(out: Tensor, edge_attrs: Tensor) -> Tensor:
    """Of values and forces, as in training."""
    (forces,) = torch.autograd.grad(out.sin().sum(), edge_attrs, create_graph=True)
    return out.square().sum() + forces.square().sum()


@pytest.mark.parametrize("edges_at_a_time", [None, 1, 40, 1000])
def test_a_training_step_is_that_of_whole_weights(edges_at_a_time: int | None) -> None:
    conv, plain = made(edges_at_a_time=edges_at_a_time), TensorProductConv(*IRREPS, filter_irreps_out="0e+1o")
    inputs = {name: tensor.requires_grad_() for name, tensor in given(conv).items()}
    x, y, h, matrix, scale = inputs.values()
    found = conv(x, y, h, matrix, *INDICES, scale=scale)
    wanted = plain(x, y, (h * scale[:, None]) @ matrix, *INDICES)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(loss(out, y), list(inputs.values())) for out in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-10)


def test_num_nodes_and_copies() -> None:
    conv = made(edges_at_a_time=50)
    x, y, h, matrix, scale = given(conv).values()
    out = conv(x, y, h, matrix, *INDICES, scale=scale[:, None], num_nodes=NODES + 3)
    assert out.shape == (NODES + 3, conv.irreps_out.dim) and not out[NODES:].any()
    assert torch.equal(copy.deepcopy(conv)(x, y, h, matrix, *INDICES, scale=scale), out[:NODES])


def test_compiled_code_takes_all_edges_at_once() -> None:
    conv = made(edges_at_a_time=50)
    x, y, h, matrix, _ = given(conv).values()
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y, h, matrix, *INDICES), conv(x, y, h, matrix, *INDICES))


def test_schedules_are_those_for_graphs_of_a_parts_size() -> None:
    conv = made(edges_at_a_time=32)
    x, y, h, matrix, _ = given(conv).values()
    conv(x, y, h, matrix, *INDICES)
    (by_size,) = conv._operators.values()
    assert [size[0] for size in by_size] == [5]


def test_what_does_not_fit() -> None:
    with pytest.raises(ProblemError, match="shared_weights=True: a radial network gives each edge weights of its own"):
        made(shared_weights=True)
    with pytest.raises(ProblemError, match="edges_at_a_time is 0; expected at least 1, or None"):
        made(edges_at_a_time=0)
    conv = made()
    x, y, h, matrix, scale = given(conv).values()
    with pytest.raises(InputError, match=r"scale is \(299,\); expected \(300,\), one for each edge"):
        conv(x, y, h, matrix, *INDICES, scale=scale[1:])
    with pytest.raises(InputError, match=r"the matrix \(4, 40\); expected \(edges, hidden\) and \(hidden, 40\)"):
        conv(x, y, h, matrix[1:], *INDICES)
