"""Parts of NequIP's and SevenNet's models in layout ``ir_mul``: rows in runs, e3nn's gates, products by type."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from e3nn.nn import Gate
from torch import Tensor
from torch.nn.utils import parametrize

from autotune.models.layout import IrMulGate, check_same, outline
from autotune.models.linear import AcceleratedLinear
from autotune.models.species import NODE_TYPES, TypedProduct, types_without_waiting
from autotune.workload.workload import relayout
from kernelgen.compat import o3
from kernelgen.errors import UnsupportedError


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_outlines() -> None:
    assert outline("4x0e+2x0o+3x1o+3x1o") == ((0, 6), (1, 3), (1, 3))
    check_same("4x0e+2x0o+6x1o", "3x0e+3x0o+6x1o", "a layer")
    with pytest.raises(UnsupportedError, match="a layer takes 6x1o, and is given 3x1o\\+3x1o: in layout ir_mul these"):
        check_same("3x1o+3x1o", "6x1o", "a layer")


@pytest.mark.parametrize("given", ["4x0e+2x0e+3x1o+1x1o+2x1o+2x2e", "6x0e+6x1o+2x2e"])
def test_a_linear_layer_takes_its_input_in_several_runs(given: str) -> None:
    linear = o3.Linear("6x0e+6x1o+2x2e", "3x0e+4x1o+4x1o+1x2e", biases=True)
    assert_close(*AcceleratedLinear(linear, irreps_in=given).both_results(draw))


def test_a_linear_layer_is_e3nns_and_makes_others_for_the_same_rows() -> None:
    """As adapters are made: of the layer's class, with its irreps, and merged block by block."""
    linear = AcceleratedLinear(o3.Linear("6x0e+6x1o", "3x0e+4x1o"), irreps_in="4x0e+2x0e+3x1o+3x1o")
    assert isinstance(linear, o3.Linear) and str(linear.irreps_in) == "4x0e+2x0e+3x1o+3x1o"
    inner = "2x0e+2x1o"
    first = type(linear)(linear.irreps_in, inner, internal_weights=True, biases=False)
    second = type(linear)(inner, linear.irreps_out)
    rows = relayout(x := draw((7, 24))[0], str(linear.irreps_in), "mul_ir", "ir_mul")
    wanted = linear.original(x) + second.original(first.original(x))
    found = linear(rows) + second(first(rows))
    assert_close(relayout(found, str(linear.irreps_out), "ir_mul", "mul_ir"), wanted)
    parts = [(number, part) for number, _, part in linear.weight_views(yield_instruction=True)]
    assert [linear.instructions[number].i_in for number, _ in parts] == [0, 1, 2, 3]
    assert torch.equal(torch.cat([part.flatten() for _, part in parts]), linear.weight)
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(other(rows), first(rows))


def test_a_parametrization_from_before_may_be_taken_away() -> None:
    """Of the layer before it was replaced, of the stand-in; the layer that comes back has none."""
    plain = o3.Linear("4x0e+2x1o", "3x0e+2x1o")
    parametrize.register_parametrization(plain, "weight", torch.nn.Softplus(), unsafe=True)
    layer, (x,) = copy.deepcopy(plain), draw((5, 10))
    stand_in = AcceleratedLinear(layer)
    given = relayout(x, "4x0e+2x1o", "mul_ir", "ir_mul")

    def values() -> Tensor:
        return relayout(stand_in(given), "3x0e+2x1o", "ir_mul", "mul_ir")

    names = {name for name, _ in plain.named_parameters()}
    assert {name for name, _ in stand_in.named_parameters()} == names == {"parametrizations.weight.original"}
    assert_close(values(), plain(x))
    for module in (plain, stand_in):
        parametrize.remove_parametrizations(module, "weight")
        assert not parametrize.is_parametrized(module)
    assert_close(values(), plain(x))
    weight = stand_in.weight
    assert stand_in.put_back() is layer and type(layer) is o3.Linear
    assert layer.weight is weight and not parametrize.is_parametrized(layer)
    assert_close(layer(x), plain(x))


def test_a_linear_layer_refuses_other_irreps() -> None:
    with pytest.raises(UnsupportedError, match="it takes 6x0e\\+6x1o, and is given 6x0e\\+4x1o"):
        AcceleratedLinear(o3.Linear("6x0e+6x1o", "3x0e"), irreps_in="6x0e+4x1o")


@pytest.mark.parametrize(
    ("scalars", "gates", "gated"),
    [
        ("6x0e", "5x0e", "3x1o+2x2e"),
        ("4x0e+2x0o", "7x0e", "3x1o+2x1e+2x2o"),
        ("4x0e+2x0o", "3x0e+2x0o", "3x1o+2x2o"),
        ("4x0e", "", ""),
    ],
)
def test_gates_are_e3nns(scalars: str, gates: str, gated: str) -> None:
    acts = {"e": torch.nn.functional.silu, "o": torch.tanh}
    of = [[acts[str(ir)[-1]] for _, ir in o3.Irreps(irreps)] for irreps in (scalars, gates)]
    assert_close(*IrMulGate(Gate(scalars, of[0], gates, of[1], gated)).both_results(draw))


TYPES = torch.tensor([3, 0, 3, 1, 0, 3, 3])


@pytest.mark.parametrize("of_gpu, types", [(False, 5), (True, 5), (True, 50)], ids=str)
def test_products_by_type_are_those_of_each_nodes_row(
    of_gpu: bool, types: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, and first and second derivatives, of the embedding too; some types do not occur, or most."""
    if of_gpu:
        found = types_without_waiting(TYPES, types)
        assert len(found[1]) == min(8, types)
        monkeypatch.setattr("autotune.models.species.types_of", lambda *_: found)
    torch.manual_seed(0)
    product = TypedProduct(o3.FullyConnectedTensorProduct("3x0e+2x1o+2x0e", "4x0e", "2x0e+3x1o+2x2e"), types=types)
    x, embedding, g = draw((len(TYPES), 11), (types, 4), (len(TYPES), 21))

    def derivatives(types: Tensor | None) -> list[Tensor]:
        of = [x.clone().requires_grad_(), embedding.clone().requires_grad_(), product.weight]
        token = NODE_TYPES.set(types)
        try:
            out = product(of[0], of[1][TYPES])
            first = torch.autograd.grad(out, of, g, create_graph=True)
            return [out, *first, *torch.autograd.grad(sum(one.square().sum() for one in first), of)]
        finally:
            NODE_TYPES.reset(token)

    for one, other in zip(derivatives(TYPES), derivatives(None), strict=True):
        assert_close(one, other)
