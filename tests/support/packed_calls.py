"""Calls of Equitune's torch ops in all their forms, for the C++ library that runs them from packs."""

from __future__ import annotations

from typing import Any

import reference
import torch
from contraction_cases import SMALL, build_small, operands, some_elements
from operator_cases import operator, problem
from pair_problems import of_mode

from kernelgen import build_family
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule
from kernelgen.ops.harmonics import build_harmonics
from kernelgen.ops.product import build
from kernelgen.packs.write import Call
from kernelgen.problem.other_kinds import HarmonicsProblem

# An op's name and arguments; the last is the operator's text.
Given = tuple[str, list[Any]]
_SECOND = (("xyw", "xywg"), ("y", "xwg"), ("w", "xg"))


def of_operator(
    op: Any,
    case: reference.Case,
    index: torch.dtype = torch.int64,
    ordered: bool = False,
    device: str = "cpu",
) -> list[Given]:
    """Value, first and second gradients of an operator on a case."""
    t = {name: tensor.to(device, op.dtype) for name, tensor in case.tensors.items()}
    ends = [None if end is None else end.to(device, index) for end in (case.sender, case.receiver)]
    order: list[Any] = [None] * 4
    if ordered:
        order = list(op.order(*ends, t["x"].shape[0], case.num_out))
    rest = [*ends, *order, case.num_out]
    xyw = [t[name] for name in "xyw"]
    calls: list[Given] = [("tp_forward", [*xyw, *rest, op.text])]
    calls += [("tp_backward", [*xyw, t["g"], *rest, outputs, op.text]) for outputs in ("xyw", "y", "xw", "x")]
    for tangents, outputs in _SECOND:
        given = [t["t" + slot] if slot in tangents else None for slot in "xyw"]
        calls.append(("tp_double_backward", [*xyw, t["g"], *given, *rest, outputs, op.text]))
    return calls


def family() -> Any:
    """Two schedules: edges by receiver for more than about 16 edges, else atomics."""
    both = (HostSchedule(accumulate=how) for how in ("registers", "atomics"))
    members = [build(problem(), schedule, dtype=torch.float64) for schedule in both]
    return build_family(members, [[1]] * 4 + [[0]])


def products() -> list[Given]:
    """Calls of products in every form that the runtime tells apart."""
    case = reference.make_case
    calls = of_operator(operator(), case(problem(), "conv"))
    calls += of_operator(operator(), case(problem(), "conv", seed=1), ordered=True)
    calls += of_operator(operator("atomics"), case(problem(), "conv"), torch.int32)
    calls += of_operator(operator("unfused"), case(problem(), "conv"))
    calls += of_operator(operator(operation="plain"), case(problem(), "plain"))
    calls += of_operator(operator(shared=True), case(problem(shared=True), "conv"))
    exact = build(problem(), dtype=torch.float32, deterministic=True)
    calls += of_operator(exact, case(problem(), "conv"))
    by_sender = build(problem(), HostSchedule(order="sender"), dtype=torch.float64)
    calls += of_operator(by_sender, case(problem(), "conv"))
    calls += of_operator(build(of_mode("uvw"), dtype=torch.float64), case(of_mode("uvw"), "conv"))
    shared = of_mode("uvw", shared=True)
    calls += of_operator(build(shared, operation="plain", dtype=torch.float64), case(shared, "plain"))
    for edges in (5, 40):
        calls += of_operator(family(), case(problem(), "conv", edges=edges))
        nodes = case(problem(), "conv", edges=edges).receiver
        calls.append(("tp_order", [nodes, 6, 6, "receiver", family().text]))
    return calls


def harmonics(kind: str = "cpu", device: str = "cpu") -> list[Given]:
    op = build_harmonics(HarmonicsProblem((0, 1, 2, 3), "component", True), dtype=torch.float64, device=kind)
    v, g, t = (torch.randn(9, width, dtype=torch.float64).to(device) for width in (3, op.dim_out, 3))
    second = [("sh_double_backward", [v, g, t, outputs, op.text]) for outputs in ("xg", "x", "g")]
    return [("sh_forward", [v, op.text]), ("sh_backward", [v, g, op.text]), *second]


def contractions(kind: str = "cpu", device: str = "cpu") -> list[Given]:
    op, elements = build_small(device=kind), some_elements(7, 3).to(device)
    t = {name: tensor.to(device) for name, tensor in operands(SMALL, 7, 3).items()}
    calls: list[Given] = [("sc_forward", [t["x"], t["w"], elements, op.text])]
    calls.append(("sc_backward", [t["x"], t["w"], t["g"], elements, "x", op.text]))
    calls.append(("sc_backward", [t["x"], t["w"], t["g"], elements.int(), "x", op.text]))
    return [*calls, ("sc_double_backward", [*(t[n] for n in ("x", "w", "g", "tx")), None, elements, "xg", op.text])]


def call_of(given: Given) -> Call:
    """What a pack needs to know of a call."""
    op, arguments = given
    outputs = arguments[-2] if op.endswith("backward") and op != "sh_backward" else ""
    tangents = ""
    if op == "tp_double_backward":
        tangents = "".join(slot for slot, tangent in zip("xyw", arguments[4:7], strict=True) if tangent is not None)
    elif op == "sc_double_backward":
        tangents = "".join(slot for slot, tangent in zip("xw", arguments[3:5], strict=True) if tangent is not None)
    return Call(op, arguments[-1], tangents, outputs)


def on_a_gpu(device: str) -> list[Given]:
    """Calls of kernels for a GPU in every form that is launched otherwise; tensors are on ``device``."""
    case = reference.make_case
    both = (CudaSchedule(accumulate=how) for how in ("registers", "atomics"))
    operators = [
        build(problem(), dtype=torch.float64, device="cuda"),
        build(problem(), CudaSchedule(accumulate="atomics"), device="cuda"),
        build(problem(), CudaSchedule(accumulate="atomics", zeros="inside"), dtype=torch.float64, device="cuda"),
        build(problem(), {"forward": CudaSchedule(accumulate="atomics", zeros="cut")}, device="cuda"),
        build(problem(), CudaSchedule(fuse=False), dtype=torch.float64, device="cuda"),
        build(problem(), CudaSchedule(order="sender"), dtype=torch.float64, device="cuda"),
        build(problem(shared=True), dtype=torch.float64, device="cuda"),
        build(problem(), deterministic=True, device="cuda"),
        build(of_mode("uvw"), dtype=torch.float64, device="cuda"),
        build_family([build(problem(), schedule, device="cuda") for schedule in both], [[1]] * 4 + [[0]]),
    ]
    calls: list[Given] = []
    for op in operators:
        for ordered in (False, True):
            calls += of_operator(op, case(op.problem, "conv", edges=200), ordered=ordered, device=device)
        calls += of_operator(op, case(op.problem, "conv", edges=5), torch.int32, device=device)
    for plain in (problem(), of_mode("uvw", shared=True)):
        op = build(plain, operation="plain", dtype=torch.float64, device="cuda")
        calls += of_operator(op, case(plain, "plain"), device=device)
    return [*calls, *harmonics("cuda", device), *contractions("cuda", device)]
