"""Linear layers, products by element and gates by their CUDA kernels, run on the host: values and both derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from e3nn.nn import Gate
from fixed_kernels import emulate_launches
from torch import Tensor

from autotune.models import linear
from autotune.models.layout import IrMulGate
from autotune.models.linear import AcceleratedLinear
from autotune.models.species import MatricesByElement, SpeciesProduct, TypeMatrices, chunked_species, dense
from kernelgen.compat import o3
from kernelgen.compile.compiler import compile_source
from kernelgen.compile.gpu import nvrtc_version
from kernelgen.device import cuda_facts
from kernelgen.errors import CompileError, InputError, ToolMissingError
from kernelgen.ops import edge_networks
from kernelgen.ops import node_kernels as gates
from kernelgen.ops import node_kernels as matrices
from kernelgen.ops.edge_networks import SILU_GRADIENT, few_pass_silu
from kernelgen.runtime.kernel import FixedKernel


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the kernels run on the host; the entries of those that were launched."""
    emulate_launches(monkeypatch)
    run, found = FixedKernel.launch, []

    def launch(kernel: FixedKernel, *arguments: int) -> None:
        found.append(kernel.source.entry)
        run(kernel, *arguments)

    monkeypatch.setattr(FixedKernel, "launch", launch)
    monkeypatch.setattr(matrices, "takes", lambda *_: True)
    for part in (gates, edge_networks):
        monkeypatch.setattr(part, "may_launch", lambda *_: True)
    return found


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


