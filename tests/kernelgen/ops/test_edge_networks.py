"""Hidden features of radial networks in one kernel; on a CPU the kernels run lane by lane."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fixed_kernels import take_few_edges
from reference import relative_error
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import silu

from kernelgen.compile.compiler import compile_source
from kernelgen.compile.gpu import nvrtc_version
from kernelgen.device import cuda_facts
from kernelgen.errors import ToolMissingError
from kernelgen.ops import edge_networks as networks
from kernelgen.ops import tall_products
from kernelgen.ops.edge_networks import (
    gradient_kernel,
    hidden_features,
    is_one_kernel,
    layer_by_layer,
    packing_kernel,
    value_kernel,
)
from kernelgen.ops.library import exported_for
from kernelgen.problem.product import PRODUCTS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EDGES = 150
# Inputs, hidden features and layers: of MACE, of SevenNet, of NequIP, and others.
SHAPES = [(10, 64, 3), (8, 64, 2), (8, 128, 1), (16, 32, 1), (4, 16, 3), (11, 48, 2)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    take_few_edges(monkeypatch, request.param)
    return request.param


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(inputs: int, hidden: int, layers: int, edges: int = EDGES) -> tuple[Tensor, list[Tensor], Tensor]:
    """Edges of which the last are near the cutoff, matrices that keep features of order one, and cotangents."""
    x = drawn(edges, inputs) * torch.linspace(1, 0, edges)[:, None] ** 3
    widths = (inputs, *[hidden] * layers)
    matrices = [
        1.7 * drawn(a, b, seed=b + k) / a**0.5 for k, (a, b) in enumerate(zip(widths, widths[1:], strict=False))
    ]
    return x, matrices, drawn(edges, hidden, seed=99)


FACTORS = (0.75, 1.5, 1.1, 1.0)


def plain(x: Tensor, matrices: list[Tensor]) -> Tensor:
    for matrix, factor in zip(matrices, FACTORS, strict=False):
        x = silu(x @ (factor * matrix))
    return x


def ours(x: Tensor, matrices: list[Tensor]) -> Tensor:
    """As a network calls it."""
    features = hidden_features if is_one_kernel(x, matrices) else layer_by_layer
    return features(x, matrices, FACTORS[: len(matrices)])


def by_layers(x: Tensor, matrices: list[Tensor]) -> Tensor:
    return layer_by_layer(x, matrices, FACTORS[: len(matrices)])


def value_and_gradient(features: Callable[..., Tensor], x: Tensor, matrices: list[Tensor], g: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    h = features(x, matrices)
    return [one.detach().cpu().double() for one in (h, *torch.autograd.grad(h, x, g))]


def test_what_is_exported(device: str) -> None:
    """Traced on some edges with the gradient inside, and run on others; no gradient of the matrices."""
    given, matrices, _ = case(10, 64, 2)
    placed = [matrix.to(device) for matrix in matrices]

    def step(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        assert is_one_kernel(x, placed)
        h = ours(x, placed)
        return h.detach(), torch.autograd.grad(h, x, g)[0]

    with exported_for(1 << 19, 1 << 13):
        few = given[:40].to(device), drawn(40, 64).to(device)
        traced = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*few)
    assert "en_backward" in traced.code and "mm" not in traced.code
    g = drawn(EDGES, 64, seed=99)
    wanted = value_and_gradient(plain, given.double(), [matrix.double() for matrix in matrices], g.double())
    for found, value in zip(traced(given.to(device), g.to(device)), wanted, strict=False):
        assert relative_error(found.cpu(), value) < 1e-6


def worst(found: Tensor, exact: Tensor) -> float:
    """The largest error of a row, relative to the largest element of the row; rows of zeros have to be zeros."""
    wrong, size = (found - exact).abs().amax(1), exact.abs().amax(1)
    return float(torch.where(wrong == 0, 0, wrong / size).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradient_have_float32s_errors(shape: tuple[int, int, int], device: str, launches: list[str]) -> None:
    x, matrices, g = case(*shape)
    exact = value_and_gradient(plain, x.double(), [m.double() for m in matrices], g.double())
    single = value_and_gradient(plain, x, matrices, g)
    found = value_and_gradient(ours, x.to(device), [m.to(device) for m in matrices], g.to(device))
    assert launches == ["edge_matrices", "edge_network_value", "edge_network_gradient"]
    for mine, theirs, wanted in zip(found, single, exact, strict=True):
        assert worst(mine, wanted) < 4 * worst(theirs, wanted) < 1e-4
        assert float((mine - wanted).abs().max() / wanted.abs().max()) < 1e-6


def test_rows_of_many_magnitudes(device: str) -> None:
    """Lengths over e**24, zeros, and one huge row beside ordinary ones."""
    x, matrices, g = case(8, 64, 3)
    x = drawn(EDGES, 8) * torch.linspace(-12, 4, EDGES).exp()[:, None]
    x[::7] = 0
    x[3] *= 1e4
    g = g * torch.linspace(12, -12, EDGES).exp()[:, None]
    exact = value_and_gradient(plain, x.double(), [m.double() for m in matrices], g.double())
    single = value_and_gradient(plain, x, matrices, g)
    found = value_and_gradient(ours, x.to(device), [m.to(device) for m in matrices], g.to(device))
    for mine, theirs, wanted in zip(found, single, exact, strict=True):
        assert worst(mine, wanted) < 4 * worst(theirs, wanted) + 1e-6
    assert not found[0][::7].any()


@pytest.mark.parametrize("edges", [1, 16, 63, 64, 65])
def test_numbers_of_edges_that_are_no_multiples(edges: int, device: str) -> None:
    x, matrices, g = case(8, 32, 2, edges)
    found = value_and_gradient(ours, x.to(device), [m.to(device) for m in matrices], g.to(device))
    exact = value_and_gradient(plain, x.double(), [m.double() for m in matrices], g.double())
    for mine, wanted in zip(found, exact, strict=True):
        assert mine.shape == wanted.shape and float((mine - wanted).abs().max()) < 1e-5


def test_what_is_not_finite_stays_in_its_row(device: str) -> None:
    x, matrices, _ = case(8, 32, 2)
    x[5, 2], x[9, 0] = float("nan"), float("inf")
    found = ours(x.to(device), [m.to(device) for m in matrices]).cpu()
    assert [row for row in range(EDGES) if not found[row].isfinite().all()] == [5, 9]


def test_strided_inputs_and_cotangents(device: str) -> None:
    x, matrices, g = case(8, 32, 2)
    exact = value_and_gradient(plain, x, matrices, g)
    around, wide = torch.zeros(EDGES, 11), torch.zeros(EDGES, 40)
    around[:, 2:10], wide[:, 5:37] = x, g
    turned = [m.t().contiguous().to(device).t() for m in matrices]
    leaf = around.to(device).requires_grad_()
    h = ours(leaf[:, 2:10], turned)
    (of_x,) = torch.autograd.grad(h, leaf, wide.to(device)[:, 5:37])
    torch.testing.assert_close([h.detach().cpu().double(), of_x.cpu().double()[:, 2:10]], exact, rtol=1e-4, atol=1e-5)
    assert not of_x[:, :2].any() and not of_x[:, 10:].any()


def test_derivatives_of_the_gradient_are_those_layer_by_layer(device: str, launches: list[str]) -> None:
    """Second and third ones, and through what x and the cotangents were made of."""

    def all_of(features: Callable[..., Tensor], dtype: torch.dtype, where: str) -> list[Tensor]:
        x, matrices, g = case(8, 32, 2, 20)
        r = torch.linspace(0.5, 1, 20, dtype=dtype, device=where).requires_grad_()
        h = features(x.to(where, dtype) * r[:, None], [m.to(where, dtype) for m in matrices])
        (force,) = torch.autograd.grad((h * g.to(where, dtype)).sin().sum(), r, create_graph=True)
        (second,) = torch.autograd.grad(force.square().sum(), r, create_graph=True)
        (third,) = torch.autograd.grad(second.square().sum(), r)
        return [one.detach().cpu().double() for one in (h, force, second, third)]

    exact, found = all_of(plain, torch.float64, "cpu"), all_of(ours, torch.float32, device)
    for mine, theirs, wanted in zip(found, all_of(plain, torch.float32, "cpu"), exact, strict=True):
        errors = [float((given - wanted).abs().max() / wanted.abs().max()) for given in (mine, theirs)]
        assert errors[0] < 4 * errors[1] + 1e-6, errors
    assert {"edge_network_value", "edge_network_gradient", "tall_to_wide"} <= set(launches)


@pytest.mark.parametrize("in_second", [False, True])
def test_gradients_of_matrices_go_layer_by_layer(in_second: bool, device: str, launches: list[str]) -> None:
    """From x alone, also those of forces; forces of a model whose matrices require gradients need none of it."""

    def all_of(features: Callable[..., Tensor], dtype: torch.dtype, where: str) -> list[Tensor]:
        x, matrices, g = case(8, 32, 2, 20)
        leaves = [x.to(where, dtype), *[m.to(where, dtype) for m in matrices]]
        x, *matrices = [leaf.requires_grad_() for leaf in leaves]
        h = features(x, matrices)
        loss = (h * g.to(where, dtype)).sum()
        if in_second:
            loss = torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        return [one.detach().cpu().double() for one in torch.autograd.grad(loss, (x, *matrices))]

    exact, single = all_of(plain, torch.float64, "cpu"), all_of(plain, torch.float32, "cpu")
    for mine, theirs, wanted in zip(all_of(ours, torch.float32, device), single, exact, strict=True):
        errors = [float((given - wanted).abs().max() / wanted.abs().max()) for given in (mine, theirs)]
        assert errors[0] < 4 * errors[1] + 1e-6, errors
    assert "edge_network_value" in launches and "edge_network_gradient" not in launches
    launches.clear()
    x, matrices, g = case(8, 32, 2)
    given = value_and_gradient(ours, x.to(device), [m.to(device).requires_grad_() for m in matrices], g.to(device))
    assert launches == ["edge_matrices", "edge_network_value", "edge_network_gradient"]
    frozen = value_and_gradient(ours, x.to(device), [m.to(device) for m in matrices], g.to(device))
    assert all(map(torch.equal, given, frozen))


@pytest.mark.parametrize("hidden", [32, 64])
def test_value_and_gradient_in_tf32(hidden: int, device: str) -> None:
    """Far above float32's errors: one product for each layer is what runs."""
    x, matrices, g = case(8, hidden, 2)
    exact = value_and_gradient(plain, x, matrices, g)
    given = x.to(device), [m.to(device) for m in matrices], g.to(device)
    found = value_and_gradient(lambda x, m: hidden_features(x, m, FACTORS[: len(m)], "tf32"), *given)
    for one, wanted in zip(found, exact, strict=True):
        assert 1e-5 < float((one.cpu().double() - wanted).abs().max() / wanted.abs().max()) < 2e-3


