"""The torch face of an operator: autograd twice, torch's own op checks, odd graphs, and what it says of bad input."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import reference
import torch

from kernelgen import (
    HostSchedule,
    InputError,
    Operator,
    ScheduleError,
    TensorProductProblem,
    UnsupportedError,
    build,
    edge_order,
)
from kernelgen.library import OPERATORS, resolve

SCHEDULES = {
    "default": None,
    "atomics": HostSchedule(accumulate="atomics"),
    "unfused": HostSchedule(fuse=False),
}
EDGES, NODES, NUM_OUT = 11, 4, 5


def problem(shared: bool = False) -> TensorProductProblem:
    return TensorProductProblem.channelwise("2x0e+2x1o", "0e+1o", "0e+1o", shared_weights=shared)


def operator(schedule: str = "default", operation: str = "conv", shared: bool = False) -> Operator:
    return build(problem(shared), SCHEDULES[schedule], operation=operation, dtype=torch.float64)


def case(operation: str = "conv", shared: bool = False, edges: int = EDGES) -> reference.Case:
    return reference.make_case(problem(shared), operation, edges=edges, nodes=NODES, num_out=NUM_OUT)


def leaves(given: reference.Case) -> list[torch.Tensor]:
    return [given.tensors[name].clone().requires_grad_() for name in "xyw"]


def differentiated(op: Operator, given: reference.Case, index: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    """Result, first gradients (``x``) and second gradients (``2x``) through autograd."""
    x, y, w = leaves(given)
    g = given.tensors["g"].clone().requires_grad_()
    graph = [None if i is None else i.to(index) for i in (given.sender, given.receiver)]
    out = op(x, y, w, *graph, num_out=given.num_out)
    first = torch.autograd.grad(out, [x, y, w], g, create_graph=True)
    total = sum((grad * given.tensors["t" + name]).sum() for name, grad in zip("xyw", first, strict=True))
    second = torch.autograd.grad(total, [x, y, w, g])
    return {
        "out": out.detach(),
        **{name: grad.detach() for name, grad in zip("xyw", first, strict=True)},
        **{"2" + name: grad for name, grad in zip("xywg", second, strict=True)},
    }


def wanted(given: reference.Case) -> dict[str, torch.Tensor]:
    return {
        "out": reference.expected(given, "forward")["g"],
        **reference.expected(given, "backward"),
        **{"2" + name: value for name, value in reference.expected(given, "double_backward").items()},
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    errors = {name: reference.relative_error(found[name], expected[name]) for name in expected}
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("operation", "schedule"), [("conv", "default"), ("conv", "atomics"), ("conv", "unfused"), ("plain", "default")]
)
def test_agrees_with_e3nn_through_autograd(operation: str, schedule: str, shared: bool) -> None:
    given = case(operation, shared)
    assert_same(differentiated(operator(schedule, operation, shared), given), wanted(given))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_int32_indices(schedule: str) -> None:
    given = case()
    assert_same(differentiated(operator(schedule), given, torch.int32), wanted(given))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bare_calls_overwrite_poisoned_outputs(schedule: str) -> None:
    given, op = case(), operator(schedule)
    t, graph = given.tensors, (given.sender, given.receiver, given.num_out)
    found = {"out": op.run_forward(t["x"], t["y"], t["w"], *graph, poison=True)}
    found |= op.run_backward(t["x"], t["y"], t["w"], t["g"], *graph, poison=True)
    tangents = {name: t["t" + name] for name in "xyw"}
    second = op.run_double_backward(t["x"], t["y"], t["w"], t["g"], tangents, *graph, poison=True)
    assert_same(found | {"2" + name: grad for name, grad in second.items()}, wanted(given))


def subsets(slots: str) -> list[str]:
    return ["".join(c) for n in range(1, len(slots) + 1) for c in itertools.combinations(slots, n)]


@pytest.mark.parametrize("needed", subsets("xyw"))
def test_only_needed_gradients_are_asked_for(needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions name exactly the gradients that somebody needs, in first and second derivatives."""
    given, op = case(), operator()
    asked: list[str] = []
    run_on = Operator.run_on

    def spy(self: Operator, graph, direction, *arguments):  # type: ignore[no-untyped-def]
        asked.append(direction.text)
        return run_on(self, graph, direction, *arguments)

    monkeypatch.setattr("kernelgen.autograd._SMALL_WEIGHTS", 0)  # small graphs do not ask about leaves
    monkeypatch.setattr(Operator, "run_on", spy)
    by_name = {name: given.tensors[name].clone().requires_grad_(name in needed) for name in "xyw"}
    out = op(*by_name.values(), given.sender, given.receiver, num_out=given.num_out)
    first = torch.autograd.grad(out.square().sum(), by_name[needed[0]], create_graph=True)[0]
    name = {"x": "source_backward", "y": "edge_backward", "w": "backward"}
    assert asked == ["forward:->g", f"{name[needed[0]]}:->{needed[0]}"]
    torch.autograd.grad((first * given.tensors["t" + needed[0]]).sum(), by_name[needed[-1]])
    # The cotangent 2 * out depends on the inputs too: its gradient g is needed, then one more backward. A single
    # tangent is a forward product; that of y waits for the backward of the value and joins it.
    if needed[-1] == needed[0]:
        assert asked[2:] == ["forward:->g", f"{name[needed[-1]]}:->{needed[-1]}"]
    elif needed[0] == "y":
        assert asked[2:] == ["forward:->g", f"joint_backward:yg->{needed[-1]}"]
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
    monkeypatch.setattr("kernelgen.autograd._SMALL_WEIGHTS", 0)  # small graphs do not ask about leaves
    monkeypatch.setattr(Operator, "run_on", spy)
    where = (given.sender, given.receiver) if operation == "conv" else ()
    found = gradients(lambda x, y, w: op(x, y, w, *where, num_out=given.num_out))
    last = "edge_backward:->y" if wanted == "y" else f"joint_backward:yg->{wanted}"
    assert asked == ["forward:->g", "edge_backward:->y", last]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


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
            parts |= op.run_double_backward(
                t["x"], t["y"], t["w"], t["g"], {tangent: t["t" + tangent]}, *graph, outputs=outputs
            )
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


