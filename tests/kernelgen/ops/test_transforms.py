"""Function transforms on the modules: ``torch.func``, forward mode and batched backward passes, against e3nn."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from e3nn import o3
from e3nn.o3 import _spherical_harmonics as harmonics_module
from reference import e3nn_product, float64
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import autotune
from kernelgen.compat import COMPILES_VMAP, constant_result, run_eagerly
from kernelgen.errors import InputError, UnsupportedError

ROWS, NODES, EDGES = 3, 4, 6
PATHS = [(0, 0, 0, "uvu", True), (1, 0, 1, "uvu", True), (1, 1, 0, "uvw", True)]
IRREPS = ("2x0e+3x1o", "0e+1o", "2x0e+3x1o")
Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def polynomials_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """e3nn 0.4 has its harmonics compiled by TorchScript: as a reference they are of no use under transforms.

    There the gradient of a gradient by ``torch.func`` differs from eager autograd's through the same code (by 1e4 in
    these tests, where Equitune's does not), and batched backward passes fail.
    """
    scripted = harmonics_module._spherical_harmonics
    if isinstance(scripted, torch.jit.ScriptFunction):
        monkeypatch.setattr(harmonics_module, "_spherical_harmonics", scripted._torchdynamo_inline)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def plain(shared: bool) -> tuple[Function, Function, list[Tensor]]:
    """Ours, e3nn's, and inputs of both."""
    with float64():
        ours = autotune.TensorProduct(*IRREPS, PATHS, shared_weights=shared, internal_weights=False)
        theirs = o3.TensorProduct(*IRREPS, PATHS, shared_weights=shared, internal_weights=False)
    weights = (ours.weight_numel,) if shared else (ROWS, ours.weight_numel)
    return ours, theirs, [normal(ROWS, 11), normal(ROWS, 4), normal(*weights)]


def convolution() -> tuple[Function, Function, list[Tensor]]:
    """A convolution and the same of e3nn's product and torch's sum; sender and receiver are no inputs."""
    with float64():
        ours = autotune.TensorProductConv("2x0e+2x1o", "0e+1o", filter_irreps_out="0e+1o")
        product = e3nn_product(ours.problem)
    sender, receiver = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([2, 0, 1, 2, 2, 0])

    def theirs(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return x.new_zeros(NODES, product.irreps_out.dim).index_add(0, receiver, product(x[sender], y, w))

    inputs = [normal(NODES, 8), normal(EDGES, 4), normal(EDGES, ours.weight_numel)]
    return lambda *xyw: ours(*xyw, sender, receiver), theirs, inputs


def harmonics() -> tuple[Function, Function, list[Tensor]]:
    arguments = ([0, 1, 2, 3], True, "component")
    return autotune.SphericalHarmonics(*arguments), o3.SphericalHarmonics(*arguments), [normal(ROWS, 3)]


CASES = {"own weights": lambda: plain(False), "shared": lambda: plain(True), "conv": convolution, "sh": harmonics}
case = pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())


def energy(function: Function) -> Function:
    """A number whose derivatives of every order differ from zero."""

    def total(*inputs: Tensor) -> Tensor:
        out = function(*inputs)
        return (out * torch.linspace(-1, 1, out.shape[-1])).sum(-1).exp().sum()

    return total


def assert_same(found: object, wanted: object) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def scaled(inputs: list[Tensor]) -> list[Tensor]:
    """Small enough for exponentials to stay near one."""
    return [tensor / 3 for tensor in inputs]


@case
def test_grad_and_grad_of_grad(make: Callable) -> None:
    ours, theirs, inputs = make()
    every = tuple(range(len(inputs)))

    def second(function: Function) -> Function:
        first = grad(energy(function), every)
        return grad(lambda *inputs: sum(part.square().sum() for part in first(*inputs)), every)

    assert_same(grad(energy(ours), every)(*scaled(inputs)), grad(energy(theirs), every)(*scaled(inputs)))
    assert_same(second(ours)(*scaled(inputs)), second(theirs)(*scaled(inputs)))


@case
def test_jacobians_both_ways(make: Callable) -> None:
    ours, theirs, inputs = make()
    every = tuple(range(len(inputs)))
    wanted = jacrev(theirs, every)(*inputs)
    assert_same(jacrev(ours, every)(*inputs), wanted)
    assert_same(jacfwd(ours, every)(*inputs), wanted)


@case
def test_hessians_forward_over_reverse_and_reverse_over_reverse(make: Callable) -> None:
    ours, theirs, inputs = make()
    every = tuple(range(len(inputs)))
    inputs = scaled(inputs)
    wanted = hessian(energy(theirs), every)(*inputs)
    assert_same(hessian(energy(ours), every)(*inputs), wanted)
    assert_same(jacrev(jacrev(energy(ours), every), every)(*inputs), wanted)


