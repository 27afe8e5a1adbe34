"""Generated symmetric contractions give what MACE's module gives, for MACE's own weights, with both derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from mace.modules.symmetric_contraction import SymmetricContraction
from mace.tools.cg import U_matrix_real
from mace_cases import default_dtype
from torch._subclasses import FakeTensor, FakeTensorMode

from autotune.models.mace.package import AcceleratedContraction
from kernelgen.arithmetic.contraction_couplings import coordinates, polynomials
from kernelgen.compat import o3
from kernelgen.errors import UnsupportedError
from kernelgen.ops.symmetric_contraction import build_contraction
from kernelgen.problem.other_kinds import ContractionProblem

CHANNELS, ELEMENTS = 2, 3
OUTS = ("0e", "0e+1o", "0e+1o+2e")
CASES = [("0e+1o+2e", out, correlation) for correlation in (1, 2, 3) for out in OUTS]
CASES += [("0e+1o+2e+3o", "0e+1o", 3), ("0e+1o", "0e+1o", 4), ("1o+0e+0o", "0e+1e", 2)]


def stock(problem: ContractionProblem, num_elements: int = ELEMENTS) -> Any:
    """MACE's module, with random weights."""
    torch.manual_seed(0)
    many = [
        o3.Irreps("+".join(f"{problem.channels}x{ir}" for ir in irreps.split("+")))
        for irreps in (problem.irreps_in, problem.irreps_out)
    ]
    with default_dtype(torch.float64):
        return SymmetricContraction(*many, problem.correlation, num_elements=num_elements)


def weights_of(module: Any, problem: ContractionProblem) -> torch.Tensor:
    """MACE's weights in the basis, [elements, weights, channels], differentiable."""
    basis, (some, *_) = polynomials(problem), module.parameters()
    elements = module.contractions[0].weights_max.shape[0]
    found = torch.zeros(elements, len(basis), problem.channels, dtype=some.dtype, device=some.device)
    for block, contraction in enumerate(module.contractions):
        for step, weights in enumerate((contraction.weights_max, *contraction.weights)):
            degree = problem.correlation - step
            tensor = contraction.U_tensors(degree)
            tensor = tensor.reshape(problem.out[block].dim, problem.dim_in**degree, tensor.shape[-1])
            rows = [r for r, one in enumerate(basis) if (one.block, one.degree) == (block, degree)]
            matrix = coordinates(problem, block, degree, tensor.cpu()).to(some)
            places = torch.tensor(rows, dtype=torch.long, device=some.device)
            found = found.index_add(1, places, torch.matmul(matrix, weights))
    return found


def normal(like: torch.Tensor) -> torch.Tensor:
    """Of its shape alone: ``randn_like`` follows strides, in which the two modules differ."""
    return torch.randn(like.shape, dtype=like.dtype).to(like.device)


def assert_is_maces(problem: ContractionProblem, elements: torch.Tensor, count: int, device: str = "cpu") -> None:
    """Value, gradients and second gradients of features and of MACE's own weights; ``count`` elements in all."""
    module = stock(problem, count).to(device)
    operator = build_contraction(problem, dtype=torch.float64, layout="mul_ir", device=device)
    elements = elements.to(device)
    one_hot = torch.nn.functional.one_hot(elements, count).double()
    parameters = [weight for weight in module.parameters() if weight.requires_grad]
    features = torch.randn(len(elements), problem.channels, problem.dim_in, dtype=torch.float64)
    results = []
    for contract in (
        lambda x: module(x, one_hot),
        lambda x: operator(x.flatten(1), weights_of(module, problem), elements),
    ):
        torch.manual_seed(1)
        x = features.to(device, copy=True).requires_grad_()
        out = contract(x)
        first = torch.autograd.grad(
            out, [x, *parameters], normal(out), create_graph=True, allow_unused=True, materialize_grads=True
        )
        loss = sum((grad * normal(grad)).sum() for grad in first)
        second = torch.autograd.grad(loss, [x, *parameters], allow_unused=True, materialize_grads=True)
        results.append([out, *first, *second])
    for found, wanted in zip(results[1], results[0], strict=True):
        size = float(wanted.detach().abs().max())
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10 * max(1.0, size))
    assert all(float(value.detach().abs().max()) > 0 for value in results[0][:2])


@pytest.mark.parametrize("irreps_in, irreps_out, correlation", CASES)
def test_values_and_both_derivatives_are_maces(irreps_in: str, irreps_out: str, correlation: int) -> None:
    """Unsorted nodes; the second element never occurs."""
    problem = ContractionProblem(irreps_in, irreps_out, correlation, CHANNELS)
    assert_is_maces(problem, torch.tensor([2, 0, 2, 2, 0]), ELEMENTS)


@pytest.mark.covering(2)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("count, elements", [(1, [0, 0, 0]), (89, [88, 5, 88, 0, 5])], ids=["one", "89 elements"])
@pytest.mark.parametrize("correlation", [1, 2, 3])
@pytest.mark.parametrize("out, channels", [("0e", 128), ("0e+1o", 128), ("0e+1o+2e", 128), ("0e", 96)])
def test_models_that_are_published(
    out: str, channels: int, correlation: int, count: int, elements: list[int], device: str
) -> None:
    """MACE-MP-0 small, medium and large, and MACE-OFF small: unsorted nodes, elements that never occur."""
    problem = ContractionProblem("0e+1o+2e+3o", out, correlation, channels)
    # Of correlation 1 MACE's own module cannot view its result if there is a single element.
    assert_is_maces(problem, torch.tensor(elements), max(count, 2) if correlation == 1 else count, device)


