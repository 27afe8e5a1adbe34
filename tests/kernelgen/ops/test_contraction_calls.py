"""Calls of a symmetric contraction: strided inputs, no nodes, errors for bad input, copies and texts."""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contraction_cases import SMALL, assert_same, build_small, derivatives, operands, plain, some_elements
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import kernelgen
from kernelgen.arithmetic.contraction import contraction_backward, contraction_double_backward
from kernelgen.errors import InputError, ProblemError, ScheduleError
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.kernels.symmetric_contraction import ContractionCudaSchedule, ContractionHostSchedule
from kernelgen.ops.symmetric_contraction import build_contraction, rebuild_contraction
from kernelgen.problem.other_kinds import ContractionProblem


def test_strided_misaligned_and_inference_inputs() -> None:
    operator, elements = build_small(), some_elements(8, 3)
    x, w, g = (operands(SMALL, 8, 3)[name] for name in "xwg")
    wanted = operator(x, w, elements)
    odd = torch.empty(w.numel() + 1, dtype=w.dtype)[1:].view_as(w).copy_(w)
    assert odd.data_ptr() % 16 and not x.t().contiguous().t().is_contiguous()
    assert torch.equal(operator(x.t().contiguous().t(), odd, torch.stack([elements, elements], 1)[:, 0]), wanted)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(operator(leaf, w, elements), leaf, g.t().contiguous().t())
    assert torch.equal(first, operator.run(contraction_backward("x"), {"x": x, "w": w, "g": g}, elements)["x"])
    (ones,) = torch.autograd.grad(operator(leaf, w, elements).sum(), leaf)  # a cotangent without strides
    assert torch.equal(
        ones, operator.run(contraction_backward("x"), {"x": x, "w": w, "g": torch.ones_like(g)}, elements)["x"]
    )
    with torch.inference_mode():
        made_there = elements.clone()
        assert torch.equal(operator(x, w, made_there), wanted)
    assert torch.equal(operator(x, w, made_there), wanted)
    assert_same(
        operator.run(contraction_backward(), {"x": x, "w": w, "g": g}, made_there),
        operator.run(contraction_backward(), {"x": x, "w": w, "g": g}, elements),
        0.0,
    )


@pytest.mark.parametrize("rows", [0, 3])
def test_no_nodes(rows: int) -> None:
    operator, elements = build_small(), torch.zeros(0, dtype=torch.int64)
    x = torch.zeros(0, operator.widths["x"], dtype=torch.float64, requires_grad=True)
    w = torch.ones(rows, operator.num_weights, 3, dtype=torch.float64, requires_grad=True)
    out = operator(x, w, elements)
    assert out.shape == (0, operator.widths["g"])
    first = torch.autograd.grad(out.sum(), (x, w), create_graph=True)
    assert [grad.shape for grad in first] == [x.shape, w.shape] and not first[1].any()
    second = torch.autograd.grad(first[0].sum() + first[1].sum(), (x, w))
    assert [grad.shape for grad in second] == [x.shape, w.shape] and not second[1].any()


def test_no_polynomial() -> None:
    operator = build_contraction(ContractionProblem("1o", "0o", 1, 3), dtype=torch.float64)
    x, w = torch.ones(2, 9, dtype=torch.float64, requires_grad=True), torch.ones(2, 0, 3, dtype=torch.float64)
    out = operator(x, w.requires_grad_(), torch.tensor([1, 0]))
    first = torch.autograd.grad(out.sum(), (x, w))
    assert not out.any() and not first[0].any() and first[1].shape == w.shape