def derivatives(run: Callable[..., Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Value, first gradients of random cotangents, and gradients of their squares in all inputs and the cotangents."""
    out = run(*given)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out).requires_grad_()
    first = torch.autograd.grad(out, given, g, create_graph=True)
    return [out, *first, *torch.autograd.grad(sum(one.square().sum() for one in first), (*given, g))]


def assert_same(run: Callable[..., Tensor], other: Callable[..., Tensor], given: Sequence[Tensor]) -> None:
    for found, wanted in zip(derivatives(run, given), derivatives(other, given), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("irreps_in", "irreps_out", "nodes"),
    [
        ("70x0e+40x0e+9x1o+5x1o+3x2e", "33x0e+66x1o+2x1o+4x3o", 37),  # 3x2e goes nowhere, 4x3o is zero
        ("4x0e+3x1o", "5x0e+2x1o", 290),  # sums over nodes in two parts
    ],
)
def test_linear_layers(irreps_in: str, irreps_out: str, nodes: int, launches: list[str]) -> None:
    torch.manual_seed(0)
    form = AcceleratedLinear(o3.Linear(irreps_in, irreps_out)).form
    x, w = draw((nodes, form.dims["x"]), (form.weight_numel,))
    assert_same(form, lambda x, w: form.traceable("y", x, w), (x, w))
    wide = torch.cat((x, x), 1)[:, x.shape[1] :]
    torch.testing.assert_close(form(wide, w), form(x, w))
    assert form(x[:0], w).shape == (0, form.dims["y"])
    assert len(launches) >= 5


@pytest.mark.parametrize(
    ("irreps_in", "irreps_out", "runs"),
    [
        ("4x1o+4x1o+4x1o+5x0e+5x0e+2x1o+2x1o", "3x1o+6x0e", [3, 1, 2]),  # scalars are joined before
        ("3x1o+3x1o+2x1o", "4x1o+5x1o", [2, 1, 2, 1]),  # to two blocks
        ("3x1o+4x0e", "3x1o+2x2e", [1]),
    ],
)
def test_runs_of_blocks(irreps_in: str, irreps_out: str, runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU multiplies them in large structures."""
    monkeypatch.setattr(linear, "joins_blocks", lambda features: True)
    torch.manual_seed(0)
    original = o3.Linear(o3.Irreps(irreps_in).simplify(), irreps_out)
    form = AcceleratedLinear(original, irreps_in=irreps_in).form
    assert sorted(run.count for run in form.runs) == sorted(runs)
    x, w = draw((11, form.dims["x"]), (form.weight_numel,))
    assert_same(form, lambda x, w: form.traceable("y", x, w), (x, w))
    wide = torch.cat((x, x), 1)[:, x.shape[1] :]
    torch.testing.assert_close(form(wide, w), form(x, w))


def test_blocks_that_runs_share_in_part_stay_alone() -> None:
    paths = [linear.Path(*at, 2, 2, 1, 1.0) for at in ((0, 0, 0), (2, 0, 4), (2, 2, 8))]
    assert [run.count for run in linear.BlockMatrices(paths, (4, 4)).runs] == [1, 1, 1]


def test_linear_layers_in_float32(launches: list[str]) -> None:
    """Whose tiles go further along the depth."""
    layer = o3.Linear("70x0e+40x0e+9x1o", "33x0e+66x1o")
    form = AcceleratedLinear(layer).form
    exact = draw((37, layer.irreps_in.dim), (layer.weight_numel,))
    single = [one.detach().float().requires_grad_() for one in exact]
    for found, wanted in zip(derivatives(form, single), derivatives(form, exact), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3)
    assert launches


def relative(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    """Errors of value and gradients, each relative to its largest element."""
    pairs = zip(found, wanted, strict=True)
    return [float((one.cpu().double() - other).abs().max() / other.abs().max()) for one, other in pairs]


@pytest.mark.parametrize(
    ("device", "nodes"),
    [
        *(("cpu", 37), ("cpu", 150)),
        # Of more nodes than the kernels of float32 take.
        *(pytest.param("cuda", nodes, marks=pytest.mark.gpu) for nodes in (150, matrices.MOST_NODES + 100)),
    ],
)
def test_products_in_tf32(device: str, nodes: int, request: pytest.FixtureRequest) -> None:
    """Each derivative has errors of its class: far above float32's, so that it is seen to be in use."""
    if device == "cpu":
        request.getfixturevalue("launches")
    linear_layer = AcceleratedLinear(o3.Linear("70x0e+40x0e+9x1o+5x1o+3x2e", "33x0e+66x1o+2x1o+4x3o")).form
    product = SpeciesProduct(o3.FullyConnectedTensorProduct("40x0e+33x1o", "6x0e", "35x0e+70x1o"))
    elements = torch.tensor([4, 1, 1, 0, 4, 3]).repeat(nodes)[:nodes]
    by_element = MatricesByElement(product.product, chunked_species(elements.to(device), 6))
    exact = MatricesByElement(product.product, chunked_species(elements, 6))
    for form, other in ((linear_layer, linear_layer), (by_element, exact)):
        given = draw((nodes, form.dims["x"]), (form.weight_numel,))
        wanted = [one.detach() for one in derivatives(other, given)]
        errors = {}
        for form.kernel.in_tf32 in (False, True):
            single = [one.detach().to(device, torch.float32).requires_grad_() for one in given]
            errors[form.kernel.in_tf32] = relative([one.detach() for one in derivatives(form, single)], wanted)
        assert max(errors[False]) < 1e-5, errors
        assert all(1e-5 < error < 2e-3 for error in errors[True]), errors


def test_float64_is_never_rounded(launches: list[str]) -> None:
    form = AcceleratedLinear(o3.Linear("20x0e+9x1o", "33x0e+6x1o")).form
    x, w = draw((37, form.dims["x"]), (form.weight_numel,))
    before = form(x, w)
    form.kernel.in_tf32 = True
    assert torch.equal(form(x, w), before)


@pytest.mark.parametrize("nodes", [9, 600])
def test_products_by_element(nodes: int, launches: list[str]) -> None:
    """Elements 2 and 5 never occur; 600 nodes fill several chunks of an element."""
    product = SpeciesProduct(o3.FullyConnectedTensorProduct("3x0e+2x1o+2x0e", "6x0e", "2x0e+3x1o+2x2e"))
    elements = torch.tensor([4, 1, 1, 0, 4, 1, 1, 3, 1]).repeat(nodes // 9 + 1)[:nodes]
    attrs = torch.nn.functional.one_hot(elements, 6).double()
    form = MatricesByElement(product.product, chunked_species(elements, 6))
    given = draw((nodes, product.dims["x"]), (product.weight_numel,))
    assert_same(form, lambda x, w: dense(product.paths, product.dims, attrs, "y", x, w), given)
    assert len(launches) >= 5


def test_tensors_that_do_not_fit_are_refused(launches: list[str]) -> None:
    form = AcceleratedLinear(o3.Linear("4x0e+3x1o", "5x0e+2x1o")).form
    x, w = (one.detach() for one in draw((6, form.dims["x"]), (form.weight_numel,)))
    with pytest.raises(InputError, match="float64 .* multiplied with torch.float32"):
        form(x, w.float())
    product = SpeciesProduct(o3.FullyConnectedTensorProduct("3x0e", "6x0e", "2x0e"))
    by_element = MatricesByElement(product.product, chunked_species(torch.zeros(7, dtype=torch.int64), 6))
    with pytest.raises(InputError, match="of 7 nodes by element"):
        by_element(x[:, :3].contiguous(), product.weight.detach())
    assert not launches


def test_matrices_of_types() -> None:
    """Not a kernel: their three derivatives are products of torch."""
    product = SpeciesProduct(o3.FullyConnectedTensorProduct("3x0e+2x1o+2x0e", "4x0e", "2x0e+3x1o+2x2e"))
    form = TypeMatrices(product.paths, 5)
    assert_same(form, lambda x, w: form.traceable("y", x, w), draw((5, 4), (product.weight_numel,)))


silu, tanh = torch.nn.functional.silu, torch.tanh
GATES = {
    "one parity": ("6x0e", [silu], "5x0e", [torch.sigmoid], "3x1o+2x2e"),
    "both": ("4x0e+2x0o", [silu, tanh], "3x0e+2x0o", [silu, tanh], "3x1o+2x2o"),
    "a kind of gates for two blocks": ("4x0e", [None], "8x0e+2x0o", [tanh, tanh], "3x1o+5x2e+2x3o"),
    "scalars alone": ("4x0e", [silu], "", [], ""),
}


@pytest.mark.parametrize("given", GATES.values(), ids=GATES)
def test_gates(given: tuple, launches: list[str]) -> None:
    gate = IrMulGate(Gate(*given))
    (x,) = draw((70, gate.irreps_in.dim))
    assert_same(gate, gate.composed, (x,))
    assert launches == ["equitune_gate"] * 3
    assert gate(x[:0]).shape == (0, gate.irreps_out.dim)


def test_gates_of_many_cotangents_at_once_and_differentiated_thrice(launches: list[str]) -> None:
    gate = IrMulGate(Gate(*GATES["both"]))
    (x,) = draw((4, gate.irreps_in.dim))
    many = torch.randn(3, 4, gate.irreps_out.dim)
    (found,) = torch.autograd.grad(gate(x), x, many, is_grads_batched=True)
    for one, g in zip(found, many, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(gate(x), x, g)[0])

    def third(run: Callable[[Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return torch.autograd.grad(second.square().sum(), x)[0]

    torch.testing.assert_close(third(gate), third(gate.composed))


def test_a_gate_with_an_unknown_activation_stays_composed(launches: list[str]) -> None:
    gate = IrMulGate(Gate("4x0e", [torch.nn.functional.elu], "2x0e", [silu], "2x1o"))
    (x,) = draw((5, gate.irreps_in.dim))
    torch.testing.assert_close(gate(x), gate.composed(x))
    assert not launches


@pytest.mark.parametrize("shape", [(7, 5), (41, 64), (0, 8)], ids=str)
def test_second_derivatives_of_silu(shape: tuple[int, int], launches: list[str]) -> None:
    (x,) = draw(shape)
    assert_same(few_pass_silu, silu, (x,))
    assert launches == ["equitune_silu_gradient"] * (x.numel() > 0)


def test_silu_adds_up_both_gradients_of_a_loss_on_values_and_forces(launches: list[str]) -> None:
    """In one launch; more forces of one value, passes by turns, and third derivatives."""
    x, a, b, c = draw(*[(41, 6)] * 4)

    def gradients(run: Callable[[Tensor], Tensor], count: int) -> list[Tensor]:
        out = run(x)
        forces = [torch.autograd.grad(out, x, g, create_graph=True)[0] for g in (a, b)[:count]]
        loss = (out * c).sum() + sum(((force * c).sin().sum() for force in forces), torch.zeros(()))
        found = [torch.autograd.grad(loss, (x, a), retain_graph=True) for _ in range(2)]
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return [*found[0], *found[1], *torch.autograd.grad(first.square().sum(), (x, a, c))]

    for count in (1, 2):
        launches.clear()
        assert all(map(torch.allclose, gradients(few_pass_silu, count), gradients(silu, count)))
        assert launches[: 2 * count] == ["equitune_silu_gradient"] * 2 * count


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ToolMissingError("no NVRTC")

    monkeypatch.setattr(matrices, "device_facts", lambda _: cuda_facts("sm_90"))
    monkeypatch.setattr(matrices, "compile_many", refuse)
    matrices.are_there.cache_clear()
    assert not matrices.are_there(gates.GATES.sources, torch.float32, 0)
    monkeypatch.setattr(matrices, "compile_many", lambda items: [object()] * len(items))
    matrices.are_there.cache_clear()
    assert matrices.are_there(gates.GATES.sources, torch.float32, 0)
    matrices.are_there.cache_clear()
    monkeypatch.setattr(matrices, "compile_many", lambda items: [object(), CompileError("a bug of ours")])
    with pytest.raises(CompileError, match="a bug of ours"):
        matrices.are_there(gates.GATES.sources, torch.float32, 0)


@pytest.mark.parametrize("power", [2.0, 6.0])
@pytest.mark.parametrize("kind", [gates.POLYNOMIAL, gates.CUT_POLYNOMIAL])
def test_polynomial_cutoffs(kind: int, power: float, launches: list[str]) -> None:
    def composed(x: Tensor) -> Tensor:
        found = 1 - (power + 1) * (power + 2) / 2 * x**power + power * (power + 2) * x ** (power + 1)
        found = found - power * (power + 1) / 2 * x ** (power + 2)
        return found * (x < 1) if kind == gates.CUT_POLYNOMIAL else found

    x = torch.linspace(0.01, 1.2, 40).view(-1, 1).requires_grad_()
    assert_same(lambda x: gates.gated(x, gates.scalar_kernel(kind, power), composed), composed, (x,))
    assert launches == ["equitune_gate"] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_kernels_compile(dtype: torch.dtype) -> None:
    try:
        nvrtc_version()
    except ToolMissingError as error:
        pytest.skip(str(error))
    in_tf32 = (matrices.TF32_ROWS, matrices.TF32_WEIGHTS) if dtype is torch.float32 else ()
    for kernel in (gates.GATES, matrices.ROWS, matrices.WEIGHTS, SILU_GRADIENT, *in_tf32):
        resources = compile_source(kernel.source(dtype), cuda_facts("sm_90")).resources
        assert resources["spill_bytes"] <= (64 if kernel in in_tf32 else 0)
        assert resources["registers"] <= (128 if dtype is torch.float32 else 255)


@pytest.mark.gpu
def test_results_on_a_gpu_are_the_hosts() -> None:
    gate = IrMulGate(Gate(*GATES["both"]))
    linear = AcceleratedLinear(o3.Linear("70x0e+9x1o+3x2e", "33x0e+66x1o")).form
    for nodes in (5, 700):
        cases = [(gate, draw((nodes, gate.irreps_in.dim)))]
        cases.append((linear, draw((nodes, linear.dims["x"]), (linear.weight_numel,))))
        for run, given in cases:
            on_device = [one.detach().cuda().requires_grad_() for one in given]
            out = run(*on_device)
            g = torch.ones_like(out, requires_grad=True)
            first = torch.autograd.grad(out, on_device, g, create_graph=True)
            second = torch.autograd.grad(sum(one.square().sum() for one in first), (*on_device, g))
            of_host = run(*given)
            ones = torch.ones_like(of_host, requires_grad=True)
            wanted = torch.autograd.grad(of_host, given, ones, create_graph=True)
            then = torch.autograd.grad(sum(one.square().sum() for one in wanted), (*given, ones))
            for one, other in zip((out, *first, *second), (of_host, *wanted, *then), strict=True):
                torch.testing.assert_close(one.cpu(), other, rtol=1e-11, atol=1e-9)
