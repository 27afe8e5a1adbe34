"""The convolution with the last layer of its radial network inside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.modules import convolution
from autotune.modules.convolution import RadialTensorProductConv, TensorProductConv, convolve_radial, has_room
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


def test_weights_that_do_not_fit_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, asked, parts = TensorProductConv(*IRREPS, filter_irreps_out="0e+1o"), [], []
    product = convolution.radial_product
    monkeypatch.setattr(convolution, "radial_product", lambda *all: parts.append(all[8]) or product(*all))
    monkeypatch.setattr(convolution, "PART_BYTES", {"cpu": 50 * plain.weight_numel * 8})
    results = []
    for fits in (True, False):
        monkeypatch.setattr(convolution, "has_room", lambda *asks, fits=fits: asked.append(asks) or fits)
        x, y, h, matrix, _ = (tensor.requires_grad_() for tensor in given(plain).values())
        out = convolve_radial(plain, x, y, h, matrix, *INDICES, always_streamed=False)
        results.append([out, *torch.autograd.grad(loss(out, y), (x, y, h, matrix))])
    assert parts == [EDGES, 50] and asked == [(torch.device("cpu"), EDGES * plain.weight_numel * 8, True)] * 2
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-10)


def test_room_is_what_is_free_or_kept_by_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, gib = torch.device("cuda"), 1 << 30
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 45 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 35 * gib)
    assert has_room(gpu, 10 * gib, trains=False) and not has_room(gpu, 10 * gib + 1, trains=False)
    assert has_room(gpu, 5 * gib, trains=True) and not has_room(gpu, 5 * gib + 1, trains=True)
    assert has_room(torch.device("cpu"), 1 << 60, trains=True), "a CPU streams for its caches, not for its memory"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert has_room(gpu, 99 * gib, trains=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("small weights ask nothing"))
    assert has_room(gpu, gib - 1, trains=True)


@pytest.mark.gpu
def test_a_gpu_without_room_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, streamed = TensorProductConv(*IRREPS, filter_irreps_out="0e+1o"), []
    graph = [index.cuda() for index in INDICES]
    product = convolution.radial_product
    monkeypatch.setattr(convolution, "radial_product", lambda *all: streamed.append(all[8] < EDGES) or product(*all))
    monkeypatch.setattr(convolution, "PART_BYTES", {"cuda": 50 * plain.weight_numel * 8})
    monkeypatch.setattr(convolution, "ASKED_FROM", 0)
    results = []
    for room in (4, 1 << 40):
        monkeypatch.setattr(convolution, "ROOM", room)
        x, y, h, matrix, _ = (tensor.cuda() for tensor in given(plain).values())
        out = convolve_radial(plain, x, y.requires_grad_(), h, matrix, *graph, always_streamed=False)
        results.append([out, *torch.autograd.grad(out.square().sum(), y)])
    assert streamed == [False, True]
    for one, other in zip(*results, strict=True):
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
