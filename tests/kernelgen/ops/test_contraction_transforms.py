"""Symmetric contractions under opcheck, compile, export, make_fx, function transforms and saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from contraction_cases import SMALL, assert_same, build_small, derivatives, operands, plain, some_elements
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from kernelgen.errors import UnsupportedError

NODES, ROWS = 5, 3
ELEMENTS = some_elements(NODES, ROWS)
Function = Callable[..., Tensor]


def inputs() -> list[Tensor]:
    given = operands(SMALL, NODES, ROWS)
    return [given["x"] / 3, given["w"] / 3]


def ours(x: Tensor, w: Tensor) -> Tensor:
    return build_small()(x, w, ELEMENTS)


def theirs(x: Tensor, w: Tensor) -> Tensor:
    return plain(SMALL, x, w, ELEMENTS)


def energy(function: Function) -> Function:
    """A number whose derivatives of every order differ from zero."""

    def total(*inputs: Tensor) -> Tensor:
        out = function(*inputs)
        return (out * torch.linspace(-1, 1, out.shape[-1])).sum(-1).exp().sum()

    return total


def assert_equal(found: object, wanted: object) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("outputs", ["x", "w", "xw"])
def test_ops_are_registered_as_torch_asks(outputs: str) -> None:
    text, given = build_small().text, operands(SMALL, NODES, ROWS)
    x, w, g = (given[name].requires_grad_() for name in "xwg")
    # Third derivatives do not exist, so those of the last op are not checked.
    torch.library.opcheck(torch.ops.equitune.sc_forward.default, (x, w, ELEMENTS, text))
    torch.library.opcheck(torch.ops.equitune.sc_backward.default, (x, w, g, ELEMENTS, outputs, text))
    last = [tensor.detach() for tensor in (x, w, g, given["tx"], given["tw"])]
    for tangents in (last[3:], [last[3], None], [None, last[4]]):
        arguments = (*last[:3], *tangents, ELEMENTS, outputs, text)
        torch.library.opcheck(torch.ops.equitune.sc_double_backward.default, arguments)


def force_step(x: Tensor, w: Tensor, elements: Tensor) -> tuple[Tensor, ...]:
    """Energy, forces and the gradient of a loss on both with respect to the weights."""
    value = build_small()(x, w, elements).square().sum()
    (forces,) = torch.autograd.grad(value, x, create_graph=True)
    (gradient,) = torch.autograd.grad(value + forces.square().sum(), w)
    return value.detach(), forces.detach(), gradient


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_any_number_of_nodes(backend: str) -> None:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    operator = build_small()
    compiled = torch.compile(lambda x, w, e: operator(x, w, e), backend=counter, fullgraph=True, dynamic=True)
    for nodes in (7, 12, 31):
        elements, given = some_elements(nodes, ROWS), operands(SMALL, nodes, ROWS)
        wanted = derivatives(lambda x, w, e=elements: plain(SMALL, x, w, e), given)
        if backend == "eager":
            assert_same(derivatives(lambda x, w, e=elements: compiled(x, w, e), given), wanted)
            continue
        # Torch's compiled backward passes cannot be differentiated again.
        x, w = (given[name].clone().requires_grad_() for name in "xw")
        out = compiled(x, w, elements)
        first = dict(zip("xw", torch.autograd.grad(out, (x, w), given["g"]), strict=True))
        assert_same({"out": out, **first}, {name: wanted[name] for name in ("out", "x", "w")})
    assert counter.frame_count == 1


def test_make_fx_of_a_force_step() -> None:
    x, w = (tensor.requires_grad_() for tensor in inputs())
    traced = make_fx(force_step, tracing_mode="symbolic")(x, w, ELEMENTS)
    called = {node.target.name() for node in traced.graph.nodes if hasattr(node.target, "name")}
    assert {f"equitune::sc_{name}" for name in ("forward", "backward", "double_backward")} <= called
    for nodes in (NODES, 9):
        given, elements = operands(SMALL, nodes, ROWS), some_elements(nodes, ROWS)
        arguments = (given["x"].requires_grad_(), given["w"].requires_grad_(), elements)
        assert_equal(traced(*arguments), force_step(*arguments))


def test_export() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.operator, self.weights = build_small(), torch.nn.Parameter(inputs()[1])

        def forward(self, x: Tensor, elements: Tensor) -> Tensor:
            return self.operator(x, self.weights, elements)

    model, x = Model(), inputs()[0]
    nodes = torch.export.Dim("nodes")
    program = torch.export.export(model, (x, ELEMENTS), dynamic_shapes=({0: nodes}, {0: nodes}))
    for count in (NODES, 11):
        arguments = (operands(SMALL, count, ROWS)["x"], some_elements(count, ROWS))
        assert torch.equal(program.module()(*arguments), model(*arguments))


def test_grad_and_grad_of_grad() -> None:
    def second(function: Function) -> Function:
        first = grad(energy(function), (0, 1))
        return grad(lambda *given: sum(part.square().sum() for part in first(*given)), (0, 1))

    assert_equal(grad(energy(ours), (0, 1))(*inputs()), grad(energy(theirs), (0, 1))(*inputs()))
    assert_equal(second(ours)(*inputs()), second(theirs)(*inputs()))


def test_jacobians_and_hessians_both_ways() -> None:
    wanted = jacrev(theirs, (0, 1))(*inputs())
    assert_equal(jacrev(ours, (0, 1))(*inputs()), wanted)
    assert_equal(jacfwd(ours, (0, 1))(*inputs()), wanted)
    wanted = hessian(energy(theirs), (0, 1))(*inputs())
    assert_equal(hessian(energy(ours), (0, 1))(*inputs()), wanted)  # forward over reverse
    assert_equal(jacrev(jacrev(energy(ours), (0, 1)), (0, 1))(*inputs()), wanted)


@pytest.mark.parametrize("place", [0, 1])
def test_a_tangent_of_one_input_alone(place: int) -> None:
    given = inputs()

    def along(function: Function) -> object:
        one = given[place]
        return jvp(lambda one: function(*given[:place], one, *given[place + 1 :]), (one,), (one + 1,))

    assert_equal(along(ours), along(theirs))
    assert_equal(along(grad(energy(ours), (0, 1))), along(grad(energy(theirs), (0, 1))))


@pytest.mark.parametrize("dims", [(0, None), (None, 1), (1, 0)])
def test_vmap(dims: tuple[int | None, int | None]) -> None:
    given = [t if dim is None else torch.stack([t, t * 2], dim) for t, dim in zip(inputs(), dims, strict=True)]
    items = [[t if dim is None else t.select(dim, i) for t, dim in zip(given, dims, strict=True)] for i in range(2)]
    assert_equal(vmap(ours, dims)(*given), torch.stack([theirs(*item) for item in items]))
    first = vmap(grad(energy(ours), (0, 1)), dims)(*given)
    wanted = [grad(energy(theirs), (0, 1))(*item) for item in items]
    assert_equal(first, tuple(torch.stack(parts) for parts in zip(*wanted, strict=True)))


def test_vmap_of_elements() -> None:
    elements = torch.stack([ELEMENTS, ELEMENTS.flip(0)])
    x, w = inputs()
    found = vmap(lambda e: build_small()(x, w, e))(elements)
    assert_equal(found, torch.stack([plain(SMALL, x, w, one) for one in elements]))


def test_batched_backward_passes() -> None:
    results = []
    for function in (ours, theirs):
        leaves = [tensor.requires_grad_() for tensor in inputs()]
        first = torch.autograd.grad(energy(function)(*leaves), leaves, create_graph=True)
        units = torch.eye(first[0].numel(), dtype=torch.float64).unflatten(1, first[0].shape)
        results.append(torch.autograd.grad(first[0], leaves, units, is_grads_batched=True))
    assert_equal(*results)


def test_third_derivatives_are_refused() -> None:
    def second(*given: Tensor) -> Tensor:
        return grad(lambda *again: grad(energy(ours))(*again).square().sum())(*given)

    for third in (
        grad(lambda *again: second(*again).sum()),
        lambda x, w: jvp(lambda one: second(one, w), (x,), (x,))[1],
    ):
        with pytest.raises(UnsupportedError, match="third derivatives of a symmetric contraction"):
            third(*inputs())
    assert ours(*inputs()).isfinite().all(), "the error leaves nothing behind"


def test_saved_tensors_may_be_moved_away() -> None:
    """As by ``torch.autograd.graph.save_on_cpu``: what comes back are other tensors."""
    given, wanted = operands(SMALL, NODES, ROWS), derivatives(theirs, operands(SMALL, NODES, ROWS))
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.numpy().copy(), torch.from_numpy):
        x, w, g = (given[name].clone().requires_grad_() for name in "xwg")
        out = ours(x, w)
    # In the hooks' scope autograd packs x, w and elements.
    assert len(packed) == 3
    found = torch.autograd.grad(out, (x, w), g)
    assert_same({"x": found[0], "w": found[1]}, {slot: wanted[slot] for slot in "xw"})


def test_checkpointing() -> None:
    given, wanted = operands(SMALL, NODES, ROWS), derivatives(theirs, operands(SMALL, NODES, ROWS))
    x, w, g = (given[name].clone().requires_grad_() for name in "xwg")
    out = torch.utils.checkpoint.checkpoint(ours, x, w, use_reentrant=False)
    found = torch.autograd.grad(out, (x, w), g)
    assert_same({"x": found[0], "w": found[1]}, {slot: wanted[slot] for slot in "xw"})
