"""A small operator in all its forms, and the reference for its value and derivatives."""

from __future__ import annotations

import reference
import torch

from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.ops.product import Operator, build
from kernelgen.problem.product import TensorProductProblem

SCHEDULES = {
    "default": None,
    "atomics": HostSchedule(accumulate="atomics"),
    "unfused": HostSchedule(fuse=False),
}
EDGES, NODES, NUM_OUT = 11, 4, 5


def problem(shared: bool = False) -> TensorProductProblem:
    """With a coupling of two signs, 1o x 1o -> 1e: all others of these degrees are positive throughout."""
    return TensorProductProblem.channelwise("2x0e+2x1o", "0e+1o", "0e+1o+1e", shared_weights=shared)


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
