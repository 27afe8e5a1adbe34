"""An operator as a torch op: second derivatives, torch's own op checks, compile and export."""

from __future__ import annotations

import itertools

import pytest
import reference
import torch
from operator_cases import (
    SCHEDULES,
    assert_same,
    case,
    differentiated,
    leaves,
    operator,
    problem,
    wanted,
)

from kernelgen.arithmetic.directions import double_backward
from kernelgen.ops.product import Operator, build
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime.graph import edge_order


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("operation", "schedule"), [("conv", "default"), ("conv", "atomics"), ("conv", "unfused"), ("plain", "default")]
)
def test_agrees_with_e3nn_through_autograd(operation: str, schedule: str, shared: bool) -> None:
    given = case(operation, shared)
    assert_same(differentiated(operator(schedule, operation, shared), given), wanted(given))


def test_a_product_of_vectors_has_the_sign_of_the_cross_product() -> None:
    """Written out, without any table of couplings. e3nn orders a vector's components y, z, x: the sign stays."""
    op = build(TensorProductProblem.channelwise("1x1o", "1o", "1e"), operation="plain", dtype=torch.float64)
    x, y, w = torch.randn(5, 3).double(), torch.randn(5, 3).double(), torch.randn(5, 1).double()
    torch.testing.assert_close(op(x, y, w), w * torch.linalg.cross(x, y) / 2**0.5, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_int32_indices(schedule: str) -> None:
    given = case()
    assert_same(differentiated(operator(schedule), given, torch.int32), wanted(given))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bare_calls_overwrite_poisoned_outputs(schedule: str) -> None:
    given, op = case(), operator(schedule)
    t, graph = given.tensors, (given.sender, given.receiver, given.num_out)
    found = {"out": reference.run_direct(op, "forward", t, *graph, poison=True)["g"]}
    found |= reference.run_direct(op, "backward", t, *graph, poison=True)
    second = reference.run_direct(op, "double_backward", t, *graph, poison=True)
    assert_same(found | {"2" + name: grad for name, grad in second.items()}, wanted(given))


def subsets(slots: str) -> list[str]:
    return ["".join(c) for n in range(1, len(slots) + 1) for c in itertools.combinations(slots, n)]


@pytest.mark.parametrize("needed", subsets("xyw"))
def test_only_needed_gradients_are_asked_for(needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions contain exactly the gradients that the pass uses, in first and second derivatives."""
    given, op = case(), operator()
    asked: list[str] = []
    run_on = Operator.run_on

    def spy(self: Operator, graph, direction, *arguments):  # type: ignore[no-untyped-def]
        asked.append(direction.text)
        return run_on(self, graph, direction, *arguments)

    monkeypatch.setattr("kernelgen.ops.autograd._SMALL_WEIGHTS", 0)  # small graphs do not ask about leaves
    monkeypatch.setattr(Operator, "run_on", spy)
    by_name = {name: given.tensors[name].clone().requires_grad_(name in needed) for name in "xyw"}
    out = op(*by_name.values(), given.sender, given.receiver, num_out=given.num_out)
    first = torch.autograd.grad(out.square().sum(), by_name[needed[0]], create_graph=True)[0]
    name = {"x": "source_backward", "y": "edge_backward", "w": "backward"}
    assert asked == ["forward:->g", f"{name[needed[0]]}:->{needed[0]}"]
    torch.autograd.grad((first * given.tensors["t" + needed[0]]).sum(), by_name[needed[-1]])
    # The cotangent 2 * out depends on the inputs too: its gradient g is needed, then one more backward. A single
    # tangent is a forward product; where gradients of w are wanted, and for that of y, it waits for the backward of the
    # value and joins it.
    if needed[-1] == needed[0]:
        assert asked[2:] == ["forward:->g", f"{name[needed[-1]]}:->{needed[-1]}"]
    elif needed[0] == "y" or needed[-1] == "w":
        assert asked[2:] == ["forward:->g", f"joint_backward:{needed[0]}g->{needed[-1]}"]
    else:
        assert asked[2:] == [f"double_backward:{needed[0]}->{needed[-1]}g", f"{name[needed[-1]]}:->{needed[-1]}"]


def force_loss(value: torch.Tensor, forces: list[torch.Tensor], given: reference.Case) -> torch.Tensor:
    cotangents = [given.tensors["ty"], *(given.tensors["ty"].flip(0) for _ in forces[1:])]
    return (value * given.tensors["tg"]).sum() + sum((f * t).sum() for f, t in zip(forces, cotangents, strict=True))


@pytest.mark.parametrize("operation", ["conv", "plain"])
@pytest.mark.parametrize("wanted", subsets("xyw"))
def test_a_loss_on_value_and_edge_gradient_takes_one_joint_kernel(
    operation: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, op = case(operation), operator(operation=operation)
    asked: list[str] = []
    run_on = Operator.run_on

    def spy(self: Operator, graph, direction, *arguments):  # type: ignore[no-untyped-def]
        asked.append(direction.text)
        return run_on(self, graph, direction, *arguments)

    def gradients(product) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
        inputs = dict(zip("xyw", leaves(given), strict=True))
        out = product(*inputs.values())
        forces = [torch.autograd.grad(out, inputs["y"], given.tensors["g"], create_graph=True)[0]]
        return list(torch.autograd.grad(force_loss(out, forces, given), [inputs[name] for name in wanted]))

    expected = gradients(lambda x, y, w: reference.forward(given, x, y, w))
    monkeypatch.setattr("kernelgen.ops.autograd._SMALL_WEIGHTS", 0)  # small graphs do not ask about leaves
    monkeypatch.setattr(Operator, "run_on", spy)
    where = (given.sender, given.receiver) if operation == "conv" else ()
    found = gradients(lambda x, y, w: op(x, y, w, *where, num_out=given.num_out))
    last = "edge_backward:->y" if wanted == "y" else f"joint_backward:yg->{wanted}"
    assert asked == ["forward:->g", "edge_backward:->y", last]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("operation", ["conv", "plain"])
@pytest.mark.parametrize("along", subsets("xyw"))
def test_gradients_of_weights_are_written_once(along: str, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training a model: first gradients by several inputs are differentiated, and the value too."""
    given, op = case(operation), operator(operation=operation)
    asked: list[str] = []
    run_on = Operator.run_on

    def spy(self: Operator, graph, direction, *arguments):  # type: ignore[no-untyped-def]
        asked.append(direction.text)
        return run_on(self, graph, direction, *arguments)

    def gradients(product) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
        inputs = dict(zip("xyw", leaves(given), strict=True))
        out = product(*inputs.values())
        first = torch.autograd.grad(out.square().sum(), [inputs[slot] for slot in along], create_graph=True)
        loss = (out * given.tensors["tg"]).sum()
        loss = loss + sum((one * given.tensors["t" + slot]).sum() for slot, one in zip(along, first, strict=True))
        return list(torch.autograd.grad(loss, list(inputs.values())))

    expected = gradients(lambda x, y, w: reference.forward(given, x, y, w))
    monkeypatch.setattr(Operator, "run_on", spy)
    where = (given.sender, given.receiver) if operation == "conv" else ()
    found = gradients(lambda x, y, w: op(x, y, w, *where, num_out=given.num_out))
    of_w = [text for text in asked[2:] if "w" in text.partition("->")[2]]
    if along == "w":  # the tangent of w has no part in the gradient of w
        assert of_w == ["backward:->xyw"]
    else:
        assert of_w == [f"joint_backward:{along}g->xyw"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_joint_gradients_survive_repeated_partial_and_failed_passes() -> None:
    """Two edge gradients of one value, passes that leave the value's node out, and passes run twice."""
    given, op = case(), operator()

    def prepared(product) -> tuple:  # type: ignore[no-untyped-def]
        inputs = leaves(given)
        out = product(*inputs)
        cotangents = (given.tensors["g"], given.tensors["g"].flip(0))
        forces = [torch.autograd.grad(out, inputs[1], g, create_graph=True)[0] for g in cotangents]
        return inputs, out, forces

    graph = (given.sender, given.receiver)
    ours = prepared(lambda x, y, w: op(x, y, w, *graph, num_out=given.num_out))
    e3nn = prepared(lambda x, y, w: reference.forward(given, x, y, w))
    # A pass that ends at the value: its node never runs, so nothing may be left with it.
    assert torch.autograd.grad(ours[2][0].sum(), ours[1], retain_graph=True, allow_unused=True) == (None,)
    for attempt in range(2):
        found, wanted = (
            torch.autograd.grad(force_loss(out, forces, given), inputs, retain_graph=True)
            for inputs, out, forces in (ours, e3nn)
        )
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11, msg=f"pass {attempt}")
    alone = [torch.autograd.grad(forces[1].square().sum(), inputs[0])[0] for inputs, _, forces in (ours, e3nn)]
    torch.testing.assert_close(*alone, rtol=0, atol=1e-11)


def test_second_gradients_without_some_tangents_and_outputs() -> None:
    given, op = case(), operator()
    everything = differentiated(op, given)
    t, graph = given.tensors, (given.sender, given.receiver, given.num_out)
    total = {name: torch.zeros_like(t[name]) for name in "xywg"}
    for tangent in "xyw":
        parts = {}
        for outputs in ("xw", "yg"):
            parts |= reference.run_direct(op, double_backward(tangent, outputs), t, *graph)
        assert not parts[tangent].any(), "the form is linear in each operand"
        for name in "xywg":
            total[name] += parts[name]
    assert_same({"2" + name: total[name] for name in "xywg"}, {"2" + name: everything["2" + name] for name in "xywg"})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradcheck(schedule: str) -> None:
    given, op = case(edges=3), operator(schedule)

    def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return op(x, y, w, given.sender, given.receiver, num_out=given.num_out)

    # Fast mode compares random projections of the Jacobians; the default schedule is checked entry by entry.
    fast = schedule != "default"
    assert torch.autograd.gradcheck(function, leaves(given), fast_mode=fast)
    assert torch.autograd.gradgradcheck(function, leaves(given), fast_mode=fast)


@pytest.mark.parametrize("operation", ["conv", "plain"])
def test_opcheck(operation: str) -> None:
    given, op = case(operation), operator(operation=operation)
    x, y, w = leaves(given)
    g = given.tensors["g"].clone().requires_grad_()
    graph = (*[None] * 6, given.num_out)
    if given.sender is not None and given.receiver is not None:
        order = edge_order(given.receiver, given.num_out, sender=given.sender, num_in=len(x))
        graph = (given.sender, given.receiver, *order, given.num_out)
    tx, ty, tw = (given.tensors["t" + name] for name in "xyw")
    ops = torch.ops.equitune
    torch.library.opcheck(ops.tp_forward, (x, y, w, *graph, op.text))
    torch.library.opcheck(ops.tp_backward, (x, y, w, g, *graph, "xyw", op.text))
    torch.library.opcheck(ops.tp_backward, (x, y, w, g, *graph, "y", op.text))
    constants = [tensor.detach() for tensor in (x, y, w, g)]
    torch.library.opcheck(ops.tp_double_backward, (*constants, tx, ty, tw, *graph, "xywg", op.text))
    torch.library.opcheck(ops.tp_double_backward, (*constants, None, ty, None, *graph, "xg", op.text))


@pytest.mark.slow
def test_compiles_as_one_graph_with_both_derivatives() -> None:
    given, op = case(), operator()

    def energy_and_force(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = op(x, y, w, given.sender, given.receiver, num_out=given.num_out)
        return out, out.square().sum()

    plain, compiled = [], []
    for function, results in ((energy_and_force, plain), (torch.compile(energy_and_force, fullgraph=True), compiled)):
        inputs = leaves(given)
        out, total = function(*inputs)
        results += [out, *torch.autograd.grad(total, inputs)]
    for one, other in zip(plain, compiled, strict=True):
        assert torch.equal(one, other)


def test_exports_with_sizes_left_open() -> None:
    class Convolution(torch.nn.Module):
        def forward(self, x, y, w, sender, receiver):  # type: ignore[no-untyped-def]
            return operator()(x, y, w, sender, receiver)

    def inputs(edges: int) -> tuple[torch.Tensor, ...]:
        given = reference.make_case(problem(), "conv", edges=edges, nodes=edges // 2, num_out=edges // 2)
        return (*(given.tensors[name] for name in "xyw"), given.sender, given.receiver)

    node, edge = torch.export.Dim("node", min=2), torch.export.Dim("edge", min=2)
    sizes = ({0: node}, *({0: edge} for _ in range(4)))
    exported = torch.export.export(Convolution(), inputs(9), dynamic_shapes=sizes).module()
    for edges in (9, 20):
        torch.testing.assert_close(exported(*inputs(edges)), operator()(*inputs(edges)))
