"""The operator of spherical harmonics as a torch function: derivatives, shapes, errors, and its text."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harmonics_reference import vectors

import kernelgen
from kernelgen.errors import InputError, ProblemError, UnsupportedError
from kernelgen.kernels.spherical_harmonics import HarmonicsHostSchedule
from kernelgen.ops.harmonics import build_harmonics, rebuild_harmonics
from kernelgen.problem.other_kinds import HarmonicsProblem

L3 = HarmonicsProblem((0, 1, 2, 3), "component", True)
RAW = HarmonicsProblem((3, 0, 3, 1), "integral", False)


def test_gradients_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    v = torch.randn(2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    for normalize in (True, False):
        operator = build_harmonics(HarmonicsProblem((0, 1, 3), "component", normalize), dtype=torch.float64)
        assert torch.autograd.gradcheck(operator, v)
        assert torch.autograd.gradgradcheck(operator, v)


def test_third_derivatives_raise() -> None:
    operator = build_harmonics(L3, dtype=torch.float64)
    v = vectors()[:4].requires_grad_()
    for function in (operator.forward, lambda v: torch.ops.equitune.sh_forward(v, operator.text)):
        (first,) = torch.autograd.grad(function(v).square().sum(), v, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), v, create_graph=True)
        with pytest.raises(UnsupportedError, match="third derivatives.*detach the second derivatives"):
            torch.autograd.grad(second.sum(), v)


def test_only_what_a_pass_uses_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = build_harmonics(L3, dtype=torch.float64)
    v, w = vectors()[:4].requires_grad_(), torch.ones(16, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad((operator(v) * w).sum(), v, create_graph=True)
    asked, run = [], operator.op_double_backward
    monkeypatch.setattr(operator, "op_double_backward", lambda *given: asked.append(given[-1]) or run(*given))
    torch.autograd.grad(first.sum(), w, retain_graph=True)
    torch.autograd.grad(first.sum(), v, retain_graph=True)
    first.sum().backward()
    assert asked == ["g", "x", "xg"]


def test_shapes_strides_and_no_rows() -> None:
    operator = build_harmonics(L3, dtype=torch.float64)
    v = torch.randn(5, 6, 3, dtype=torch.float64)
    wanted = operator(v.reshape(30, 3))
    assert torch.equal(operator(v), wanted.reshape(5, 6, 16)) and not operator(v).requires_grad
    assert torch.equal(operator(v[0, 0]), wanted[0])
    assert torch.equal(operator(v.transpose(0, 1)), wanted.reshape(5, 6, 16).transpose(0, 1))
    assert torch.equal(operator(v.reshape(30, 3)[1::2]), wanted[1::2])
    assert torch.equal(operator(v.reshape(30, 3)[1:]), wanted[1:])  # starts between two addresses of 16 bytes
    assert torch.equal(operator(v[:1].expand(4, 6, 3)), wanted.reshape(5, 6, 16)[:1].expand(4, 6, 16))
    for shape in ((0, 3), (4, 0, 3)):
        none = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        out = operator(none)
        assert out.shape == (*shape[:-1], 16)
        (first,) = torch.autograd.grad(out.sum(), none, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), none)
        assert first.shape == second.shape == shape


@pytest.mark.parametrize(
    "v, message",
    [
        (
            torch.zeros(4, 2),
            r"v is torch.float32 \(4, 2\) on cpu; expected torch.float32 \(..., 3\) on cpu: convert it",
        ),
        (torch.tensor(1.0), r"v is torch.float32 \(\) on cpu"),
        (torch.zeros(4, 3).half(), "v is torch.float16"),
        (torch.zeros(4, 3).double(), "v is torch.float64.*build an operator for its dtype"),
        (torch.zeros(4, 3, device="meta"), r"on meta; expected torch.float32 \(..., 3\) on cpu"),
    ],
)
def test_other_vectors_are_refused(v: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_harmonics(L3)(v)


def test_rows_that_disagree_are_refused() -> None:
    operator, v = build_harmonics(L3), torch.zeros(4, 3)
    with pytest.raises(
        InputError, match=r"the cotangent g is torch.float32 \(4, 15\).*expected torch.float32 \(4, 16\)"
    ):
        operator.op_backward(v, torch.zeros(4, 15), "x")
    with pytest.raises(InputError, match=r"the tangent t is torch.float32 \(5, 3\)"):
        operator.op_double_backward(v, torch.zeros(4, 16), torch.zeros(5, 3), "xg")
    with pytest.raises(InputError, match=r"v is torch.float32 \(4, 2\)"):
        operator.op_forward(v[:, :2])
    with pytest.raises(ProblemError, match="outputs are 'gx'"):
        operator.op_double_backward(v, torch.zeros(4, 16), v, "gx")
    with pytest.raises(ProblemError, match="direction is 'sideways'"):
        operator.source("sideways")
    with pytest.raises(InputError, match="dtype is torch.float16; expected torch.float32 or torch.float64"):
        build_harmonics(L3, dtype=torch.float16)


def test_an_operator_comes_back_from_its_text() -> None:
    schedules = {"backward": HarmonicsHostSchedule(64)}
    operator = build_harmonics(RAW, schedules, dtype=torch.float64)
    assert rebuild_harmonics(operator.text) is operator
    assert pickle.loads(pickle.dumps(operator)) is operator
    assert (
        operator.schedules
        == {"forward": HarmonicsHostSchedule(), "double_backward": HarmonicsHostSchedule()} | schedules
    )
    assert RAW.key in repr(operator)
    assert operator.resources("backward")["code_bytes"] > 0


def test_another_process_runs_the_op_from_the_text() -> None:
    operator = build_harmonics(L3)
    program = (
        f"import torch, kernelgen; print(torch.ops.equitune.sh_forward(torch.ones(1, 3), {operator.text!r}).tolist())"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(kernelgen.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # The other process compiles with the flags that users have: its sums may round otherwise.
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), operator(torch.ones(1, 3)), rtol=0, atol=1e-6)
