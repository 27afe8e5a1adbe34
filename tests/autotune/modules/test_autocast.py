"""``torch.autocast``: what comes in half precision is computed in float32, on all modules, compiled or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import autotune
from autotune.models.linear import AcceleratedLinear
from autotune.models.radial import AcceleratedRadial
from autotune.models.species import SpeciesProduct
from autotune.modules.rows import TunedContraction
from kernelgen.compat import FullyConnectedNet, o3
from kernelgen.errors import InputError
from kernelgen.problem.other_kinds import ContractionProblem

HALVES = (torch.bfloat16, torch.float16)
CONV = ("2x0e+2x1o", "0e+1o")
GRAPH = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([2, 0, 1, 2, 2, 0])


def product() -> tuple[Callable, list[Tensor]]:
    module = autotune.TensorProduct(*CONV, "2x0e+2x1o", [(0, 1, 1, "uvu", True)], shared_weights=False)
    return module, [torch.randn(5, 8), torch.randn(5, 4), torch.randn(5, 2)]


def connected() -> tuple[Callable, list[Tensor]]:
    return autotune.FullyConnectedTensorProduct(*CONV, "3x0e+2x1o"), [torch.randn(5, 8), torch.randn(5, 4)]


def convolution() -> tuple[Callable, list[Tensor]]:
    conv = autotune.TensorProductConv(*CONV, filter_irreps_out="0e+1o")
    inputs = [torch.randn(4, 8), torch.randn(6, 4), torch.randn(6, conv.weight_numel)]
    return lambda *xyw: conv(*xyw, *GRAPH), inputs


def radial(edges_at_a_time: int | None = None) -> tuple[Callable, list[Tensor]]:
    options = {"filter_irreps_out": "0e+1o", "edges_at_a_time": edges_at_a_time}
    conv = autotune.RadialTensorProductConv(*CONV, **options)
    inputs = [torch.randn(4, 8), torch.randn(6, 4), torch.randn(6, 3), torch.randn(3, conv.weight_numel)]
    return lambda *xyhm: conv(*xyhm, *GRAPH), inputs


def radial_by_parts() -> tuple[Callable, list[Tensor]]:
    return radial(2)


def vector_convolution() -> tuple[Callable, list[Tensor]]:
    degrees = autotune.SphericalHarmonics("0e+1o", True)
    conv = autotune.SphericalHarmonicsConv("2x0e+2x1o", degrees, filter_irreps_out="0e+1o")
    inputs = [torch.randn(4, 8), torch.randn(6, 3), torch.randn(6, conv.weight_numel)]
    return lambda *xyw: conv(*xyw, *GRAPH), inputs


def by_matrix() -> tuple[Callable, list[Tensor]]:
    module = autotune.FullyConnectedTensorProduct(
        *CONV, "3x0e+2x1o", contraction="matrix", internal_weights=False, shared_weights=True
    )
    return module, [torch.randn(5, 8), torch.randn(5, 4), torch.randn(module.weight_numel)]


def full() -> tuple[Callable, list[Tensor]]:
    return autotune.FullTensorProduct(*CONV), [torch.randn(5, 8), torch.randn(5, 4)]


def elementwise() -> tuple[Callable, list[Tensor]]:
    return autotune.ElementwiseTensorProduct("2x0e+2x1o", "2x1o+2x0e"), [torch.randn(5, 8), torch.randn(5, 8)]


def contraction() -> tuple[Callable, list[Tensor]]:
    module = TunedContraction(ContractionProblem("0e+1o", "0e+1o", 2, 4))
    inputs = [torch.randn(5, 4, 4), torch.randn(3, module.num_weights, 4)]
    return lambda x, w: module.contract(x, w, torch.tensor([0, 2, 1, 0, 2])), inputs


def harmonics() -> tuple[Callable, list[Tensor]]:
    return autotune.SphericalHarmonics([0, 1, 2], True), [torch.randn(5, 3)]


def function() -> tuple[Callable, list[Tensor]]:
    return lambda x: autotune.spherical_harmonics([0, 1, 2], x, True), [torch.randn(5, 3)]


MAKERS = (product, connected, by_matrix, full, elementwise, convolution, vector_convolution, radial, radial_by_parts)
MAKERS = (*MAKERS, contraction, harmonics, function)
every = pytest.mark.parametrize("make", MAKERS)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@every
@pytest.mark.parametrize("half", HALVES)
def test_half_precision_is_computed_in_float32(make: Callable, half: torch.dtype) -> None:
    """Whatever the dtype of autocast; gradients come back in the dtype of the input."""
    module, inputs = make()
    given = [tensor.to(half).requires_grad_() for tensor in inputs]
    same = [tensor.detach().float().requires_grad_() for tensor in given]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = module(*given)
    wanted = module(*same)
    assert found.dtype is torch.float32 and torch.equal(found, wanted)
    pairs = zip(
        torch.autograd.grad(found.exp().sum(), given), torch.autograd.grad(wanted.exp().sum(), same), strict=True
    )
    for gradient, expected in pairs:
        assert gradient.dtype is half and torch.equal(gradient, expected.to(half))


def derivatives(function: Callable, inputs: list[Tensor]) -> list[Tensor]:
    """The value, its gradients, and gradients of their squares: as in training on forces."""
    given = [tensor.clone().requires_grad_() for tensor in inputs]
    value = function(*given)
    first = torch.autograd.grad(value.square().sum(), given, create_graph=True)
    second = torch.autograd.grad(sum(one.square().sum() for one in first), given)
    return [value.detach(), *(one.detach() for one in first), *second]


@pytest.mark.covering(1)
@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivatives_taken_under_autocast_are_the_same(make: Callable, dtype: torch.dtype) -> None:
    """Torch's own products would be in half precision there, in the backward pass too."""
    function, inputs = make()
    if isinstance(function, torch.nn.Module):
        function.to(dtype)
    inputs = [tensor.to(dtype) for tensor in inputs]
    wanted = derivatives(function, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = derivatives(function, inputs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))


