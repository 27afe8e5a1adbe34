"""Products of Hessians with vectors, as Lanczos and Davidson searches take them.

``torch.autograd.functional.hvp`` and ``jvp`` differentiate second derivatives by what these are linear in, which needs
no third ones. All values are compared with e3nn's in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import functional, grad

import autotune
from autotune.modules.rows import TunedContraction
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.compat import o3
from kernelgen.errors import UnsupportedError
from kernelgen.problem.other_kinds import ContractionProblem

ATOMS, EDGES, IRREPS = 5, 14, "2x0e+2x1o"
SENDER = torch.arange(EDGES) % ATOMS
RECEIVER = (SENDER + 1 + torch.arange(EDGES) // ATOMS) % ATOMS
CONV = autotune.TensorProductConv(IRREPS, "0e+1o+2e", filter_irreps_out="0e+1o")
Energy = Callable[..., Tensor]


def drawn(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(len(shapes))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


X, Y, W, H, M, V = drawn(
    (ATOMS, 8), (EDGES, 9), (EDGES, CONV.weight_numel), (EDGES, 4), (4, CONV.weight_numel), (EDGES, 3)
)


def cubed(function: Callable[..., Tensor]) -> Energy:
    """An energy with second derivatives by all inputs and by pairs of them."""
    return lambda *inputs: (function(*inputs) ** 3).sum()


def conv_by_e3nn(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    messages = REFERENCE(x[SENDER], y, w)
    return messages.new_zeros(ATOMS, messages.shape[1]).index_add(0, RECEIVER, messages)


def radial_by_e3nn(x: Tensor, y: Tensor, h: Tensor, m: Tensor) -> Tensor:
    return conv_by_e3nn(x, y, h @ m)


def radial(edges_at_a_time: int) -> Callable[..., Tensor]:
    options = {"filter_irreps_out": "0e+1o", "edges_at_a_time": edges_at_a_time}
    module = autotune.RadialTensorProductConv(IRREPS, "0e+1o+2e", **options)
    return lambda x, y, h, m: module(x, y, h, m, SENDER, RECEIVER)


def vectors(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return VECTORS(x, v, w, SENDER, RECEIVER)


def vectors_by_e3nn(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return conv_by_e3nn(x, HARMONICS(v), w)


REFERENCE = CONV.problem.reference().double()
HARMONICS = o3.SphericalHarmonics("0e+1o+2e", True)
OURS = autotune.SphericalHarmonics("0e+1o+2e", True)
VECTORS = autotune.SphericalHarmonicsConv(IRREPS, OURS, filter_irreps_out="0e+1o")
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "conv": (lambda x, y, w: CONV(x, y, w, SENDER, RECEIVER), conv_by_e3nn, (X, Y, W)),
    "harmonics": (OURS, HARMONICS, (V,)),
    "vectors": (vectors, vectors_by_e3nn, (X, V, W)),
    "radial": (radial(EDGES), radial_by_e3nn, (X, Y, H, M)),
    "radial in parts": (radial(3), radial_by_e3nn, (X, Y, H, M)),
}
case = pytest.mark.parametrize("name", CASES)


def close(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10 * float(other.abs().max()))


@case
def test_hessian_times_a_vector(name: str) -> None:
    ours, theirs, inputs = CASES[name]
    along = drawn(*(tensor.shape for tensor in inputs))
    wanted = functional.vhp(cubed(theirs), inputs, along)[1]
    close(functional.hvp(cubed(ours), inputs, along)[1], wanted)


@case
def test_some_inputs_and_some_vectors(name: str) -> None:
    """By one input the others are constants, and of some gradients nothing depends on the vector."""
    ours, theirs, inputs = CASES[name]
    for place, tensor in enumerate(inputs):

        def of_one(function: Energy, place: int = place) -> Energy:
            return lambda one: function(*inputs[:place], one, *inputs[place + 1 :])

        along = drawn(tensor.shape)
        wanted = functional.vhp(of_one(cubed(theirs)), (tensor,), along)[1]
        close(functional.hvp(of_one(cubed(ours)), (tensor,), along)[1], wanted)
        rows = functional.jacobian(of_one(ours), (tensor,))[0].movedim(tuple(range(-tensor.dim(), 0)), (0, 1))
        close((functional.jvp(of_one(ours), (tensor,), along)[1],), (torch.tensordot(along[0], rows, 2),))


@case
def test_forces_along_a_vector_as_transforms_take_them(name: str) -> None:
    """Reverse mode twice over a gradient, by ``torch.func``: the ops' formulas in the place of eager calls."""
    ours, theirs, inputs = CASES[name]
    along, places = drawn(*(tensor.shape for tensor in inputs)), tuple(range(len(inputs)))
    _, pull = torch.func.vjp(torch.func.grad(cubed(ours), places), *inputs)
    _, push = torch.func.vjp(pull, tuple(map(torch.zeros_like, inputs)))
    close(push(along)[0], functional.vhp(cubed(theirs), inputs, along)[1])


