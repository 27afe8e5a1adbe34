"""Calls of an operator: unusual graphs, strided inputs, errors for bad input, copies and pickles."""

from __future__ import annotations

import copy
import pickle

import pytest
import reference
import torch
from operator_cases import (
    EDGES,
    NODES,
    NUM_OUT,
    SCHEDULES,
    assert_same,
    case,
    differentiated,
    leaves,
    operator,
    problem,
    wanted,
)

from kernelgen import InputError, ScheduleError, UnsupportedError
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.ops.base import OPERATORS, resolve
from kernelgen.ops.product import build
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime.graph import edge_order


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
        reference.run_direct(operator(operation="plain"), "forward", {"x": x, "y": y, "w": w.to("meta")})
    with pytest.raises(InputError, match="x is on meta; this operator was built for cpu"):
        reference.run_direct(operator(operation="plain"), "forward", {"x": x.to("meta"), "y": y, "w": w})
    with pytest.raises(InputError, match="torch.float16"):
        build(problem(), dtype=torch.float16)
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
    tensors = {name: given.tensors[name].float() for name in "xywg"}
    found = reference.run_direct(op, "backward", tensors, given.sender, given.receiver, given.num_out)
    assert found["y"].numel() % 4
    shared = [grad for grad in found.values() if grad.untyped_storage().nbytes() > grad.nbytes]
    assert not shared or shared[0].untyped_storage().nbytes() == sum(grad.nbytes for grad in shared)


def test_a_small_graph_that_comes_again_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known by its own tensors and by every size; another one is checked, and a large one is not kept alive."""
    op, given = operator(), case()
    x, y = given.tensors["x"], given.tensors["y"]
    sender, receiver = given.sender, given.receiver
    order = op.order(sender, receiver, NODES, NUM_OUT)
    assert op.graph(x, y, sender, receiver, NUM_OUT, order) is not op.graph(x, y, sender, receiver, NUM_OUT, order)
    for changed in (
        (x, y, sender.clone(), receiver, NUM_OUT, order),
        (x, y, sender, receiver.clone(), NUM_OUT, order),
        (x, y, sender, receiver, NUM_OUT, op.order(sender, receiver, NODES, NUM_OUT)),
        (torch.cat((x, x)), y, sender, receiver, NUM_OUT, None),
        (x, y, sender, receiver, NUM_OUT + 1, None),
    ):
        kept = op.graph(x, y, sender, receiver, NUM_OUT, order, keep=True)
        assert op.graph(x.clone(), y.clone(), sender, receiver, NUM_OUT, order, keep=True) is kept
        assert op.graph(*changed, keep=True) is not kept
    monkeypatch.setattr("kernelgen.runtime.call.KEPT_EDGES", EDGES - 1)
    large = operator("atomics")
    first = large.graph(x, y, sender, receiver, NUM_OUT, order, keep=True)
    assert large.graph(x, y, sender, receiver, NUM_OUT, order, keep=True) is not first


@pytest.mark.parametrize("change", ["fewer", "int32", "strided"])
def test_a_graph_whose_indices_took_another_form_is_checked_again(change: str) -> None:
    op, given = operator(), case()
    x, y, w = (given.tensors[name] for name in "xyw")
    sender, receiver = given.sender.clone(), given.receiver.clone()
    order = op.order(sender, receiver, NODES, NUM_OUT)
    wanted = op(x, y, w, sender, receiver, num_out=NUM_OUT, order=order)
    if change == "strided":
        sender.data = torch.stack((sender, torch.zeros_like(sender)), 1)[:, 0]
        assert_same({"g": op(x, y, w, sender, receiver, num_out=NUM_OUT, order=order)}, {"g": wanted})
        return
    if change == "fewer":
        sender.resize_(3)
    else:
        receiver.data = receiver.data.int()
    with pytest.raises(InputError, match="sender is"):
        op(x, y, w, sender, receiver, num_out=NUM_OUT, order=order)


def test_only_edges_that_the_caller_holds_are_kept() -> None:
    """What a compiled graph makes for itself may lie in memory that is reused."""
    op, given = operator("unfused"), case()
    x, y, w = (given.tensors[name] for name in "xyw")
    op._checks._last = None
    compiled = torch.compile(lambda *t: op(*t, num_out=NUM_OUT), backend="aot_eager", fullgraph=True)
    compiled(x, y, w, given.sender, given.receiver)
    assert op._checks._last is None
    op(x, y, w, given.sender, given.receiver, num_out=NUM_OUT)
    assert op._checks._last is not None, "nothing to be ordered"
    other = operator()
    other._checks._last = None
    other(x, y, w, given.sender, given.receiver, num_out=NUM_OUT)
    kept = other._checks._last
    assert kept is not None and kept.order.spans is not None, "the order of a known graph"