def inputs() -> dict[str, torch.Tensor]:
    given = operands(SMALL, 4, 2)
    return {"x": given["x"], "w": given["w"], "elements": torch.tensor([1, 0, 1, 1])}


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"x": torch.zeros(4, 12)}, r"x is torch.float32 \(4, 12\) on cpu; expected torch.float64 \(4, 12\) on cpu"),
        ({"x": torch.zeros(4, 11).double()}, r"x is torch.float64 \(4, 11\) on cpu; expected torch.float64 \(4, 12\)"),
        ({"x": torch.zeros(12).double()}, r"x is torch.float64 \(12,\) on cpu; expected torch.float64 \(nodes, 12\)"),
        ({"x": torch.tensor(1.0).double()}, r"x is torch.float64 \(\) on cpu; expected torch.float64 \(nodes, 12\)"),
        (
            {"w": torch.zeros(2, 4, 3).double()},
            r"w is torch.float64 \(2, 4, 3\).*expected torch.float64 \(elements, 5, 3\)",
        ),
        ({"w": torch.zeros(5, 3).double()}, r"w is torch.float64 \(5, 3\)"),
        ({"w": torch.zeros(2, 5, 3)}, r"w is torch.float32 \(2, 5, 3\) on cpu; expected torch.float64 \(2, 5, 3\)"),
        ({"w": torch.zeros(2, 5, 3, device="meta").double()}, "w is torch.float64 .* on meta; expected .* on cpu"),
        (
            {"elements": torch.zeros(3).long()},
            r"elements is torch.int64 \(3,\); expected int32 or int64 \(4,\), one for",
        ),
        ({"elements": torch.zeros(4)}, r"elements is torch.float32 \(4,\); expected int32 or int64"),
        ({"elements": torch.zeros(4, 1).long()}, r"elements is torch.int64 \(4, 1\); expected"),
        ({"elements": torch.zeros(4, device="meta").long()}, "elements is on meta, x on cpu; move one of them"),
        ({"elements": [1, 0, 1, 1]}, "elements is of type list; expected a tensor of int32 or int64.*torch.as_tensor"),
        ({"elements": torch.tensor([1, 0, 2, 0])}, r"elements are 0\.\.2; w has 2 rows: expected 0\.\.1"),
        ({"elements": torch.tensor([1, -1, 0, 0])}, r"elements are -1\.\.1; w has 2 rows: expected 0\.\.1"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_small()(**(inputs() | changed))


def test_cotangents_and_tangents_that_do_not_fit_are_refused() -> None:
    operator, elements, given = build_small(), torch.tensor([1, 0, 1, 1]), operands(SMALL, 4, 2)
    for name, direction in (("g", contraction_backward()), ("tx", contraction_double_backward())):
        wrong = {**given, name: given[name][:3]}
        with pytest.raises(InputError, match=rf"{name} is torch.float64 \(3, 12\) on cpu; expected .* \(4, 12\)"):
            operator.run(direction, wrong, elements)
    with pytest.raises(InputError, match=r"tw is None; expected torch.float64 \(2, 5, 3\)"):
        operator.run(contraction_double_backward("xw"), {**given, "tw": None}, elements)


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # noqa: ANN001, ANN204
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("direction", [contraction_backward("x"), contraction_backward()], ids=lambda d: d.text)
@pytest.mark.parametrize("level", [forward_ad.dual_level, _Watching], ids=["forward mode", "a dispatch mode"])
def test_elements_are_checked_where_graphs_are_not_recognised(level: type, direction: object) -> None:
    """The kernel would write outside of its buffers."""
    operator, given = build_small(), operands(SMALL, 4, 2)
    for elements in (torch.tensor([1, 0, 2, 0]), torch.tensor([1, 0, -1, 0])):
        with level(), pytest.raises(InputError, match="elements are .*; w has 2 rows"):
            operator.run(direction, given, elements)


def test_elements_changed_in_place_are_noticed() -> None:
    operator, elements, given = build_small(), some_elements(9, 2), operands(SMALL, 9, 2)
    for _ in range(2):
        found = operator.run(contraction_backward(), given, elements)
        same = functools.partial(plain, SMALL, elements=elements.clone())
        wanted = derivatives(same, given)
        assert_same(found, {slot: wanted[slot] for slot in "xw"})
        elements.copy_(1 - elements)
    elements[3] = 2
    with pytest.raises(InputError, match=r"elements are 0\.\.2"):
        operator.run(contraction_backward(), given, elements)
    x, w = given["x"].requires_grad_(), given["w"].requires_grad_()
    elements[3] = 1
    out = operator(x, w, elements)
    elements.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_operator_comes_back_from_its_text() -> None:
    schedules = {"backward": ContractionHostSchedule(4, "element", channel_block=1)}
    operator = build_small(schedule=schedules, layout="mul_ir")
    assert rebuild_contraction(operator.text) is operator
    assert pickle.loads(pickle.dumps(operator)) is operator and copy.deepcopy(operator) is operator
    assert operator.schedules["backward"] == schedules["backward"] and set(operator.schedules) == set(
        operator.directions
    )
    assert SMALL.key in repr(operator) and "mul_ir" in repr(operator)
    assert operator.resources("backward")["code_bytes"] > 0
    assert operator.source("backward").startswith(f"// problem    {SMALL.key}\n")
    with pytest.raises(ProblemError, match="direction is 'sideways'"):
        operator.source("sideways")


def test_another_process_runs_the_op_from_the_text() -> None:
    operator = build_small()
    ones = "torch.ones(1, 12).double(), torch.ones(1, 5, 3).double(), torch.zeros(1).long()"
    program = f"import torch, kernelgen; print(torch.ops.equitune.sc_forward({ones}, {operator.text!r}).tolist())"
    environment = os.environ | {"PYTHONPATH": str(Path(kernelgen.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    arguments = (torch.ones(1, 12).double(), torch.ones(1, 5, 3).double(), torch.zeros(1).long())
    # The other process compiles with the flags that users have: its sums may round otherwise.
    values = torch.tensor(json.loads(done.stdout), dtype=torch.float64)
    torch.testing.assert_close(values, operator(*arguments), rtol=1e-12, atol=1e-12)


def test_what_is_no_operator() -> None:
    with pytest.raises(InputError, match="dtype is torch.float16; expected torch.float32 or torch.float64"):
        build_small(dtype=torch.float16)
    with pytest.raises(ScheduleError, match=r"layout is 'channels'; expected one of \('mul_ir', 'ir_mul'\)"):
        build_small(layout="channels")
    with pytest.raises(ScheduleError, match=r"schedules are named \['sideways'\]"):
        build_small(schedule={"sideways": ContractionHostSchedule()})
    with pytest.raises(ScheduleError, match="the schedule is a HostSchedule; expected a ContractionSchedule"):
        build_small(schedule=HostSchedule())
    with pytest.raises(ScheduleError, match="a cuda schedule cannot run on"):
        build_small(schedule=ContractionCudaSchedule())