@every
def test_inputs_of_two_dtypes_are_an_error_that_names_them(make: Callable) -> None:
    function, inputs = make()
    for place in range(len(inputs)) if len(inputs) > 1 else ():
        given = [tensor.double() if at == place else tensor for at, tensor in enumerate(inputs)]
        with pytest.raises(InputError, match=r"(?s)(?=.*torch\.float64)(?=.*torch\.float32)"):
            function(*given)


SPECIES = o3.FullyConnectedTensorProduct, ("3x0e+2x1o", "3x0e", "2x0e+3x1o")
STAND_INS: dict[str, tuple] = {
    "linear": (AcceleratedLinear, o3.Linear, ("3x0e+2x1o", "2x0e+3x1o"), 9, ()),
    "radial": (AcceleratedRadial, FullyConnectedNet, ([3, 8, 5], torch.nn.functional.silu), 3, ()),
    "species": (SpeciesProduct, *SPECIES, 9, (torch.eye(3)[[0, 2, 1, 0, 0, 2]],)),
    "scalars": (SpeciesProduct, *SPECIES, 9, (torch.randn(6, 3),)),
}


@pytest.mark.parametrize("is_transformed", [False, True])
@pytest.mark.parametrize("name", STAND_INS)
def test_stand_ins_stay_in_full_precision(name: str, is_transformed: bool) -> None:
    """In float32, eagerly or by the operations of torch that transforms take."""
    kind, original, arguments, width, rest = STAND_INS[name]
    module, x = kind(original(*arguments)), torch.randn(6, width)

    def value(x: Tensor) -> Tensor:
        return module(x, *rest)

    take = torch.func.vmap(value) if is_transformed else value
    wanted = take(x[None] if is_transformed else x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = take(x[None] if is_transformed else x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_every_module_is_here() -> None:
    """The makers above are of all modules that users import."""
    public = {name for name in autotune.__all__ if isinstance(getattr(autotune, name), type)}
    modules = {name for name in public if issubclass(getattr(autotune, name), torch.nn.Module)}
    tested = {"TensorProduct", "FullyConnectedTensorProduct", "FullTensorProduct", "ElementwiseTensorProduct"}
    tested |= {"TensorProductConv", "SphericalHarmonicsConv", "RadialTensorProductConv", "SphericalHarmonics"}
    assert modules == tested | {
        "SymmetricContraction",
        "CapturedModel",
        "CapturedTraining",
    }  # which hold a model with its own rule


@every
def test_one_input_in_half_precision_is_enough(make: Callable) -> None:
    module, inputs = make()
    for place in range(len(inputs)):
        given = [tensor.bfloat16() if at == place else tensor for at, tensor in enumerate(inputs)]
        with torch.autocast("cpu"):
            assert torch.equal(module(*given), module(*(tensor.float() for tensor in given)))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_stay_as_they_are(make: Callable, dtype: torch.dtype) -> None:
    module, inputs = make()
    if isinstance(module, torch.nn.Module):
        module.to(dtype)
    given = [tensor.to(dtype) for tensor in inputs]
    with torch.autocast("cpu"):
        found = module(*given)
    assert found.dtype is dtype and torch.equal(found, module(*given))


@every
@pytest.mark.parametrize("half", HALVES)
def test_without_autocast_half_precision_is_an_error_that_names_it(make: Callable, half: torch.dtype) -> None:
    module, inputs = make()
    given = [tensor.to(half) for tensor in inputs]
    with pytest.raises(InputError, match=f"{half}; expected torch.float32 or torch.float64.*torch.autocast"):
        module(*given)
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False), pytest.raises(InputError, match="torch.autocast"):
        module(*given)
    # Of another device than the tensors'.
    with torch.autocast("xpu", dtype=torch.float16), pytest.raises(InputError, match="torch.autocast"):
        module(*given)


def test_parameters_in_half_precision() -> None:
    module, (x, y) = connected()
    module.bfloat16()
    with torch.autocast("cpu"):
        found = module(x, y)
    gradient = torch.autograd.grad(found.sum(), module.weight)[0]
    assert found.dtype is torch.float32 and gradient.dtype is torch.bfloat16


def test_values_are_at_least_as_near_as_e3nns() -> None:
    """e3nn computes some of it in half precision; what it gives is what users of autocast expect."""
    module, inputs = product()
    theirs = module.problem.reference()
    given = [tensor.bfloat16() for tensor in inputs]
    exact = theirs(*(tensor.float() for tensor in given))
    with torch.autocast("cpu"):
        found, wanted = module(*given), theirs(*given)
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max() < (wanted - exact).abs().max()
    assert torch.allclose(found, wanted.float(), rtol=0.05, atol=0.05)


def test_a_model_trains() -> None:
    """Linear layers give bfloat16 inside of autocast; forces need second derivatives."""
    sh, tp = autotune.SphericalHarmonics("0e+1o", True), autotune.FullyConnectedTensorProduct(*CONV, "4x0e")
    first, last = torch.nn.Linear(3, 8), torch.nn.Linear(4, 1)
    x = torch.randn(6, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = first(x)
        assert features.dtype is torch.bfloat16
        energy = last(tp(features, sh(x))).float().sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        loss = forces.square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (*first.parameters(), tp.weight, last.weight))
    assert tp.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("make", [connected, harmonics])
def test_compiles(make: Callable) -> None:
    module, inputs = make()
    given = [tensor.bfloat16() for tensor in inputs]
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # with and without autocast, in turn
        assert torch.equal(compiled(*inputs), module(*inputs))
        with torch.autocast("cpu"):
            assert torch.equal(compiled(*given), module(*given))


def test_under_function_transforms() -> None:
    module, inputs = product()
    given = [tensor.bfloat16() for tensor in inputs]
    with torch.autocast("cpu"):
        found = torch.func.vmap(torch.func.grad(lambda *xyw: module(*xyw).square().sum()))(*(t[:, None] for t in given))
    wanted = torch.func.grad(lambda *xyw: module(*xyw).square().sum())(*(t.float() for t in given))
    assert found.dtype is torch.bfloat16 and torch.equal(found[:, 0], wanted.bfloat16())
