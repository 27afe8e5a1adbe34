"""Products of tall matrices in half precision with float32's accuracy; on a CPU their kernels run lane by lane."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fixed_kernels import take_few_edges
from torch import Tensor

from kernelgen.compile.compiler import compile_source
from kernelgen.compile.gpu import nvrtc_version
from kernelgen.device import cuda_facts
from kernelgen.errors import InputError, ToolMissingError
from kernelgen.ops import tall_products
from kernelgen.ops.product import build
from kernelgen.ops.radial_convolution import radial_product
from kernelgen.ops.tall_products import edge_product, sum_product
from kernelgen.problem.product import PRODUCTS, TensorProductProblem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EDGES, HIDDEN, WEIGHTS = 200, 64, 160


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    take_few_edges(monkeypatch, request.param)
    monkeypatch.setattr(tall_products, "LEAST_RIGHT", 1)
    return request.param


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hostile(kind: str, depth: int, columns: int) -> tuple[Tensor, Tensor]:
    """Rows and matrix: of ordinary size, over many magnitudes, with zeros, with one huge row or element."""
    a, b = drawn(EDGES, depth), drawn(depth, columns, seed=1)
    if kind == "rows over e**24":
        a *= torch.linspace(-12, 12, EDGES).exp()[:, None]
    elif kind == "elements over e**24":
        a *= (24 * torch.rand(EDGES, depth, generator=torch.Generator().manual_seed(2)) - 12).exp()
    elif kind == "columns over e**24":
        b *= torch.linspace(-12, 12, columns).exp()
    elif kind == "zeros":
        a[::2] = 0
        a[1::4, ::3] = 0
        b[:, ::5] = 0
    elif kind == "a huge row":
        a[7] *= 1e30
        b *= 1e-3
    elif kind == "near the cutoff":
        a *= torch.linspace(0, 1, EDGES)[:, None] ** 5
    return a, b


KINDS = (
    "ordinary",
    "rows over e**24",
    "elements over e**24",
    "columns over e**24",
    "zeros",
    "a huge row",
    "near the cutoff",
)


def error(found: Tensor, a: Tensor, b: Tensor) -> float:
    """The largest error, relative to the sum of magnitudes as float32's own bound is; infinite where that is zero."""
    exact, bound = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    wrong = (found.cpu().double() - exact).abs()
    return float(torch.where(wrong == 0, 0, wrong / bound).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [(HIDDEN, WEIGHTS), (WEIGHTS, HIDDEN), (WEIGHTS, 136)], ids=["wide", "narrow", "of halves"]
)
def test_errors_are_of_float32s_class(shape: tuple[int, int], kind: str, device: str) -> None:
    a, b = hostile(kind, *shape)
    found = tall_products.product(a.to(device), b.to(device))
    assert error(found, a, b) < 4 * error(a @ b, a, b)
    # One product of halves, which this must not silently be.
    rough = error(a.half() @ b.half(), a, b) if kind == "ordinary" else None
    assert rough is None or rough > 200 * error(found, a, b)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "elements over e**24"])
def test_errors_of_sums_over_edges(kind: str, device: str) -> None:
    a, _ = hostile(kind, HIDDEN, 4)
    b = drawn(EDGES, WEIGHTS, seed=1)
    if kind == "a huge row":
        b[7, ::2] = 0  # what is summed there are the other rows
    found = tall_products.sums(a.to(device), b.to(device))
    assert error(found, a.t(), b) < 4 * error(a.t() @ b, a.t(), b)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "elements over e**24"])
def test_errors_of_one_product_are_of_tf32s_class(kind: str, device: str) -> None:
    """Far above float32's on ordinary numbers, so that one product is seen to be what runs."""
    for shape in ((HIDDEN, WEIGHTS), (WEIGHTS, HIDDEN), (WEIGHTS, 136)):
        a, b = hostile(kind, *shape)
        found = error(tall_products.product(a.to(device), b.to(device), "tf32"), a, b)
        assert found < 2e-3 and (kind != "ordinary" or found > 1e-5)
    a, b = hostile(kind, HIDDEN, 4)[0], drawn(EDGES, WEIGHTS, seed=1)
    if kind != "a huge row":
        found = error(tall_products.sums(a.to(device), b.to(device), "tf32"), a.t(), b)
        assert found < 2e-3 and (kind != "ordinary" or found > 1e-5)


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [
        (130, 8, 20),
        (1, 64, 48),
        (37, 100, 256),
        (129, 128, 4),
        (65, 300, 128),
        (70, 132, 8),
        (33, 4, 4),
        (41, 1040, 136),
    ],
)
def test_sizes_that_are_no_multiples(rows: int, depth: int, columns: int, device: str) -> None:
    a, b = drawn(rows, depth), drawn(columns, depth, seed=1).t()
    around = drawn(rows, depth + 8)
    around[:, 4:-4] = a
    for given in (a, around[:, 4:-4]):
        found = tall_products.product(given.to(device), b.to(device))
        assert found.shape == (rows, columns) and error(found, a, b) < 4 * error(a @ b, a, b) + 3e-7
    other = drawn(rows, columns, seed=2)
    found = tall_products.sums(a.to(device), other.to(device))
    assert error(found, a.t(), other) < 4 * error(a.t() @ other, a.t(), other) + 3e-7
    assert torch.equal(found, tall_products.sums(a.to(device), other.to(device)))