@case
def test_a_tangent_of_one_input_alone(make: Callable) -> None:
    ours, theirs, inputs = make()
    for place, tensor in enumerate(inputs):
        found, wanted = (
            jvp(lambda one, f=f, at=place: f(*inputs[:at], one, *inputs[at + 1 :]), (tensor,), (tensor.flip(0),))
            for f in (ours, theirs)
        )
        assert_same(found, wanted)


@case
def test_vmap_over_any_dimension_of_any_inputs(make: Callable) -> None:
    ours, theirs, inputs = make()
    items = 2
    for mapped in range(1, 2 ** len(inputs)):
        dims = tuple(min(at, 1) if mapped >> at & 1 else None for at in range(len(inputs)))
        given = [
            t if dim is None else torch.stack([t * (i + 1) for i in range(items)], dim)
            for t, dim in zip(inputs, dims, strict=True)
        ]
        picked = [[t if d is None else t.select(d, i) for t, d in zip(given, dims, strict=True)] for i in range(items)]
        assert_same(vmap(ours, dims)(*given), torch.stack([theirs(*item) for item in picked]))
        first = vmap(grad(energy(ours)), dims)(*scaled(given))
        assert_same(first, torch.stack([grad(energy(theirs))(*scaled(item)) for item in picked]))


def test_vmap_calls_the_kernel_once_where_rows_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, inputs = plain(False)
    ours(*inputs)
    calls: list[int] = []
    run = ours._operator.run
    monkeypatch.setattr(ours._operator, "run", lambda *a, **k: calls.append(len(a[1][0])) or run(*a, **k))
    vmap(vmap(ours, (0, None, None)))(normal(2, 5, ROWS, 11), normal(2, ROWS, 4), inputs[2].expand(2, -1, -1))
    assert calls == [2 * 5 * ROWS]


def test_no_items_and_no_rows() -> None:
    ours, _, (x, y, w) = plain(False)
    assert vmap(ours)(x[None][:0], y[None][:0], w[None][:0]).shape == (0, ROWS, 11)
    assert vmap(ours, (0, None, None))(x.new_zeros(2, 0, 11), y[:0], w[:0]).shape == (2, 0, 11)
    shared, _, (x, y, w) = plain(True)
    with pytest.raises(UnsupportedError, match="no items"):
        vmap(shared, (None, None, 0))(x, y, w[None][:0])


def test_vmap_of_graphs() -> None:
    with float64():
        conv = autotune.TensorProductConv("2x0e+2x1o", "0e+1o", filter_irreps_out="0e+1o")
    given = [normal(2, NODES, 8), normal(2, EDGES, 4), normal(2, EDGES, conv.weight_numel)]
    sender = torch.tensor([[0, 1, 2, 3, 0, 1], [3, 3, 2, 1, 0, 0]])
    receiver = torch.tensor([[2, 0, 1, 2, 2, 0], [1, 0, 0, 3, 2, 2]])
    wanted = torch.stack([conv(*item) for item in zip(*given, sender, receiver, strict=True)])
    assert_same(vmap(conv)(*given, sender, receiver), wanted)


def test_gradients_of_each_sample_with_respect_to_parameters() -> None:
    with float64():
        torch.manual_seed(0)
        ours = autotune.FullyConnectedTensorProduct("2x0e+3x1o", "2x0e+1o", "2x0e+1o")
        theirs = o3.FullyConnectedTensorProduct("2x0e+3x1o", "2x0e+1o", "2x0e+1o")
        parameters = {"weight": theirs.weight.detach()}

        def of_each(module: torch.nn.Module) -> Function:
            loss = grad(lambda p, x, y: functional_call(module, p, (x, y)).square().sum())
            return vmap(loss, (None, 0, 0))

        x, y = normal(ROWS, 11), normal(ROWS, 5)
        assert_same(of_each(ours)(parameters, x, y), of_each(theirs)(parameters, x, y))
        ensemble = {"weight": normal(4, ours.weight_numel)}
        found, wanted = (vmap(lambda p, m=m: functional_call(m, p, (x, y)))(ensemble) for m in (ours, theirs))
        assert_same(found, wanted)


