"""``torch.autocast``: what comes in half precision is computed in float32, on all modules, compiled or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import autotune
from kernelgen.errors import InputError

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


def harmonics() -> tuple[Callable, list[Tensor]]:
    return autotune.SphericalHarmonics([0, 1, 2], True), [torch.randn(5, 3)]


def function() -> tuple[Callable, list[Tensor]]:
    return lambda x: autotune.spherical_harmonics([0, 1, 2], x, True), [torch.randn(5, 3)]


every = pytest.mark.parametrize("make", [product, connected, convolution, harmonics, function])


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