@case
def test_several_vectors_at_a_time(name: str) -> None:
    ours, theirs, inputs = CASES[name]
    given = [tensor.clone().requires_grad_() for tensor in inputs]
    zeros = [torch.zeros_like(tensor, requires_grad=True) for tensor in inputs]
    first = grad(cubed(ours)(*given), given, create_graph=True)
    second = grad(first, given, zeros, create_graph=True)
    several = [torch.stack(drawn(*[tensor.shape] * 2)) for tensor in inputs]
    found = grad(second, zeros, several, is_grads_batched=True, retain_graph=True)
    for item in range(2):
        wanted = functional.vhp(cubed(theirs), inputs, tuple(each[item] for each in several))[1]
        close(tuple(each[item] for each in found), wanted)


@case
def test_what_is_linear_stays_differentiable_and_the_rest_is_refused(name: str) -> None:
    """By the vector again, and by nothing else: those are third derivatives."""
    ours, theirs, inputs = CASES[name]
    along = [tensor.requires_grad_() for tensor in drawn(*(tensor.shape for tensor in inputs))]
    given = [tensor.clone().requires_grad_() for tensor in inputs]
    zeros = [torch.zeros_like(tensor, requires_grad=True) for tensor in inputs]
    second = grad(grad(cubed(ours)(*given), given, create_graph=True), given, zeros, create_graph=True)
    product = grad(second, zeros, along, create_graph=True)
    weights = drawn(*(tensor.shape for tensor in inputs))
    found = grad(sum((a * b).sum() for a, b in zip(product, weights, strict=True)), along, retain_graph=True)
    close(found, functional.vhp(cubed(theirs), inputs, weights)[1])
    with pytest.raises(UnsupportedError, match=r"third derivatives of .* not generated.*functional\.hvp and vhp"):
        grad(product[0].sum(), given, allow_unused=True)


def test_a_contraction() -> None:
    """Against vhp, whose second derivatives are compared with MACE's elsewhere; and by finite differences."""
    problem = ContractionProblem("0e+1o", "0e+1o", 3, 4)
    x, w, along_x, along_w = drawn(*[(5, 4, 4), (2, len(polynomials(problem)), 4)] * 2)
    module, elements = TunedContraction(problem), torch.tensor([0, 1, 1, 0, 1])
    energy = cubed(lambda x, w: module.contract(x, w, elements))
    found = functional.hvp(energy, (x, w), (along_x, along_w))[1]
    close(found, functional.vhp(energy, (x, w), (along_x, along_w))[1])
    first = torch.func.grad(energy, (0, 1))
    step = 1e-5
    ends = [first(x + sign * step * along_x, w + sign * step * along_w) for sign in (1, -1)]
    for one, above, below in zip(found, *ends, strict=True):
        torch.testing.assert_close(one, (above - below) / (2 * step), rtol=1e-5, atol=1e-5 * float(one.abs().max()))
    given = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    zeros = [torch.zeros_like(tensor, requires_grad=True) for tensor in given]
    second = grad(grad(energy(*given), given, create_graph=True), given, zeros, create_graph=True)
    with pytest.raises(UnsupportedError, match="third derivatives of a symmetric contraction"):
        grad(second[0].sum(), given[0])


class TwoLayers(torch.nn.Module):
    """Positions to an energy: harmonics, convolutions, a linear layer and a product, as e3nn's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.harmonics = o3.SphericalHarmonics("0e+1o+2e", True)
        self.conv = CONV.problem.reference()
        self.linear = o3.Linear(CONV.irreps_out, IRREPS)
        self.last = o3.FullyConnectedTensorProduct(IRREPS, IRREPS, "0e")

    def forward(self, positions: Tensor) -> Tensor:
        """[atoms, 3] -> the energy."""
        edges = positions[RECEIVER] - positions[SENDER]
        lengths = edges.norm(dim=1, keepdim=True)
        weights = torch.cat([torch.exp(-k * lengths) for k in (0.2, 0.5, 1, 2)], 1) @ M
        x = X
        for _ in range(2):
            out = self.conv(x[SENDER], self.harmonics(edges), weights)
            out = self.linear(out.new_zeros(ATOMS, out.shape[1]).index_add(0, RECEIVER, out))
            x = out * torch.tanh(out[:, :1])
        return self.last(x, x).sum()


def test_an_accelerated_model() -> None:
    """Lanczos' step: the Hessian of an energy times a vector of positions, by each way that torch has."""
    torch.manual_seed(0)
    model = TwoLayers().double()
    (positions, along) = drawn((ATOMS, 3), (ATOMS, 3))
    wanted = functional.hvp(model, positions, along)[1]
    autotune.accelerate(model)

    def gradient(positions: Tensor) -> Tensor:
        return grad(model(positions), positions, create_graph=True)[0]

    close((functional.hvp(model, positions, along)[1],), (wanted,))
    close((functional.jvp(gradient, positions, along)[1],), (wanted,))
    close((functional.vhp(model, positions, along)[1],), (wanted,))
