"""The installed e3nn, torch and Python: values and both derivatives are those of the e3nn that is installed.

Small on purpose: CI also runs this file in an environment of each supported e3nn.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from e3nn import o3
from places import ROOT
from reference import assert_matches_e3nn, float64, make_case
from torch import Tensor

from autotune.models.accelerate import accelerate, restore
from autotune.modules.rows import SphericalHarmonics, SphericalHarmonicsConv
from kernelgen import UnsupportedError
from kernelgen.arithmetic.couplings import couplings_digest, path_terms
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.ops.product import build, rebuild
from kernelgen.problem.product import TensorProductProblem

pytestmark = pytest.mark.slow
# All of (1, 2, 2), (2, 1, 2), (2, 2, 1): e3nn 0.4 gives these couplings the opposite sign of later versions.
SIGNED = ("8x1o+8x2e", "0e+1o+2e", "1o+1e+2e+2o")


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64():
        yield


COUPLED = [(a, b, c) for a, b in itertools.product(range(4), repeat=2) for c in range(abs(a - b), min(a + b, 3) + 1)]


@pytest.mark.parametrize("degrees", COUPLED)
def test_terms_are_the_couplings_of_the_installed_e3nn(degrees: tuple[int, int, int]) -> None:
    irreps = [f"1x{degree}e" for degree in degrees]
    problem = TensorProductProblem.from_instructions(*irreps, [(0, 0, 0, "uvu", True)])
    (terms,) = path_terms(problem)
    found = torch.zeros(*(2 * degree + 1 for degree in degrees))
    for entry in terms.entries:
        for m2, number in terms.values[entry.value].terms:
            found[entry.m1, m2, entry.m3] = entry.sign * number
    wanted = terms.path.coefficient * o3.wigner_3j(*degrees)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("operation", ["conv", "plain"])
def test_products_and_both_derivatives(operation: str) -> None:
    problem = TensorProductProblem.channelwise(*SIGNED)
    operator = build(problem, operation=operation, dtype=torch.float64)
    assert_matches_e3nn(operator, make_case(problem, operation, edges=23), DIRECTIONS, 1e-10)


def test_fully_connected_products_and_both_derivatives() -> None:
    problem = TensorProductProblem.fully_connected("3x1o+2x2e", "0e+1o+2e", "2x1e+3x2e+2x2o")
    operator = build(problem, operation="plain", dtype=torch.float64)
    assert_matches_e3nn(operator, make_case(problem, "plain", edges=11), DIRECTIONS, 1e-10)


def derivatives(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The value, its first derivatives along a fixed cotangent, and the derivatives of their squares."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    value = function(*inputs)
    cotangent = torch.linspace(-1, 1, value.numel()).view_as(value)
    first = torch.autograd.grad((value * cotangent).sum() + value.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs)
    return [value.detach(), *(grad.detach() for grad in first), *second]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        error = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
        assert error <= 1e-10


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_harmonics_and_both_derivatives() -> None:
    for normalization in ("component", "norm"):
        arguments = ([0, 1, 2, 3, 4], True, normalization)
        ours, theirs = SphericalHarmonics(*arguments), o3.SphericalHarmonics(*arguments)
        assert_same(derivatives(ours, [normal(13, 3)]), derivatives(theirs, [normal(13, 3)]))


def test_convolutions_of_vectors_and_both_derivatives() -> None:
    harmonics = SphericalHarmonics([0, 1, 2], True, "component")
    conv = SphericalHarmonicsConv(SIGNED[0], harmonics, filter_irreps_out=SIGNED[2])
    plain = o3.TensorProduct(
        *(conv.irreps_in1, conv.irreps_in2, conv.irreps_out),
        [(i.i_in1, i.i_in2, i.i_out, i.connection_mode, i.has_weight) for i in conv.instructions],
        shared_weights=False,
        internal_weights=False,
    )
    directions = o3.SphericalHarmonics([0, 1, 2], True, "component")
    sender, receiver = torch.randint(0, 5, (2, 17), generator=torch.Generator().manual_seed(1))

    def with_e3nn(x: Tensor, vectors: Tensor, w: Tensor) -> Tensor:
        messages = plain(x[sender], directions(vectors), w)
        return torch.zeros(5, messages.shape[1]).index_add(0, receiver, messages)

    inputs = [normal(5, conv.irreps_in1.dim), normal(17, 3), normal(17, conv.weight_numel)]
    found = derivatives(lambda x, vectors, w: conv(x, vectors, w, sender, receiver), inputs)
    assert_same(found, derivatives(with_e3nn, inputs))


class Model(torch.nn.Module):
    """Vectors to scalars through harmonics, a product with weights of the edge and a fully connected one."""

    def __init__(self) -> None:
        super().__init__()
        self.harmonics = o3.SphericalHarmonics([0, 1, 2], True, "component")
        paths = [(0, 1, 0, "uvu", True), (0, 2, 1, "uvu", True), (1, 1, 2, "uvu", True)]
        self.product = o3.TensorProduct("4x1o+4x2e", "0e+1o+2e", "4x2e+4x2o+4x1o", paths, shared_weights=False)
        self.last = o3.FullyConnectedTensorProduct("4x2e+4x2o+4x1o", "0e+1o+2e", "1x0e")

    def forward(self, x: Tensor, vectors: Tensor, w: Tensor) -> Tensor:
        y = self.harmonics(vectors)
        return self.last(self.product(x, y, w), y)


def make_model() -> tuple[Model, list[Tensor]]:
    torch.manual_seed(2)
    model = Model()
    return model, [normal(9, 32), normal(9, 3), normal(9, model.product.weight_numel)]


def test_accelerated_models_and_both_derivatives() -> None:
    model, inputs = make_model()
    wanted = derivatives(model, inputs)
    found = accelerate(model)
    assert found.replaced == 3, found
    assert_same(derivatives(model, inputs), wanted)
    assert restore(model) == 3
    assert_same(derivatives(model, inputs), wanted)


def test_compiled_models() -> None:
    from autotune.modules.convolution import TensorProductConv

    conv = TensorProductConv(SIGNED[0], SIGNED[1], filter_irreps_out=SIGNED[2], dtype=torch.float64, device="cpu")
    sender, receiver = torch.randint(0, 5, (2, 17), generator=torch.Generator().manual_seed(1))
    inputs = [normal(5, 64), normal(17, 9), normal(17, conv.weight_numel)]
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        given = [tensor.clone().requires_grad_() for tensor in inputs]
        value = function(*given, sender, receiver)
        return [value.detach(), *torch.autograd.grad(value.square().sum(), given)]

    assert_same(gradients(compiled), gradients(conv))


def test_function_transforms() -> None:
    from autotune.modules.product import TensorProduct

    product = TensorProduct("4x1o", "1o", "4x1e", [(0, 0, 0, "uvu", True)], shared_weights=False)
    theirs = o3.TensorProduct("4x1o", "1o", "4x1e", [(0, 0, 0, "uvu", True)], shared_weights=False)
    inputs = (normal(7, 12), normal(7, 3), normal(7, 4))
    assert_same([torch.func.vmap(lambda *rows: product(*rows))(*(t[:, None] for t in inputs))[:, 0]], [theirs(*inputs)])
    of = lambda function: torch.func.grad(lambda y: function(inputs[0], y, inputs[2]).square().sum())(inputs[1])  # noqa: E731
    given = inputs[1].clone().requires_grad_()
    assert_same([of(product)], list(torch.autograd.grad(theirs(inputs[0], given, inputs[2]).square().sum(), given)))


def test_operators_saved_under_other_couplings_are_refused() -> None:
    """Else a program exported under e3nn 0.4 would give wrong values under 0.6, without a word."""
    problem = TensorProductProblem.channelwise(*SIGNED)
    text = build(problem, operation="plain", dtype=torch.float64).text
    data = json.loads(text)
    assert data["couplings"] == couplings_digest(problem)
    assert rebuild(json.dumps({key: value for key, value in data.items() if key != "couplings"})).text == text
    with pytest.raises(UnsupportedError, match="saved under another version of e3nn"):
        rebuild(json.dumps(data | {"couplings": "0123456789abcdef"}))


def test_couplings_of_opposite_sign_have_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = TensorProductProblem.channelwise("4x1o", "2e", "2o")
    ours, digest = o3.wigner_3j, couplings_digest.__wrapped__(problem)
    monkeypatch.setattr(o3, "wigner_3j", lambda *degrees, **options: -ours(*degrees, **options))
    assert couplings_digest.__wrapped__(problem) != digest


IMPORTS = ("from autotune import accelerate", "import mace.modules", "from e3nn import o3")


@pytest.mark.parametrize("order", [(0, 2), (0, 1), (1, 0)], ids=["alone", "before-mace", "after-mace"])
def test_imports_work_in_each_order(order: tuple[int, ...]) -> None:
    lines = [IMPORTS[place] for place in order]
    if 1 in order:
        pytest.importorskip("mace")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(lines)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
