"""The operator of symmetric contractions against a plain sum of monomials, and what a pass computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from contraction_cases import SMALL, assert_same, build_small, derivatives, operands, plain, some_elements

from kernelgen.arithmetic.contraction import contraction_double_backward
from kernelgen.device import cuda_facts
from kernelgen.errors import UnsupportedError
from kernelgen.kernels.symmetric_contraction import ContractionCudaSchedule, ContractionHostSchedule
from kernelgen.ops.symmetric_contraction import ContractionOperator, build_contraction, sums_by_element
from kernelgen.problem.other_kinds import ContractionProblem
from kernelgen.runtime.graph import order_by

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
MEDIUM = ContractionProblem("0e+1o+2e", "0e+1o", 3, 13)
LAYOUTS = ("ir_mul", "mul_ir")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_is_plain(operator: ContractionOperator, nodes: int, rows: int, index: torch.dtype = torch.int64) -> None:
    """Value, first and second gradients through autograd, by the operator's dtype and device."""
    problem, elements = operator.problem, some_elements(nodes, rows, index)
    given = {name: value.to(operator.dtype).double() for name, value in operands(problem, nodes, rows).items()}
    wanted = derivatives(lambda x, w: plain(problem, x, w, elements, operator.layout), given)
    there = {name: value.to(operator.device, operator.dtype) for name, value in given.items()}
    found = derivatives(lambda x, w: operator(x, w, elements.to(operator.device)), there)
    assert all(value.dtype is operator.dtype for value in found.values())
    assert_same({name: value.cpu().double() for name, value in found.items()}, wanted, TOLERANCE[operator.dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_value_and_both_derivatives(dtype: torch.dtype, layout: str) -> None:
    operator = build_contraction(MEDIUM, dtype=dtype, layout=layout)
    assert_is_plain(operator, 23, 5)
    assert_is_plain(operator, 23, 5, torch.int32)


@pytest.mark.parametrize("nodes, rows", [(1, 1), (9, 1), (16, 2), (40, 89), (3, 89)])
def test_numbers_of_nodes_and_elements(nodes: int, rows: int) -> None:
    """8 nodes share a task, and 16 are whole tasks, so that the sums of the last element begin behind the last task."""
    assert_is_plain(build_small(), nodes, rows)


def test_correlation_of_four_and_one() -> None:
    for problem in (ContractionProblem("0e+1o", "0e+1o", 4, 4), ContractionProblem("1o+0e", "0e+1o", 1, 4)):
        assert_is_plain(build_contraction(problem, dtype=torch.float64), 11, 4)


@pytest.mark.parametrize("nodes_per_task", [1, 4, 64])
@pytest.mark.parametrize("gradients", ContractionHostSchedule.choices["gradients"])
def test_schedules_of_the_host(gradients: str, nodes_per_task: int) -> None:
    schedule = ContractionHostSchedule(nodes_per_task, "element", gradients, channel_block=4, threads=1)
    assert_is_plain(build_small(schedule=schedule), 23, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_on_a_gpu(dtype: torch.dtype, layout: str) -> None:
    for problem in (MEDIUM, ContractionProblem("0e+1o+2e+3o", "0e+1o", 3, 128)):
        operator = build_contraction(problem, dtype=dtype, layout=layout, device="cuda")
        assert_is_plain(operator, 90, 89)
        assert_is_plain(operator, 21, 1, torch.int32)


@pytest.mark.gpu
@pytest.mark.parametrize("pace", ContractionCudaSchedule.choices["pace"])
@pytest.mark.parametrize("sums", ContractionCudaSchedule.choices["sums"])
@pytest.mark.parametrize("adds", ContractionCudaSchedule.choices["adds"])
def test_schedules_of_a_gpu(adds: str, sums: str, pace: str) -> None:
    for gradients in ContractionCudaSchedule.choices["gradients"]:
        schedule = ContractionCudaSchedule(4, "element", gradients, 64, pace=pace, sums=sums, adds=adds)
        assert_is_plain(build_contraction(MEDIUM, schedule, dtype=torch.float64, device="cuda"), 123, 5)


def test_gradients_by_finite_differences() -> None:
    operator, elements = build_small(), torch.tensor([1, 0, 1, 1])
    x, w = (operands(SMALL, 4, 2)[name].requires_grad_() for name in "xw")
    function = lambda x, w: operator(x, w, elements)  # noqa: E731
    assert torch.autograd.gradcheck(function, (x, w), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (x, w))


def test_third_derivatives_raise() -> None:
    operator, elements = build_small(), torch.tensor([1, 0, 1, 1])
    x, w = (operands(SMALL, 4, 2)[name].requires_grad_() for name in "xw")
    for function in (operator.forward, lambda *all_: torch.ops.equitune.sc_forward(*all_, operator.text)):
        (first,) = torch.autograd.grad(function(x, w, elements).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), w, create_graph=True)
        with pytest.raises(UnsupportedError, match="third derivatives of a symmetric contraction.*detach"):
            torch.autograd.grad(second.sum(), x)


def test_only_what_a_pass_uses_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, elements = build_small(), torch.tensor([1, 0, 1, 1])
    asked, run = [], operator.run
    monkeypatch.setattr(
        operator, "run", lambda direction, *rest, **more: asked.append(direction) or run(direction, *rest, **more)
    )
    leaves = {name: operands(SMALL, 4, 2)[name].requires_grad_() for name in "xw"}
    # As in a model, features and weights are results of something.
    out = operator(leaves["x"] * 1, leaves["w"] * 1, elements)
    torch.autograd.grad(out.sum(), leaves["w"], retain_graph=True)
    torch.autograd.grad(out.sum(), leaves["x"], retain_graph=True)
    (forces,) = torch.autograd.grad(out.sum(), leaves["x"], create_graph=True)
    torch.autograd.grad(forces.square().sum(), leaves["w"])
    operator(leaves["x"].detach(), leaves["w"], elements).sum().backward()
    assert [(one.name, one.outputs) for one in asked] == [
        ("forward", "g"),
        ("backward", "w"),
        ("feature_backward", "x"),
        ("feature_backward", "x"),
        ("double_backward", "w"),
        ("forward", "g"),
        ("backward", "w"),
    ]


def test_weights_without_gradients() -> None:
    operator, elements = build_small(), some_elements(7, 3)
    given = operands(SMALL, 7, 3)
    x, g = given["x"].requires_grad_(), given["g"].requires_grad_()
    out = operator(x, given["w"], elements)
    (first,) = torch.autograd.grad(out, x, g, create_graph=True)
    found = torch.autograd.grad(first, (x, g), given["tx"])
    wanted = derivatives(lambda x, w: plain(SMALL, x, w, elements), given, "x")
    assert_same(
        {"out": out, "x": first, "2x": found[0], "2g": found[1]}, {k: wanted[k] for k in ("out", "x", "2x", "2g")}
    )
    assert not operator(x.detach(), given["w"], elements).requires_grad
    with torch.no_grad():
        assert not operator(x, given["w"], elements).requires_grad


def test_results_are_the_same_in_every_run_and_for_every_number_of_threads(threads: None) -> None:
    problem = ContractionProblem("0e+1o+2e", "0e+1o", 3, 32)
    operator = build_contraction(problem)
    elements, given = some_elements(150, 5), {k: v.float() for k, v in operands(problem, 150, 5).items()}
    results = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        results.append(derivatives(lambda x, w: operator(x, w, elements), given))
    for other in results[1:]:
        assert all(torch.equal(value, other[name]) for name, value in results[0].items())


@pytest.mark.gpu
def test_a_gpu_sums_in_a_fixed_order_if_torch_is_told_so() -> None:
    problem = ContractionProblem("0e+1o+2e+3o", "0e+1o", 3, 128)
    operator = build_contraction(problem, device="cuda")
    elements = some_elements(3000, 5).cuda()
    given = {name: value.float().cuda() for name, value in operands(problem, 3000, 5).items()}
    torch.use_deterministic_algorithms(True)
    try:
        results = [derivatives(lambda x, w: operator(x, w, elements), given) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    results.append(derivatives(lambda x, w: operator(x, w, elements), given))
    for other in results[1:-1]:
        assert all(torch.equal(value, other[name]) for name, value in results[0].items())
    assert_same(results[-1], results[0], 1e-5)


def test_the_form_in_a_fixed_order_is_chosen_by_torchs_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = build_small()
    backward = operator.directions["backward"]
    atomic = ContractionCudaSchedule(1, "element", sums="memory", adds="atomic")
    monkeypatch.setitem(operator.schedules, "backward", atomic)
    monkeypatch.setattr("kernelgen.ops.symmetric_contraction.device_facts", lambda device: cuda_facts("sm_90"))
    assert operator.spec(backward).schedule == atomic
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert operator.spec(backward).schedule == ContractionCudaSchedule(0, "element", sums="memory", adds="rows")


def test_no_result_is_left_to_chance() -> None:
    """Every element of an output is written, also with nodes of elements that occur once."""
    operator, elements, given = build_small(), torch.tensor([1, 0, 1, 1, 2]), operands(SMALL, 5, 4)
    for direction in (*operator.directions.values(), contraction_double_backward("w", "xwg")):
        found = operator.run(direction, given, elements, poison=True)
        assert set(found) == set(direction.outputs)
        assert all(value.isfinite().all() for value in found.values())
        assert "w" not in found or (direction.tangents == "w") is not bool(found["w"][2].any())
        assert "w" not in found or not found["w"][3].any()


@pytest.mark.parametrize("nodes_per_task", [1, 4, 8])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sums_by_element(dtype: torch.dtype, nodes_per_task: int) -> None:
    """Row task + element of each task's sums; with elements that never occur, the last one among them."""
    for elements in (some_elements(24, 7), torch.full((24,), 6), torch.zeros(1, dtype=torch.int64)):
        spans, perm = order_by("elements", elements, 7)
        values = torch.randn(len(elements), 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
            dtype
        )
        rows = torch.zeros(-(-len(elements) // nodes_per_task) + 7, 2, dtype=dtype)
        for place, node in enumerate(perm.tolist()):
            rows[place // nodes_per_task + int(elements[node])] += values[node]
        wanted = torch.zeros(7, 2, dtype=dtype).index_add_(0, elements, values)
        for order in (spans, spans.flip(0)):  # a GPU has the longest first
            torch.testing.assert_close(sums_by_element(rows, order, nodes_per_task), wanted, rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_sums_by_element_on_a_gpu_are_the_hosts() -> None:
    """Rows that no task writes are not read."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        for nodes, count, of_task, columns in ((1000, 89, 8, 640), (1000, 1, 3, 70), (21, 89, 1, 129)):
            elements = some_elements(nodes, count)
            spans, perm = order_by("elements", elements, count)
            rows = torch.randn(-(-nodes // of_task) + count, columns, dtype=dtype)
            is_written = torch.zeros(len(rows), dtype=torch.bool)
            is_written[torch.arange(nodes) // of_task + elements[perm.long()]] = True
            wanted = sums_by_element(torch.where(is_written[:, None], rows, 0.0), spans, of_task)
            on_device = torch.where(is_written[:, None], rows, torch.nan).cuda()
            found = [sums_by_element(on_device, spans.flip(0).cuda(), of_task) for _ in range(2)]
            assert torch.equal(*found)
            torch.testing.assert_close(found[0].cpu(), wanted, rtol=0, atol=tolerance)
