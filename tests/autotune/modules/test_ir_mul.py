"""Stand-ins for node features in ir_mul give e3nn's values and derivatives: linear layers, species, radial networks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from e3nn import nn, o3
from reference import float64
from torch import Tensor

from autotune.models import species
from autotune.models import species as species_product
from autotune.models.linear import AcceleratedLinear
from autotune.models.radial import AcceleratedRadial
from autotune.models.replace import normal
from autotune.models.species import (
    MatricesByElement,
    SpeciesProduct,
    chunked_species,
    dense,
    elements_of,
    sorted_species,
    species_of,
)
from kernelgen.errors import InputError, UnsupportedError
from kernelgen.ops.node_kernels import CHUNK

draw = functools.partial(normal, torch.empty(0, dtype=torch.float64))


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64():
        yield


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


LINEARS: dict[str, dict[str, Any]] = {
    "scalars": {"irreps_in": "7x0e", "irreps_out": "3x0e"},
    "several blocks to one": {"irreps_in": "3x0e+2x0e+2x1o+2x1o+4x1o+2x2e", "irreps_out": "5x0e+3x1o+2x2e"},
    "one block to several": {"irreps_in": "4x0e+3x0e+3x1o", "irreps_out": "2x0e+2x0e+2x1o+3x1o"},
    "blocks that nothing reaches": {"irreps_in": "2x0e+2x1e", "irreps_out": "2x1o+3x0e+2x2e"},
    "path normalization": {"irreps_in": "3x0e+5x0e", "irreps_out": "4x0e", "path_normalization": "path"},
    "biases": {"irreps_in": "2x1o+3x0e", "irreps_out": "2x0e+2x1o+2x0e", "biases": True},
    "chosen paths": {
        "irreps_in": "2x0e+2x0e+2x0e",
        "irreps_out": "2x0e+3x0e",
        "instructions": [(2, 1), (0, 0), (1, 0), (0, 1)],
    },
    "no path": {"irreps_in": "2x1o", "irreps_out": "2x0e"},
}


def linear_of(name: str) -> o3.Linear:
    torch.manual_seed(0)
    linear = o3.Linear(**LINEARS[name])
    torch.nn.init.normal_(linear.bias) if linear.bias.numel() else None
    return linear


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_layer_has_e3nns_values(name: str) -> None:
    assert_close(*AcceleratedLinear(linear_of(name)).both_results(draw))


@pytest.mark.parametrize("name", [name for name in LINEARS if name != "no path"])
def test_a_linear_layer_is_differentiable_twice_and_traceable(name: str) -> None:
    form = AcceleratedLinear(linear_of(name)).form
    x, w = (one.requires_grad_() for one in draw((3, form.dims["x"]), (form.weight_numel,)))
    assert torch.autograd.gradcheck(form, (x, w))
    assert torch.autograd.gradgradcheck(form, (x, w))
    assert_traceable_is_the_same(form, x.detach(), w.detach())


def assert_traceable_is_the_same(form: Any, x: Tensor, w: Tensor) -> None:
    y = torch.randn(len(x), form.dims["y"])
    for wanted, factors in {"y": (x, w), "x": (w, y), "w": (x, y)}.items():
        assert_close(form.traceable(wanted, *factors), form.derivative(wanted, *factors))
    by_each = torch.func.vmap(lambda row: form(x * row, w))(torch.arange(3.0))
    assert_close(by_each, torch.stack([form(x * row, w) for row in range(3)]))


def test_features_whose_rows_or_columns_are_strided_are_taken() -> None:
    linear = AcceleratedLinear(linear_of("several blocks to one"))
    (x,) = draw((6, linear.irreps_in.dim))
    wanted = linear(x)
    assert_close(linear(torch.cat((x, x), 1)[:, x.shape[1] :]), wanted)
    assert_close(linear(x.t().contiguous().t()), wanted)
    assert_close(linear(x.view(2, 3, -1)), wanted.view(2, 3, -1))
    assert linear(x[:0]).shape == (0, linear.irreps_out.dim)
    with pytest.raises(InputError, match="expected a last dimension of 39"):
        linear(x[:, 1:])


def test_a_linear_layer_with_given_weights_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="not one row of its own"):
        AcceleratedLinear(o3.Linear("2x0e", "2x0e", internal_weights=False, shared_weights=False))


ELEMENTS = torch.tensor([4, 1, 1, 0, 4, 1, 1, 3, 1])
COUNT = 6


def one_hot(elements: Tensor, count: int = COUNT) -> Tensor:
    return torch.nn.functional.one_hot(elements, count).double()


def product() -> SpeciesProduct:
    torch.manual_seed(0)
    return SpeciesProduct(o3.FullyConnectedTensorProduct("3x0e+2x1o+2x0e", f"{COUNT}x0e", "2x0e+3x1o+2x2e"))


def test_a_product_with_species_has_e3nns_values() -> None:
    assert_close(*product().both_results(draw))


@pytest.mark.parametrize("elements", [ELEMENTS, ELEMENTS.sort().values], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_products_by_element_are_those_with_all_and_differentiable_twice(elements: Tensor, is_chunked: bool) -> None:
    """Chunks are what a GPU takes; elements 2 and 5 never occur."""
    given, attrs = product(), one_hot(elements)
    species = chunked_species(elements, COUNT) if is_chunked else sorted_species(elements)
    form = MatricesByElement(given.product, species)
    x, w = draw((len(elements), given.dims["x"]), (given.weight_numel,))
    assert_close(form(x, w), dense(given.paths, given.dims, attrs, "y", x, w))
    assert_traceable_is_the_same(form, x, w)
    x, w = x.requires_grad_(), w.requires_grad_()
    assert torch.autograd.gradgradcheck(form, (x, w))


def by_element() -> MatricesByElement:
    given = product()
    return MatricesByElement(given.product, sorted_species(ELEMENTS))


FORMS = {
    "linear": lambda: AcceleratedLinear(linear_of("several blocks to one")).form,
    "species": by_element,
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_gradients_of_many_cotangents_at_once_are_those_of_each(make: Callable[[], Any]) -> None:
    form = make()
    x, w = (one.requires_grad_() for one in draw((len(ELEMENTS), form.dims["x"]), (form.weight_numel,)))
    out, cotangents = form(x, w), torch.randn(4, len(ELEMENTS), form.dims["y"])
    batched = torch.autograd.grad(out, (x, w), cotangents, is_grads_batched=True, retain_graph=True)
    for number, cotangent in enumerate(cotangents):
        for found, wanted in zip(batched, torch.autograd.grad(out, (x, w), cotangent, retain_graph=True), strict=True):
            assert_close(found[number], wanted)


def test_every_chunk_holds_nodes_of_one_element() -> None:
    elements = torch.arange(300) * 7 % 5
    elements[elements == 3] = 0
    species = chunked_species(elements, COUNT)
    assert species.place is not None and species.chunks is not None
    assert len(species.place.unique()) == len(elements)
    assert torch.equal(species.chunks[species.place // CHUNK], elements)


def test_rows_that_are_not_one_hot_or_need_gradients_are_multiplied_densely(monkeypatch: pytest.MonkeyPatch) -> None:
    given = product()
    (x,) = draw((len(ELEMENTS), given.dims["x"]))
    attrs = one_hot(ELEMENTS)
    assert species_of(attrs) is not None
    wanted = given(x, attrs)
    for other in (2 * attrs, attrs - attrs.roll(1, 1), attrs + attrs.roll(1, 1), 0 * attrs):
        assert species_of(other) is None and elements_of(other) is None
        assert_close(given(x, other), dense(given.paths, given.dims, other, "y", x, given.weight))
    learned = attrs.clone().requires_grad_()
    (found,) = torch.autograd.grad(given(x, learned).square().sum(), learned)
    assert found.abs().max() > 0
    monkeypatch.setattr(species_product, "dense", None)  # not called for one-hot rows
    assert_close(given(x, attrs), wanted)


def test_rows_changed_in_place_are_looked_at_again() -> None:
    attrs = one_hot(ELEMENTS)
    assert torch.equal(species_of(attrs).elements, ELEMENTS)
    attrs.copy_(one_hot(ELEMENTS.flip(0)))
    assert torch.equal(species_of(attrs).elements, ELEMENTS.flip(0))
    attrs[0] = 0
    assert species_of(attrs) is None
    assert species_of(one_hot(ELEMENTS)[:0]) is None


def test_products_of_other_kinds_are_refused() -> None:
    for irreps in ("2x1o", "2x0e+2x0e"):
        with pytest.raises(UnsupportedError, match="expected one block of scalars"):
            SpeciesProduct(o3.FullyConnectedTensorProduct("2x0e+2x1o", irreps, "2x0e"))
    with pytest.raises(UnsupportedError, match="not a product of mode uvw"):
        SpeciesProduct(o3.TensorProduct("2x0e", "2x0e", "2x0e", [(0, 0, 0, "uuu", True)]))


@pytest.mark.parametrize("act", [torch.nn.functional.silu, torch.tanh])
@pytest.mark.parametrize("options", [{}, {"variance_in": 2, "variance_out": 3}, {"out_act": True}], ids=str)
def test_a_radial_network_has_e3nns_values_and_derivatives(act: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.FullyConnectedNet([4, 6, 5, 3], act, **options)
    fast = AcceleratedRadial(net)
    assert_close(*fast.both_results(draw))
    x = draw((7, 4))[0].requires_grad_()
    found = []
    for model in (net, fast):
        (by_x,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(by_x.square().sum(), [x, *net.parameters()]))
    for a, b in zip(*found, strict=True):
        assert_close(a, b)
    assert torch.autograd.gradgradcheck(fast, x)
    by_row = torch.func.vmap(torch.func.grad(lambda row: fast(row[None]).sum()))(x)
    assert_close(by_row, torch.autograd.grad(fast(x).sum(), x)[0])


def test_the_third_derivative_of_a_radial_network_is_right_too() -> None:
    fast = AcceleratedRadial(nn.FullyConnectedNet([2, 3, 1], torch.nn.functional.silu))
    x = draw((2, 2))[0].requires_grad_()

    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad(fast(x).sum(), x, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(slope, x)


def cases() -> dict[str, tuple[Any, list[Tensor]]]:
    """Each stand-in with inputs of many nodes."""
    elements = torch.arange(500) * 7 % 5
    linear = AcceleratedLinear(linear_of("several blocks to one"))
    x, features, edges = draw((500, product().dims["x"]), (500, linear.irreps_in.dim), (40, 4))
    net = nn.FullyConnectedNet([4, 6, 3], torch.nn.functional.silu)
    return {
        "linear": (linear, [features]),
        "species": (product(), [x, one_hot(elements)]),
        "radial": (AcceleratedRadial(net), [edges]),
    }


def first_and_second(model: torch.nn.Module, x: Tensor, *others: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = model(x, *others)
    (by_x,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return [out, by_x, *torch.autograd.grad(by_x.square().sum(), [x, *model.parameters()])]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["linear", "species", "radial"])
def test_on_a_gpu_results_are_those_of_the_cpu_without_waiting(name: str) -> None:
    model, given = cases()[name]
    wanted = first_and_second(model, *given)
    model.cuda()
    given = [one.cuda() for one in given]
    for a, b in zip(first_and_second(model, *given), wanted, strict=True):
        assert_close(a.cpu(), b)
    given = [one.clone() for one in given]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = first_and_second(model, *given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(found, wanted, strict=True):
        assert_close(a.cpu(), b)


@pytest.mark.gpu
def test_on_a_gpu_the_first_rows_may_be_any_and_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(species, "_MET", set())
    model, (x, attrs) = cases()["species"]
    wanted = model(x, attrs / 2)
    model.cuda()
    x, attrs = x.cuda(), attrs.cuda()
    assert_close(model(x, attrs / 2).cpu(), wanted)
    wanted = model(x, attrs)
    graph, given = torch.cuda.CUDAGraph(), x.clone()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = model(given, attrs)
    given.copy_(2 * x)
    graph.replay()
    assert_close(out, 2 * wanted)


@pytest.mark.parametrize("weights, features", [(False, True), (True, False), (True, True)])
def test_what_is_kept_for_the_backward_pass(weights: bool, features: bool) -> None:
    """The gradient by features needs the weights and the other way round: frozen weights let go of features."""
    linear = linear_of("several blocks to one").requires_grad_(weights)
    stand_in = AcceleratedLinear(linear)
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    (x,) = draw((6, linear.irreps_in.dim))
    x.requires_grad_(features)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = stand_in(x)
    assert (x.shape in kept, linear.weight.shape in kept) == (weights, features)
    inputs = [one for one in (x, stand_in.weight) if one.requires_grad]
    assert all(gradient.any() for gradient in torch.autograd.grad(found.square().sum(), inputs))


@pytest.mark.gpu
def test_a_capture_alone_does_not_say_that_rows_are_one_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are captured are not looked at; an assertion about them is of the graph's replays alone."""
    monkeypatch.setattr(species, "_MET", set())
    attrs, graph = one_hot(ELEMENTS).cuda(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert species_of(attrs) is not None
    assert species_of(attrs * 2) is None
    assert species_of(attrs) is not None and species._MET
