"""Products in half precision with float32's accuracy, on ordinary and on hostile inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernelgen.errors import InputError
from kernelgen.ops.operator import build
from kernelgen.ops.radial.convolution import radial_product
from kernelgen.ops.radial.products import Fp16x3, can_split, scaled
from kernelgen.problem.tensor_product import TensorProductProblem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EDGES, HIDDEN, WEIGHTS = 200, 64, 96


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hostile(kind: str) -> tuple[Tensor, Tensor]:
    """Hidden features and matrix: of ordinary size, over many magnitudes, with zeros, with one huge row or element."""
    h, matrix = drawn(EDGES, HIDDEN), drawn(HIDDEN, WEIGHTS, seed=1)
    if kind == "rows over e**24":
        h *= torch.linspace(-12, 12, EDGES).exp()[:, None]
    elif kind == "elements over e**24":
        h *= (24 * torch.rand(EDGES, HIDDEN, generator=torch.Generator().manual_seed(2)) - 12).exp()
    elif kind == "columns of the matrix over e**12":
        matrix *= torch.linspace(-6, 6, WEIGHTS).exp()
    elif kind == "zeros":
        h[::2] = 0
        h[1::4, ::3] = 0
        matrix[:, ::5] = 0
    elif kind == "a huge row":
        h[7] *= 1e30
        matrix *= 1e-3
    elif kind == "near the cutoff":
        h *= torch.linspace(0, 1, EDGES)[:, None] ** 5
    return h, matrix


def error(found: Tensor, h: Tensor, matrix: Tensor) -> float:
    """The largest error, relative to the sum of magnitudes as float32's own bound is; infinite where that is zero."""
    exact, bound = h.double() @ matrix.double(), h.double().abs() @ matrix.double().abs()
    wrong = (found.double() - exact).abs()
    return float(torch.where(wrong == 0, 0, wrong / bound).max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind",
    [
        *("ordinary", "rows over e**24", "elements over e**24", "columns of the matrix over e**12", "zeros"),
        *("a huge row", "near the cutoff"),
    ],
)
def test_errors_are_of_float32s_class(kind: str, device: str) -> None:
    h, matrix = (tensor.to(device) for tensor in hostile(kind))
    factors, *of = scaled(torch.ones(EDGES, 1, device=device), h, matrix)
    found = Fp16x3.apply(*of) * factors
    h, matrix, found = h.cpu(), matrix.cpu(), found.cpu()
    assert error(found, h, matrix) < 4 * error(h @ matrix, h, matrix)
    # One product of halves, which this must not silently be.
    rough = (h.half().double() @ matrix.half().double()) if kind == "ordinary" else None
    assert rough is None or error(rough, h, matrix) > 200 * error(found, h, matrix)


def test_what_is_not_finite_stays_so() -> None:
    h, matrix = hostile("ordinary")
    h[3, 5], h[4, 1] = float("inf"), float("nan")
    factors, *of = scaled(torch.ones(EDGES, 1), h, matrix)
    found = Fp16x3.apply(*of) * factors
    assert not found[3:5].isfinite().any() and found[5:].isfinite().all() and found[:3].isfinite().all()


PROBLEM = TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o+2e", "0e+1o")
NODES = 11


def gradients(product: str, most: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Value, forces, and the gradients of a loss on both, with a cutoff that makes some rows small."""
    generator = torch.Generator().manual_seed(5)
    sender, receiver = (torch.randint(NODES, (EDGES,), generator=generator).to(device) for _ in range(2))
    shapes = ((NODES, PROBLEM.dim_in1), (EDGES, PROBLEM.dim_in2), (EDGES, HIDDEN), (HIDDEN, PROBLEM.weight_numel))
    x, y, h, m = (drawn(*shape, seed=seed) for seed, shape in enumerate(shapes))
    h *= torch.linspace(0, 1, EDGES)[:, None] ** 5
    inputs = [tensor.to(device, dtype).requires_grad_() for tensor in (x, y, h, m)]
    operator = build(PROBLEM, operation="conv", dtype=dtype, device=device)
    out = radial_product(*inputs, sender, receiver, NODES, operator, most, product)
    forces = torch.autograd.grad(out.square().sum(), inputs[1:3], create_graph=True)
    loss = out.sin().sum() + sum(force.square().sum() for force in forces)
    return [tensor.detach().cpu() for tensor in (out, *forces, *torch.autograd.grad(loss, inputs))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most", [EDGES, 30])
def test_all_derivatives_of_the_convolution(most: int, device: str) -> None:
    wanted = gradients("float32", EDGES, torch.float64)
    found = gradients("fp16x3", most, torch.float32, device)
    plain = gradients("float32", most, torch.float32, device)
    assert not torch.equal(found[0], plain[0])
    for one, other, exact in zip(found, plain, wanted, strict=True):
        errors = [float((given - exact).abs().max() / exact.abs().max()) for given in (one, other)]
        assert errors[0] < 3e-6 and errors[0] < 8 * errors[1] + 2e-7, errors


def test_float64_and_other_words() -> None:
    h, matrix = hostile("ordinary")
    assert can_split(h, matrix) and not can_split(h.double(), matrix.double()) and not can_split(h[:0], matrix)
    same = zip(*(gradients(product, 30, torch.float64) for product in ("fp16x3", "float32")), strict=True)
    assert all(torch.equal(one, other) for one, other in same)
    with pytest.raises(InputError, match="product is 'half'; expected one of float32, fp16x3"):
        gradients("half", 30, torch.float64)