def test_what_is_not_finite_stays_so(device: str) -> None:
    a, b = hostile("ordinary", HIDDEN, WEIGHTS)
    a[3, 5], a[4, 1] = float("inf"), float("nan")
    found = tall_products.product(a.to(device), b.to(device))
    assert not found[3:5].isfinite().any() and found[5:].isfinite().all() and found[:3].isfinite().all()
    assert not tall_products.sums(a.to(device), found.nan_to_num(1.0)).isfinite()[[1, 5]].any()


def derivatives(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> list[Tensor]:
    """The product, its gradients, theirs, and theirs again."""
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    found = [multiply(a, b)]
    for _ in range(3):
        (loss,) = (sum(one.sin().sum() for one in found[-2:]),)
        found += torch.autograd.grad(loss, (a, b), create_graph=True)
    return [one.detach().cpu().double() for one in found]


def test_any_number_of_derivatives(device: str, launches: list[str]) -> None:
    a, b, other = (drawn(*shape, seed=seed) / 4 for seed, shape in enumerate(((40, 16), (16, 36), (40, 36))))
    for ours, plain, right in ((edge_product, torch.mm, b), (sum_product, lambda a, b: a.t() @ b, other)):
        launches.clear()
        wanted = derivatives(plain, a.double(), right.double())
        found = derivatives(ours, a.to(device), right.to(device))
        assert {"tall_sums", "tall_to_wide"} < set(launches)
        for one, single, exact in zip(found, derivatives(plain, a, right), wanted, strict=True):
            errors = [float((given - exact).abs().max() / exact.abs().max()) for given in (one, single)]
            assert errors[0] < 4 * errors[1] + 1e-6, errors


def test_gradients_of_a_product_of_halves(device: str, launches: list[str]) -> None:
    a, b = drawn(40, 136), drawn(136, 160, seed=1)
    wanted, single = (derivatives(torch.mm, a.to(dtype), b.to(dtype)) for dtype in (torch.float64, torch.float32))
    found = derivatives(edge_product, a.to(device), b.to(device))
    assert launches.count("tall_halves") > 4
    for one, other, exact in zip(found, single, wanted, strict=True):
        errors = [float((given - exact).abs().max() / exact.abs().max()) for given in (one, other)]
        assert errors[0] < 4 * errors[1] + 1e-6, errors


def test_a_device_that_adds_halves_up_roughly_is_not_asked(
    device: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one that leaves a part out; torch's own product is taken."""
    a, b = drawn(40, 136), drawn(136, 160, seed=1)
    multiply = tall_products.multiply_halves

    def rough(out: Tensor, a: Tensor, b: Tensor, *, keep: bool) -> None:
        multiply(out, a, b, keep=keep)
        out.copy_(out.bfloat16())

    def without_the_rest(out: Tensor, a: Tensor, b: Tensor, *, keep: bool) -> None:
        if keep:
            multiply(out, a, b, keep=keep)

    for broken in (rough, without_the_rest):
        monkeypatch.setattr(tall_products, "_LOST", {})
        monkeypatch.setattr(tall_products, "multiply_halves", broken)
        assert torch.equal(edge_product(a.to(device), b.to(device)), a.to(device) @ b.to(device))
        launches.clear()
        edge_product(a.to(device), b.to(device))
        assert not launches, "and the trial is not repeated"


def test_what_sums_of_halves_lose_is_given_back(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores cut off toward zero; here all sums lose so much more that nothing else is seen."""
    multiply, by_element = tall_products.multiply_halves, 4e-9

    def cutting(out: Tensor, a: Tensor, b: Tensor, *, keep: bool) -> None:
        part = torch.empty_like(out)
        multiply(part, a, b, keep=False)
        part *= 1 - by_element * a.shape[1]
        out.copy_(out + part if keep else part)

    monkeypatch.setattr(tall_products, "_LOST", {})
    monkeypatch.setattr(tall_products, "multiply_halves", cutting)
    for depth in (136, 512, 1040):
        a, b = drawn(400, depth), drawn(depth, 160, seed=1)
        exact = a.double() @ b.double()
        found = edge_product(a.to(device), b.to(device)).cpu().double()
        lost = 1 - float((found * exact).sum() / exact.square().sum())
        assert abs(lost) < 0.1 * by_element * min(depth, 512), depth


def test_gradients_that_nobody_asks_for_are_not_computed(device: str, launches: list[str]) -> None:
    a, b = drawn(40, 16).to(device).requires_grad_(), drawn(16, 36, seed=1).to(device).requires_grad_()
    out = edge_product(a, 2 * b).square().sum()
    launches.clear()
    torch.autograd.grad(out, a, retain_graph=True)
    assert "tall_sums" not in launches
    torch.autograd.grad(out, b)
    assert "tall_sums" in launches


def test_sums_of_many_columns_on_the_left(device: str, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tall_products, "LEAST_RIGHT", 36)
    a, b = drawn(EDGES, 36), drawn(EDGES, 16, seed=1)
    found = sum_product(a.to(device), b.to(device))
    assert launches == ["tall_sums"] and error(found, a.t(), b) < 4 * error(a.t() @ b, a.t(), b)


def test_only_what_gradients_need_is_kept(device: str) -> None:
    a, b = drawn(40, 16).to(device), drawn(16, 36, seed=1).to(device)
    for multiply, right in ((edge_product, b), (sum_product, drawn(40, 36).to(device))):
        for needs_a, needs_b in ((True, False), (False, True), (True, True)):
            left, other = a.clone().requires_grad_(needs_a), right.clone().requires_grad_(needs_b)
            found = multiply(left, other)  # held: torch 2.11 frees what was saved together with the product
            assert [one is not None for one in found.grad_fn.saved_tensors] == [needs_b, needs_a]


def test_what_torch_multiplies(device: str, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def is_ours(a: Tensor, b: Tensor) -> bool:
        launches.clear()
        found = edge_product(a.to(device), b.to(device))
        torch.testing.assert_close(found.cpu(), a @ b, rtol=1e-5, atol=1e-5)
        return bool(launches)

    assert is_ours(drawn(40, 16), drawn(16, 36)) and is_ours(drawn(40, 132), drawn(132, 36))
    assert not is_ours(drawn(40, 16).double(), drawn(16, 36).double())
    assert not is_ours(drawn(40, 15), drawn(15, 36)) and not is_ours(drawn(40, 16), drawn(16, 35))
    assert not is_ours(drawn(40, 132), drawn(132, 132)) and is_ours(drawn(40, 136), drawn(136, 160))
    assert not is_ours(drawn(0, 16), drawn(16, 36))
    assert not is_ours(drawn(40, 0), drawn(0, 36)) and not is_ours(drawn(40, 16), drawn(16, 0))
    compiled = torch.compile(edge_product, backend="eager", fullgraph=True)
    launches.clear()
    compiled(drawn(40, 16).to(device), drawn(16, 36).to(device))
    torch.func.vmap(edge_product)(drawn(3, 40, 16).to(device), drawn(3, 16, 36).to(device))
    assert not [name for name in launches if name.startswith("tall")]
    monkeypatch.setattr(tall_products, "LEAST_ROWS", 41)
    assert not is_ours(drawn(40, 16), drawn(16, 36)) and is_ours(drawn(41, 16), drawn(16, 36))


@pytest.mark.slow
def test_kernels_compile_without_large_spills() -> None:
    try:
        nvrtc_version()
    except ToolMissingError as error:
        pytest.skip(str(error))
    kernels = [tall_products.packing(True), tall_products.packing(False)]
    for accuracy in PRODUCTS:
        kernels += [tall_products.summing(accuracy), tall_products.halving(accuracy), tall_products.SCALING]
        kernels += [tall_products.wide(steps, accuracy) for steps in (1, 2, 4, 5, 8)]
        kernels += [tall_products.narrow(tiles, accuracy) for tiles in (2, 8, 10, 16)]
    for arch in ("sm_80", "sm_90", "sm_120"):
        for kernel in kernels:
            resources = compile_source(kernel.source, cuda_facts(arch)).resources
            assert resources["spill_bytes"] <= 256, (arch, kernel.source.entry, resources)
            assert resources["shared_bytes"] <= 48 * 1024


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


@pytest.mark.slow
@pytest.mark.parametrize("most", [EDGES, 30])
def test_all_derivatives_of_the_convolution(most: int, device: str, launches: list[str]) -> None:
    wanted = gradients("float32", EDGES, torch.float64)
    plain = gradients("float32", most, torch.float32, device)
    assert not [name for name in launches if name.startswith("tall")]
    found = gradients("fp16x3", most, torch.float32, device)
    assert "tall_sums" in launches and "tall_to_wide" in launches
    rounded = gradients("tf32", most, torch.float32, device)
    for one, other, third, exact in zip(found, plain, rounded, wanted, strict=True):
        errors = [float((given - exact).abs().max() / exact.abs().max()) for given in (one, other, third)]
        assert errors[0] < 3e-6 and errors[0] < 8 * errors[1] + 2e-7, errors
        # Each derivative on its own: one that silently took another product would be far below.
        assert 1e-5 < errors[2] < 5e-3, errors


def test_float64_and_other_words() -> None:
    same = zip(*(gradients(product, 30, torch.float64) for product in ("fp16x3", "float32")), strict=True)
    assert all(torch.equal(one, other) for one, other in same)
    with pytest.raises(InputError, match="product is 'half'; expected one of fp16x3, float32"):
        gradients("half", 30, torch.float64)