def test_third_derivatives_raise() -> None:
    given, op = case(), operator()
    x, y, w = leaves(given)
    out = op(x, y, w, given.sender, given.receiver, num_out=given.num_out)
    first = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), y, create_graph=True)[0]
    with pytest.raises(UnsupportedError, match="third derivatives"):
        torch.autograd.grad(second.sum(), w)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_out", [0, 3])
def test_no_edges_give_zeros(schedule: str, num_out: int) -> None:
    op, form = operator(schedule), problem()
    none = torch.zeros(0, dtype=torch.int64)
    x = torch.randn(NODES, form.dim_in1, dtype=torch.float64, requires_grad=True)
    y = torch.randn(0, form.dim_in2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(0, form.weight_numel, dtype=torch.float64, requires_grad=True)
    out = op(x, y, w, none, none, num_out=num_out)
    assert out.shape == (num_out, form.dim_out) and not out.any()
    first = torch.autograd.grad(out.sum(), (x, y, w), create_graph=True)
    assert [grad.shape for grad in first] == [x.shape, y.shape, w.shape]
    assert not any(grad.any() for grad in first)
    assert not torch.autograd.grad(first[0].sum(), w)[0].any()


def test_a_product_without_paths_is_zero() -> None:
    form = TensorProductProblem.from_instructions("2x0e", "0e", "2x0e", [])
    op = build(form, dtype=torch.float64)
    x, y, w = (torch.ones(3, n, dtype=torch.float64, requires_grad=True) for n in (2, 1, 0))
    index = torch.arange(3)
    out = op(x, y, w, index, index)
    assert out.shape == (3, 2) and not out.any()
    assert not torch.autograd.grad(out.sum(), x)[0].any()


def test_default_num_out_is_the_number_of_inputs_and_isolated_nodes_are_zero() -> None:
    given, op = case(), operator()
    x, y, w = (given.tensors[name] for name in "xyw")
    out = op(x, y, w, given.sender, torch.zeros_like(given.receiver))
    assert out.shape[0] == NODES
    assert out[0].any() and not out[1:].any()


def test_a_given_order_and_sorted_edges_change_nothing() -> None:
    given, op = case(), operator()
    x, y, w = (given.tensors[name] for name in "xyw")
    expected = op(x, y, w, given.sender, given.receiver, num_out=NUM_OUT)
    order = edge_order(given.receiver, NUM_OUT)
    torch.testing.assert_close(op(x, y, w, given.sender, given.receiver, num_out=NUM_OUT, order=order), expected)
    by = torch.sort(given.receiver, stable=True).indices
    arranged = (x, y[by], w[by], given.sender[by], given.receiver[by])
    torch.testing.assert_close(op(*arranged, num_out=NUM_OUT), expected)
    order = edge_order(given.receiver[by], NUM_OUT, is_sorted=True)
    torch.testing.assert_close(op(*arranged, num_out=NUM_OUT, order=order), expected)


def test_strided_and_misaligned_inputs() -> None:
    given, op = case(), operator()
    x, y, w = (given.tensors[name] for name in "xyw")
    expected = op(x, y, w, given.sender, given.receiver, num_out=NUM_OUT)
    odd = torch.empty(w.numel() + 1, dtype=w.dtype)[1:].view_as(w).copy_(w)
    assert odd.data_ptr() % 16 != 0 and odd.is_contiguous()
    strided = x.t().contiguous().t()
    assert not strided.is_contiguous()
    pairs = torch.stack([given.sender, given.receiver], 1)
    found = op(strided, y, odd, pairs[:, 0], pairs[:, 1], num_out=NUM_OUT)
    torch.testing.assert_close(found, expected)


def test_shared_weights_may_be_one_row() -> None:
    given, op = case(shared=True), operator(shared=True)
    x, y, w = leaves(given)
    row = w.detach()[None].requires_grad_()
    graph = (given.sender, given.receiver)
    torch.testing.assert_close(op(x, y, row, *graph, num_out=NUM_OUT), op(x, y, w, *graph, num_out=NUM_OUT))
    op(x, y, row, *graph, num_out=NUM_OUT).sum().backward()
    assert row.grad is not None and row.grad.shape == row.shape


def bad_inputs() -> dict[str, tuple[dict, str]]:
    index = torch.zeros(EDGES, dtype=torch.int64)
    form = problem()
    x = torch.zeros(NODES, form.dim_in1, dtype=torch.float64)
    return {
        "columns of x": ({"x": x[:, 1:]}, r"x is torch.float64 \(4, 7\).*expected.*\(4, 8\)"),
        "dimensions of x": ({"x": x[0]}, r"expected \[rows, features\]"),
        "dtype": ({"x": x.float()}, "x is torch.float32.*expected torch.float64"),
        "rows of w": ({"w": torch.zeros(3, form.weight_numel, dtype=torch.float64)}, rf"expected.*\({EDGES}, "),
        "no graph": ({"sender": None, "receiver": None}, "sender is missing"),
        "no receiver": ({"receiver": None}, "receiver is missing"),
        "length of sender": ({"sender": index[1:]}, rf"sender is torch.int64 \({EDGES - 1},\).*\({EDGES},\)"),
        "float index": ({"sender": index.float()}, "sender is torch.float32"),
        "two index dtypes": ({"sender": index.int()}, "sender is torch.int32 and receiver torch.int64"),
        "num_out": ({"num_out": -1}, "num_out is -1"),
        "order": ({"order": edge_order(index, 3)}, r"order.spans is torch.int32 \(3, 3\).*num_out=5"),
    }


@pytest.mark.parametrize("name", bad_inputs())
def test_bad_input_says_what_was_given_and_expected(name: str) -> None:
    given = case()
    changed, message = bad_inputs()[name]
    inputs = {n: given.tensors[n] for n in "xyw"}
    inputs |= {"sender": given.sender, "receiver": given.receiver, "num_out": NUM_OUT}
    with pytest.raises(InputError, match=message):
        operator()(**(inputs | changed))


def test_more_bad_input() -> None:
    given, index = case("plain"), torch.zeros(EDGES, dtype=torch.int64)
    x, y, w = (given.tensors[name] for name in "xyw")
    with pytest.raises(InputError, match="operation='conv'"):
        operator(operation="plain")(x, y, w, index, index)
    with pytest.raises(InputError, match=rf"x is .*expected.*\({EDGES}, "):
        operator(operation="plain")(x[1:], y, w)
    with pytest.raises(InputError, match="w is .*on meta; expected .* on cpu"):
        operator(operation="plain").run_forward(x, y, w.to("meta"))
    with pytest.raises(InputError, match="x is on meta; this operator was built for cpu"):
        operator(operation="plain").run_forward(x.to("meta"), y, w)
    with pytest.raises(InputError, match="torch.float16"):
        build(problem(), dtype=torch.float16)
    with pytest.raises(InputError, match="tangents are"):
        operator(operation="plain").run_double_backward(x, y, w, given.tensors["g"], {})
    with pytest.raises(ScheduleError, match="'sideways'"):
        build(problem(), {"sideways": HostSchedule()})
    with pytest.raises(ScheduleError, match="threads=256"):
        build(problem(), HostSchedule(threads=256))
    with pytest.raises(ScheduleError, match="operation is 'pool'"):
        build(problem(), operation="pool")


def test_schedules_by_direction() -> None:
    op = build(problem(), {"backward": SCHEDULES["atomics"]}, dtype=torch.float64)
    assert op.schedules["backward"] == SCHEDULES["atomics"]
    assert op.schedules["forward"] == operator().schedules["forward"]
    given = case()
    assert_same(differentiated(op, given), wanted(given))


def test_source_and_resources() -> None:
    op = operator()
    assert "equitune_kernel" in op.source("backward")
    assert op.source("backward") != op.source()
    assert op.resources()["code_bytes"] > 0


def test_operators_are_found_rebuilt_copied_and_pickled_by_text() -> None:
    op = operator()
    assert operator() is op and resolve(op.text) is op
    assert copy.deepcopy(op) is op and pickle.loads(pickle.dumps(op)) is op
    del OPERATORS[op.text]
    again = resolve(op.text)
    assert again is not op and again.text == op.text and again.schedules == op.schedules
    given = case()
    x, y, w = (given.tensors[name] for name in "xyw")
    graph = (given.sender, given.receiver)
    assert torch.equal(again(x, y, w, *graph, num_out=NUM_OUT), op(x, y, w, *graph, num_out=NUM_OUT))


def test_deterministic_operators_compute_the_same_and_repeat_bit_by_bit() -> None:
    given = case(edges=40)
    op = build(problem(), dtype=torch.float64, deterministic=True)
    assert_same(differentiated(op, given), wanted(given))
    assert op.schedules["source_backward"].order == "sender" and op.by_sender and op.by_receiver
    runs = [differentiated(op, given) for _ in range(3)]
    assert all(torch.equal(run[name], runs[0][name]) for run in runs for name in run)
    assert pickle.loads(pickle.dumps(op)).deterministic
    with pytest.raises(ScheduleError, match="sums x in no fixed order"):
        build(problem(), {"source_backward": HostSchedule()}, deterministic=True)
    with pytest.raises(ScheduleError, match="sums g in no fixed order"):
        build(problem(), {"forward": HostSchedule(accumulate="atomics")}, deterministic=True)


def test_deterministic_products_of_many_paths_have_default_schedules() -> None:
    """On the host as many path groups as paths add to one block of x, in one worker."""
    for operation in ("conv", "plain"):
        many = TensorProductProblem.channelwise("8x0e+8x1o+8x2e", "0e+1o+2e+3o", "0e+1o+2e")
        given = reference.make_case(many, operation)
        op = build(many, operation=operation, dtype=torch.float64, deterministic=True)
        reference.assert_matches_e3nn(op, given, ("backward",), 1e-12)


def test_outputs_that_share_an_allocation_take_no_more_memory_than_apart() -> None:
    """Even where one of them is no whole number of 16 bytes."""
    odd = TensorProductProblem.channelwise("2x0e+2x1o", "0e+1o+2e", "0e+1o")
    given = reference.make_case(odd, "conv", edges=5)
    op = build(odd, HostSchedule(accumulate="atomics"))
    x, y, w, g = (given.tensors[name].float() for name in "xywg")
    found = op.run_backward(x, y, w, g, given.sender, given.receiver)
    assert found["y"].numel() % 4
    shared = [grad for grad in found.values() if grad.untyped_storage().nbytes() > grad.nbytes]
    assert not shared or shared[0].untyped_storage().nbytes() == sum(grad.nbytes for grad in shared)
