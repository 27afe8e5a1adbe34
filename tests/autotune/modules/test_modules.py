"""The modules against e3nn in float64, on every kind of graph; their schedules, copies, caches and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from database_samples import PROBLEM, entry, store
from e3nn import o3
from module_cases import (
    assert_equal_derivatives,
    conv_inputs,
    e3nn_conv,
    normal,
    random_graph,
    small_conv,
)
from reference import copied, e3nn_module

from autotune.database import store as database
from autotune.errors import TuningMissError
from autotune.modules.convolution import TensorProductConv
from autotune.modules.product import TensorProduct
from autotune.modules.rows import SphericalHarmonics
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import device_facts
from kernelgen.errors import InputError, ProblemError, ScheduleError, UnsupportedError
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule
from kernelgen.runtime.graph import edge_order

# Two paths into one output block, an output block that no path reaches, a path weight, unequal multiplicities.
IRREPS = ("6x0e+3x1o", "0e+1o", "6x0e+3x1o+6x1o+2x2e")
INSTRUCTIONS = [(0, 0, 0, "uvu", True), (0, 1, 2, "uvu", True, 0.5), (1, 0, 1, "uvu", True), (1, 0, 1, "uvu", True)]


@pytest.fixture(autouse=True)
def own_databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUITUNE_DATABASE", str(tmp_path / "user"))
    monkeypatch.setattr(database.paths, "results_dir", lambda: tmp_path / "shipped")


@pytest.mark.parametrize(("edges", "nodes", "num_nodes"), [(40, 7, None), (40, 7, 12), (40, 7, 3), (0, 7, None)])
def test_conv_equals_e3nn_to_second_order(edges: int, nodes: int, num_nodes: int | None) -> None:
    conv = small_conv()
    num_out = nodes if num_nodes is None else num_nodes
    sender, receiver = random_graph(edges, nodes, num_out)
    assert edges == 0 or not bool((receiver[1:] >= receiver[:-1]).all()), "the edges must be unsorted"

    def mine(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return conv(x, y, w, sender, receiver, num_nodes=num_nodes)

    assert_equal_derivatives(mine, e3nn_conv(conv, sender, receiver, num_out), conv_inputs(conv, edges, nodes))


def test_sorted_edges_a_given_order_and_int32_indices_agree_with_the_plain_call() -> None:
    conv = small_conv()
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    out = conv(*inputs, sender, receiver)
    torch.testing.assert_close(conv(*inputs, sender, receiver, order=edge_order(receiver, 7)), out, rtol=0, atol=1e-12)
    torch.testing.assert_close(conv(*inputs, sender.int(), receiver.int()), out, rtol=0, atol=1e-12)
    by_receiver = torch.argsort(receiver, stable=True)
    arranged = [inputs[0], inputs[1][by_receiver], inputs[2][by_receiver]]
    again = conv(*arranged, sender[by_receiver], receiver[by_receiver], edges_sorted=True)
    torch.testing.assert_close(again, out, rtol=0, atol=1e-12)


def test_explicit_instructions_with_shared_weights_equal_e3nn() -> None:
    conv = TensorProductConv(*IRREPS, INSTRUCTIONS, shared_weights=True)
    sender, receiver = random_graph(30, 6, 6)

    def mine(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return conv(x, y, w, sender, receiver)

    assert_equal_derivatives(mine, e3nn_conv(conv, sender, receiver, 6), conv_inputs(conv, 30, 6))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("leading_x", "leading_y", "leading_w"), [((9,), (9,), (9,)), ((3, 1), (4,), (3, 4)), ((), (5,), (1,)), ((0,),) * 3]
)
def test_plain_product_equals_e3nn_with_any_leading_dimensions(
    shared: bool, leading_x: tuple, leading_y: tuple, leading_w: tuple
) -> None:
    options = {"shared_weights": shared, "internal_weights": False}
    mine = TensorProduct(*IRREPS, INSTRUCTIONS, **options)
    theirs = o3.TensorProduct(*IRREPS, INSTRUCTIONS, **options).to(torch.float64)
    assert (mine.irreps_in1, mine.irreps_in2, mine.irreps_out) == (
        theirs.irreps_in1,
        theirs.irreps_in2,
        theirs.irreps_out,
    )
    assert (mine.weight_numel, mine.instructions) == (theirs.weight_numel, theirs.instructions)
    weight = normal(mine.weight_numel) if shared else normal(*leading_w, mine.weight_numel)
    inputs = [normal(*leading_x, mine.irreps_in1.dim), normal(*leading_y, mine.irreps_in2.dim), weight]
    assert_equal_derivatives(mine, theirs, inputs)


@pytest.mark.parametrize("shared", [None, True, False])
@pytest.mark.parametrize("internal", [None, True, False])
def test_defaults_of_weights_are_those_of_e3nn(shared: bool | None, internal: bool | None) -> None:
    options = {"shared_weights": shared, "internal_weights": internal}
    if shared is False and internal:
        with pytest.raises(ProblemError, match="internal_weights"):
            TensorProduct(*IRREPS, INSTRUCTIONS, **options)
        return
    mine = TensorProduct(*IRREPS, INSTRUCTIONS, **options)
    theirs = o3.TensorProduct(*IRREPS, INSTRUCTIONS, **options)
    assert (mine.shared_weights, mine.internal_weights) == (theirs.shared_weights, theirs.internal_weights)
    assert isinstance(mine.weight, torch.nn.Parameter) == isinstance(theirs.weight, torch.nn.Parameter)
    assert mine.weight.shape == theirs.weight.shape


@pytest.mark.parametrize("irrep", ["component", "norm", "none"])
@pytest.mark.parametrize("path", ["element", "path", "none"])
def test_normalisations_are_those_of_e3nn(irrep: str, path: str) -> None:
    options = {"irrep_normalization": irrep, "path_normalization": path, "internal_weights": False}
    mine, theirs = (kind(*IRREPS, INSTRUCTIONS, **options) for kind in (TensorProduct, o3.TensorProduct))
    assert mine.instructions == theirs.instructions


def test_internal_weights_follow_the_module_to_another_dtype() -> None:
    product = TensorProduct(*IRREPS, INSTRUCTIONS)
    reference = e3nn_module(product.problem)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12), (torch.float32, 1e-5)):
        product, reference = product.to(dtype), reference.to(dtype)
        x, y = (normal(5, irreps.dim).to(dtype) for irreps in (product.irreps_in1, product.irreps_in2))
        out = product(x, y)
        assert out.dtype is dtype
        torch.testing.assert_close(out, reference(x, y, product.weight), rtol=tolerance, atol=tolerance)
    [gradient] = torch.autograd.grad(product(x, y).sum(), [product.weight])
    assert gradient.shape == product.weight.shape and bool(gradient.abs().sum() > 0)


def test_operators_are_built_once_per_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = small_conv()
    looked_up = []
    look_up = conv._lookup
    monkeypatch.setattr(conv, "_lookup", lambda *where: looked_up.append(where[1]) or look_up(*where))
    sender, receiver = random_graph(10, 4, 4)
    inputs = conv_inputs(conv, 10, 4)
    for dtype in (torch.float64, torch.float64, torch.float32, torch.float64):
        assert conv(*(tensor.to(dtype) for tensor in inputs), sender, receiver).dtype is dtype
    assert looked_up == [torch.float64, torch.float32]


def test_the_constructor_resolves_at_once_where_the_device_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = small_conv(graph_class="conv-e14-d5", device="cpu", dtype=torch.float64)
    monkeypatch.setattr(conv, "_lookup", lambda *_: pytest.fail("looked up again at the first call"))
    sender, receiver = random_graph(10, 4, 4)
    assert conv(*conv_inputs(conv, 10, 4), sender, receiver).shape == (4, conv.irreps_out.dim)


def test_tuning_tells_schedule_origin_and_record_of_each_direction(tmp_path: Path) -> None:
    tuned = HostSchedule(path_groups=2, channel_block=4, accumulate="atomics")
    record = entry(tuned, direction="backward", dtype="float64")
    store(tmp_path / "shipped", device_facts("cpu"), record)
    conv = small_conv(graph_class="conv-e14-d5", dtype=torch.float64)
    origins = {name: found.origin for name, found in conv.tuning.items()}
    assert origins == dict.fromkeys(DIRECTIONS, "default") | {"backward": "exact"}
    found = conv.tuning["backward"]
    assert (found.schedule, found.entry) == (tuned, record)
    assert "conv-e14-d5" in found.reason
    assert conv._operator is not None and conv._operator.schedules["backward"] == tuned


def test_tuning_before_the_first_call_is_what_the_default_dtype_would_load(tmp_path: Path) -> None:
    store(tmp_path / "user", device_facts("cpu"), entry(HostSchedule(path_groups=2, channel_block=8)))
    conv = small_conv()
    assert conv.problem == PROBLEM
    found = conv.tuning["forward"]
    assert (found.origin, found.schedule) == ("nearest", HostSchedule(path_groups=2, channel_block=8))


def test_schedules_may_be_given_by_hand() -> None:
    mine = HostSchedule(path_groups=2, channel_block=4, accumulate="atomics", edges_per_chunk=8)
    conv = small_conv(schedule=mine)
    assert {(found.origin, found.schedule) for found in conv.tuning.values()} == {("given", mine)}
    sender, receiver = random_graph(40, 7, 7)
    inputs = conv_inputs(conv, 40, 7)
    wanted = e3nn_conv(conv, sender, receiver, 7)(*inputs)
    torch.testing.assert_close(conv(*inputs, sender, receiver), wanted, rtol=0, atol=1e-10)
    some = small_conv(schedule={"forward": mine})
    origins = {name: found.origin for name, found in some.tuning.items()}
    assert origins == dict.fromkeys(DIRECTIONS, "default") | {"forward": "given"}


def test_strict_modules_refuse_a_miss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(TuningMissError):
        small_conv(strict=True, device="cpu")
    monkeypatch.setenv("EQUITUNE_STRICT", "1")
    conv = small_conv()
    sender, receiver = random_graph(10, 4, 4)
    inputs = [tensor.float() for tensor in conv_inputs(conv, 10, 4)]
    with pytest.raises(TuningMissError):
        conv(*inputs, sender, receiver)
    known = [entry(direction=direction) for direction in DIRECTIONS]
    store(tmp_path / "shipped", device_facts("cpu"), *known)
    assert conv(*inputs, sender, receiver).shape == (4, conv.irreps_out.dim)
    assert {found.origin for found in conv.tuning.values()} == {"nearest"}


def test_only_directions_that_are_called_have_to_be_tuned(tmp_path: Path) -> None:
    """The two derivatives that an inference does not take need no entry, and say so when they are taken."""
    facts = device_facts("cpu")
    store(tmp_path / "shipped", facts, *(entry(direction=name) for name in ("forward", "backward")))
    for options in ({"strict": True}, {"tolerance": 1e-5}):
        conv = small_conv(device="cpu", **options)
        sender, receiver = random_graph(10, 4, 4)
        inputs = [tensor.float().requires_grad_() for tensor in conv_inputs(conv, 10, 4)]
        out = conv(*inputs, sender, receiver)
        first = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        with pytest.raises(TuningMissError, match="double_backward"):
            torch.autograd.grad(first[0].sum(), inputs[1])
        assert conv.tuning["double_backward"].origin == "default"
        assert "double_backward" in conv.tuning["double_backward"].reason
    anybody = small_conv(device="cpu")
    out = anybody(*inputs, sender, receiver)
    first = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    assert torch.autograd.grad(first[0].sum(), inputs[1])[0].isfinite().all(), "who did not ask is refused nothing"
    with pytest.raises(TuningMissError, match="at most 1e-08 .*error was 3.0e-07"):
        small_conv(device="cpu", tolerance=1e-8)
    with pytest.raises(ProblemError, match="tolerance is -1"):
        small_conv(device="cpu", tolerance=-1)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_compute_the_same(how: str) -> None:
    product = TensorProduct(*IRREPS, INSTRUCTIONS).double()
    x, y = normal(5, product.irreps_in1.dim), normal(5, product.irreps_in2.dim)
    out = product(x, y)
    twin = copied(product, how)
    assert twin._operators == {} and product._operators != {}
    assert torch.equal(twin(x, y), out)
    assert twin.weight is not product.weight


def test_checkpoints_of_equitune_without_a_mask_are_read() -> None:
    product = TensorProduct(*IRREPS, INSTRUCTIONS)
    mask = product.output_mask.clone()
    product.load_state_dict({"weight": torch.ones_like(product.weight)})
    assert bool((product.weight == 1).all()) and torch.equal(product.output_mask, mask)
    with pytest.raises(RuntimeError, match="Missing key"):
        product.load_state_dict({"output_mask": product.output_mask})


def test_torchscript_is_told_what_to_do() -> None:
    for module in (TensorProduct(*IRREPS, INSTRUCTIONS), SphericalHarmonics(range(3), True)):
        for given in (module, torch.nn.Sequential(module)):
            with pytest.raises(UnsupportedError, match=r"torch\.compile"):
                torch.jit.script(given)


def test_state_dict_moves_internal_weights() -> None:
    first, second = (TensorProduct(*IRREPS, INSTRUCTIONS).double() for _ in range(2))
    second.load_state_dict(first.state_dict())
    x, y = normal(5, first.irreps_in1.dim), normal(5, first.irreps_in2.dim)
    assert torch.equal(first(x, y), second(x, y))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s, r: (s.__setitem__(3, 7), r), "sender"),
        (lambda s, r: (s.__setitem__(3, -1), r), "sender"),
        (lambda s, r: (s, r.__setitem__(0, 9)), "receiver"),
    ],
)
def test_indices_out_of_range_are_told_where_asked_for(change: Callable, told: str) -> None:
    conv = small_conv(check_indices=True)
    sender, receiver = random_graph(10, 7, 7)
    change(sender, receiver)
    with pytest.raises(InputError, match=told):
        conv(*conv_inputs(conv, 10, 7), sender, receiver)


def test_checked_indices_in_range_and_a_false_promise_of_sorted_edges() -> None:
    conv = small_conv(check_indices=True)
    sender, receiver = random_graph(10, 7, 7)
    inputs = conv_inputs(conv, 10, 7)
    assert torch.equal(conv(*inputs, sender, receiver), small_conv()(*inputs, sender, receiver))
    with pytest.raises(InputError, match="ascending"):
        conv(*inputs, sender, receiver, edges_sorted=True)


def test_disagreeing_inputs_are_told() -> None:
    product = TensorProduct(*IRREPS, INSTRUCTIONS, shared_weights=False)
    x, y, w = normal(4, product.irreps_in1.dim), normal(4, product.irreps_in2.dim), normal(4, product.weight_numel)
    for wrong, told in (
        ((x[:, 1:], y, w), "x has shape"),
        ((x, y[:, 1:], w), "y has shape"),
        ((x, y, w[:, 1:]), "weight has shape"),
        ((x, y, w[0]), "a row an edge"),
        ((x[:3], y, w), "broadcast"),
        ((x, y), "weight is missing"),
        ((x.half(), y.half(), w.half()), "float16"),
        ((x, y.float(), w), "float32"),
    ):
        with pytest.raises(InputError, match=told):
            product(*wrong)
    conv = small_conv()
    sender, receiver = random_graph(10, 4, 4)
    inputs = conv_inputs(conv, 10, 4)
    with pytest.raises(InputError):
        conv(inputs[0], inputs[1][:-1], inputs[2], sender, receiver)
    with pytest.raises(InputError):
        conv(*inputs, sender.float(), receiver)
    with pytest.raises(InputError):
        conv(*inputs, sender[:-1], receiver)


def test_disagreeing_arguments_are_told() -> None:
    with pytest.raises(ProblemError, match="either filter_irreps_out"):
        TensorProductConv("8x0e", "0e")
    with pytest.raises(ProblemError, match="either filter_irreps_out"):
        TensorProductConv("8x0e", "0e", "8x0e", filter_irreps_out="0e")
    with pytest.raises(ProblemError, match="either filter_irreps_out"):
        TensorProductConv("8x0e", "0e", "8x0e", [(0, 0, 0, "uvu", True)], filter_irreps_out="0e")
    with pytest.raises(ProblemError, match="irreps"):
        TensorProductConv("8xqq", "0e", filter_irreps_out="0e")
    with pytest.raises(ProblemError, match="plain-e10"):
        small_conv(graph_class="plain-e10")
    with pytest.raises(ProblemError, match="forwards"):
        small_conv(schedule={"forwards": HostSchedule(path_groups=2)})
    with pytest.raises(ProblemError, match="schedule is 3"):
        small_conv(schedule=3)
    with pytest.raises(ProblemError, match="tolerance is 'a'"):
        small_conv(tolerance="a")
    with pytest.raises(ProblemError, match="mode is 'uwv'"):
        TensorProduct("8x0e", "0e", "8x0e", [(0, 0, 0, "uwv", True)])
    with pytest.raises(ScheduleError, match="cuda"):
        small_conv(schedule=CudaSchedule(), device="cpu")


def test_repr_names_irreps_paths_and_weights() -> None:
    assert "8x0e+8x1o x 1x0e+1x1o" in repr(small_conv()) and "weights" in repr(small_conv())