def test_maces_polynomials_span_the_basis_and_no_more() -> None:
    """There are more of MACE's, because they depend on each other."""
    problem, numbers = ContractionProblem("0e+1o+2e+3o", "0e", 3, 1), []
    for degree in (1, 2, 3):
        with default_dtype(torch.float64):
            # Else, where cuEquivariance is installed, MACE takes its polynomials, which are independent.
            options = {"dtype": torch.float64, "use_cueq_cg": False}
            tensor = U_matrix_real(o3.Irreps(problem.irreps_in), o3.Irreps("0e"), degree, **options)[-1]
        matrix = coordinates(problem, 0, degree, tensor.reshape(1, problem.dim_in**degree, tensor.shape[-1]))
        assert torch.linalg.matrix_rank(matrix) == matrix.shape[0]
        numbers.append(tuple(matrix.shape))
    assert numbers == [(1, 1), (4, 4), (8, 23)]


def test_other_couplings_are_refused() -> None:
    problem = ContractionProblem("0e+1o", "0e", 2, CHANNELS)
    contraction = stock(problem).contractions[0]
    tensor = contraction.U_tensors(2).clone()
    tensor[0, 1] += 0.01
    with pytest.raises(UnsupportedError, match="keep the package's module"):
        coordinates(problem, 0, 2, tensor.reshape(1, 16, -1))


@pytest.mark.parametrize("occurring", [[2, 0, 2, 1], [2, 0, 2, 0], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
def test_a_call_in_inference_mode_leaves_nothing_that_later_calls_cannot_use(
    trains: bool, occurring: list[int]
) -> None:
    """Tensors made in inference mode cannot be saved for gradients. Elements that do not occur are left out."""
    problem = ContractionProblem("0e+1o", "0e+1o", 2, CHANNELS)
    module = stock(problem).requires_grad_(trains)
    elements, x = torch.tensor(occurring), torch.randn(4, CHANNELS, 4, dtype=torch.float64)
    one_hot = torch.nn.functional.one_hot(elements, ELEMENTS).double()
    place = AcceleratedContraction(module)
    with torch.inference_mode():
        value = place(x, one_hot)
    leaves = [x.requires_grad_(), *(weight for weight in module.parameters() if weight.requires_grad)]
    found, wanted = (torch.autograd.grad(one(x, one_hot).square().sum(), leaves) for one in (place, module))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(value, module(x, one_hot).detach(), rtol=0, atol=1e-10)


def test_vmap_over_the_weights_of_several_models() -> None:
    problem = ContractionProblem("0e+1o", "0e+1o", 2, CHANNELS)
    module = stock(problem).requires_grad_(False)
    elements, x = torch.tensor([2, 0, 2, 1]), torch.randn(4, CHANNELS, 4, dtype=torch.float64)
    place = AcceleratedContraction(module)
    weights = {name: torch.stack([weight, 2 * weight]) for name, weight in module.named_parameters()}
    found = torch.func.vmap(lambda one: torch.func.functional_call(place, one, (x, elements)))(weights)
    once = place(x, elements)
    torch.testing.assert_close(found, torch.stack([once, 2 * once]), rtol=0, atol=1e-10)


def test_nothing_is_kept_of_a_call_on_fake_tensors() -> None:
    module = stock(ContractionProblem("0e+1o", "0e+1o", 2, CHANNELS)).requires_grad_(False)
    elements, x = torch.tensor([2, 0, 2, 1]), torch.randn(4, CHANNELS, 4, dtype=torch.float64)
    place = AcceleratedContraction(module)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert type(place(mode.from_tensor(x), mode.from_tensor(elements))) is FakeTensor
    found = place(x, elements)
    assert type(found) is torch.Tensor
    wanted = module(x, torch.nn.functional.one_hot(elements, ELEMENTS).double())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_autocast_computes_in_float32() -> None:
    problem = ContractionProblem("0e+1o+2e", "0e+1o", 2, CHANNELS)
    made = AcceleratedContraction(stock(problem).float())
    x = torch.randn(5, CHANNELS, problem.dim_in).bfloat16()
    elements = torch.tensor([2, 0, 2, 1, 0])
    wanted = made(x.float(), elements)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = made(x, elements)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("which", [slice(None), slice(None, None, 2)], ids=["all", "half"])
def test_rounded_couplings_of_mace_are_compared_as_float32(which: slice) -> None:
    """As a model converted from float32 has them, or one built in float64 after another in float32."""
    module = stock(ContractionProblem("0e+1o+2e", "0e+1o", 3, CHANNELS))

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(1)
        made = AcceleratedContraction(module)
        return made.both_results(lambda like, *shapes: [torch.randn(s, generator=draw).to(like) for s in shapes])

    found, wanted = results()
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for name, tensor in module.named_buffers():
        if "U_matrix" in name:
            tensor.view(-1)[which] = tensor.view(-1)[which].float().double()
    found, wanted = results()
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, wanted)