def test_trained_matrices_keep_features(device: str) -> None:
    x, matrices, _ = case(8, 32, 2)
    trained = [m.to(device).requires_grad_() for m in matrices]
    x = x.to(device)
    assert is_one_kernel(x, trained) and not is_one_kernel(x, trained, training=True)
    assert is_one_kernel(x, [m.detach() for m in trained], training=True)
    with torch.no_grad():
        assert is_one_kernel(x, trained, training=True)


def test_only_the_input_is_kept_of_the_edges(device: str) -> None:
    x, matrices, _ = case(8, 64, 3)
    given = [m.to(device) for m in matrices]
    held: dict[int, tuple[int, ...]] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.data_ptr()] = tuple(tensor.shape)
        return tensor

    for features, most in ((ours, 1), (by_layers, 4)):
        held.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kept = features(x.to(device).requires_grad_(), given)
        of_edges = [shape for shape in held.values() if shape[0] == EDGES]
        assert kept.requires_grad and len(of_edges) <= most
        assert (of_edges == [(EDGES, 8)]) == (most == 1)


def test_what_goes_layer_by_layer(device: str, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def is_ours(x: Tensor, matrices: list[Tensor]) -> bool:
        launches.clear()
        found = ours(x.to(device).requires_grad_(), [m.to(device) for m in matrices])
        torch.testing.assert_close(found.cpu(), plain(x, matrices), rtol=1e-4, atol=1e-5)
        return "edge_network_value" in launches

    x, matrices, _ = case(8, 32, 2)
    assert is_ours(x, matrices)
    assert not is_ours(x.double(), [m.double() for m in matrices])
    for shape in ((8, 80, 2), (8, 144, 1), (20, 32, 1), (8, 24, 1), (8, 16, 4)):
        assert not is_ours(*case(*shape)[:2]), shape
    assert not is_ours(x, [drawn(8, 32), drawn(32, 16)])
    launches.clear()
    torch.compile(ours, backend="eager", fullgraph=True)(x.to(device), [m.to(device) for m in matrices])
    torch.func.vmap(lambda one: ours(one, [m.to(device) for m in matrices]))(x.to(device).view(2, -1, 8))
    assert not launches
    monkeypatch.setattr(tall_products, "LEAST_ROWS", EDGES + 1)  # of single products
    assert is_ours(x[:1], matrices) and not is_ours(x[:0], matrices)
    assert networks.network_fits(8, [64] * 3) and not networks.network_fits(8, [])


@pytest.mark.slow
def test_kernels_compile_without_spills() -> None:
    try:
        nvrtc_version()
    except ToolMissingError as error:
        pytest.skip(str(error))
    for arch in ("sm_80", "sm_90", "sm_120"):
        for steps, layers in ((4, 3), (4, 2), (8, 1), (2, 1)):
            made = [
                kernel(steps, layers, accuracy) for kernel in (value_kernel, gradient_kernel) for accuracy in PRODUCTS
            ]
            for kernel in (*made, packing_kernel(steps, layers)):
                resources = compile_source(kernel.source, cuda_facts(arch)).resources
                assert resources["spill_bytes"] == 0 and resources["registers"] <= 255