@case
def test_hessians_by_batched_backward_passes(make: Callable) -> None:
    """As interatomic potentials take them: of eager first gradients, batched by autograd or by vmap."""
    ours, theirs, inputs = make()
    results = []
    for function in (ours, theirs):
        leaves = [tensor.clone().requires_grad_() for tensor in scaled(inputs)]
        first = torch.autograd.grad(energy(function)(*leaves), leaves, create_graph=True)
        at = 1 if len(leaves) > 1 else 0  # of edge vectors, as forces are
        units = torch.eye(first[at].numel(), dtype=torch.float64).unflatten(1, first[at].shape)
        batched = torch.autograd.grad(first[at], leaves, units, is_grads_batched=True, retain_graph=True)
        mapped = vmap(lambda u, of=first[at], to=leaves: torch.autograd.grad(of, to, u, retain_graph=True))(units)
        assert_same(batched, mapped)
        vectorized = torch.autograd.functional.jacobian(function, tuple(leaves), vectorize=True)
        ahead = torch.autograd.functional.jacobian(function, tuple(leaves), vectorize=True, strategy="forward-mode")
        results.append((batched, vectorized, ahead))
    assert_same(*results)


@case
def test_forward_mode_of_eager_tensors(make: Callable) -> None:
    ours, theirs, inputs = make()
    results = []
    for function in (ours, theirs):
        with forward_ad.dual_level():
            dual = [forward_ad.make_dual(tensor, tensor.flip(0)) for tensor in inputs]
            results.append(tuple(forward_ad.unpack_dual(function(*dual))))
    assert results[0][1] is not None
    assert_same(*results)


@case
def test_third_derivatives_are_refused(make: Callable) -> None:
    ours, _, inputs = make()

    def second(*inputs: Tensor) -> Tensor:
        return grad(lambda *again: grad(energy(ours))(*again).square().sum())(*inputs)

    def third_forward(*inputs: Tensor) -> Tensor:
        return jvp(lambda one: second(one, *inputs[1:]), inputs[:1], inputs[:1])[1]

    for third in (grad(lambda *again: second(*again).sum()), third_forward):
        with pytest.raises(UnsupportedError, match="third derivatives"):
            third(*scaled(inputs))
    assert ours(*inputs).isfinite().all(), "the error leaves nothing behind"


def test_what_does_not_fit_is_told_under_vmap() -> None:
    ours, _, (x, y, w) = plain(False)
    with pytest.raises(InputError, match="a row an edge"):
        vmap(ours)(x, y, w)
    with pytest.raises(InputError, match="x has shape"):
        vmap(ours, (0, None, None))(x[None, :, 1:], y, w)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("nested", [False, True], ids=["one level", "nested"])
def test_compiled_vmap_of_graphs(nested: bool, backend: str) -> None:
    """Items take a call each; a compiled graph reaches the rule of the op itself, not that of its function."""
    with float64():
        conv = autotune.TensorProductConv("2x0e+2x1o", "0e+1o", filter_irreps_out="0e+1o")
    given = [normal(2, NODES, 8), normal(2, EDGES, 4), normal(2, EDGES, conv.weight_numel)]
    sender = torch.tensor([[0, 1, 2, 3, 0, 1], [3, 3, 2, 1, 0, 0]])
    graph = (sender, sender.flip(0, 1))
    function = vmap(vmap(conv, (0, None, None, 0, 0)), (None, 0, 0, None, None)) if nested else vmap(conv)
    torch.compiler.reset()
    results = []
    for one in (torch.compile(function, backend=backend), function):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        out = one(*leaves, *graph)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert_same(*results)


def test_compile_takes_vmap_and_leaves_other_transforms_to_eager_mode() -> None:
    ours, _, (v,) = harmonics()
    wanted = ours(v)
    torch.compiler.reset()
    assert_same(torch.compile(lambda v: vmap(ours)(v), backend="aot_eager", fullgraph=COMPILES_VMAP)(v), wanted)
    shows_reasons = "reason" in inspect.signature(torch.compiler.disable).parameters
    forward_mode, reverse = (lambda v: jvp(ours, (v,), (v + 1,))), grad(energy(ours))
    for function in (forward_mode, reverse):
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match="does not trace Equitune's kernels" if shows_reasons else None
        ):
            torch.compile(function, backend="aot_eager", fullgraph=True)(v)
        torch.compiler.reset()
        assert_same(torch.compile(function, backend="aot_eager")(v), function(v))


def test_functions_are_marked_for_the_compiler_as_torch_marks_them() -> None:
    def function() -> None: ...

    ours, torchs = run_eagerly("why")(function), torch.compiler.disable(function)
    assert ours._torchdynamo_disable_msg == "why" and vars(torchs)["_torchdynamo_disable"] is ours._torchdynamo_disable
    assert vars(constant_result(lambda: 0)) == vars(torch.compiler.assume_constant_result(lambda: 0))
