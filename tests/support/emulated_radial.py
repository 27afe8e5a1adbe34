"""Kernels of fused radial convolutions where there is no GPU: their text, executed lane by lane on the host."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cuda_emulator import FACTS, GUARD, emulate, emulate_addresses
from radial_cases import RadialCase, rows_of
from reference import relayout

from autotune.modules import convolution
from kernelgen.arithmetic.directions import Direction
from kernelgen.device import DeviceFacts
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.radial.plan import MARKS, RadialSchedule, RadialSpec, radial_plan
from kernelgen.ops import radial_convolution as fused
from kernelgen.ops.product import Operator
from kernelgen.runtime.graph import order_by
from kernelgen.runtime.kernel import Kernel


class EmulatedKernel:
    """In place of a loaded kernel. ran: the directions of all that ran."""

    ran: list[str] = []

    def __init__(self, spec: RadialSpec) -> None:
        self.plan = make_plan(spec)

    launch = Kernel.launch

    def run(self, pointers: Sequence[int], num_edges: int, num_in: int, num_out: int, device: int) -> None:
        self.ran.append(self.plan.spec.direction.text)
        emulate_addresses(self.plan, pointers, num_edges, num_in, num_out)


def emulate_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``FusedRadial`` on a CPU run the kernels for an H100 on the host."""
    EmulatedKernel.ran.clear()
    monkeypatch.setattr(fused, "device_facts", lambda _: FACTS)
    monkeypatch.setattr(fused, "load_kernel", functools.cache(EmulatedKernel))


def emulate_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have modules use them as well, for float32."""
    emulate_kernels(monkeypatch)

    @functools.cache
    def tuned_fused(operator: Operator, hidden: int, product: str, *_: Any) -> fused.FusedRadial | None:
        if operator.dtype is not torch.float32:
            return None
        kind = fused.ACCURACY[product]
        return fused.FusedRadial(operator.problem, hidden, kind, operator.layout, operator.device)

    monkeypatch.setattr(convolution, "tuned_fused", tuned_fused)


def run_radial(
    given: RadialCase,
    direction: Direction,
    schedule: RadialSchedule,
    accuracy: str = "ieee",
    layout: str = "ir_mul",
    marks: torch.Tensor | None = None,
    facts: DeviceFacts = FACTS,
) -> dict[str, torch.Tensor]:
    """Outputs by name (``out``, ``x``, ``y``, ``h``) in mul_ir, from the kernel's text executed lane by lane.

    marks: of rows, zeros that are left as the kernel leaves them.
    """
    case, problem, hidden = given.case, given.problem, given.h.shape[1]
    spec = RadialSpec(problem, hidden, direction, schedule, accuracy, layout, "int64", facts)
    plan = radial_plan(spec)
    irreps = {"x": problem.irreps_in1, "g": problem.irreps_out}
    rows = {"w": given.h.float(), "tw": given.matrix.float(), "y": case.tensors["y"].float()}
    buffers = {name: rows[name] for name in spec.operands if name in rows}
    for slot in set(spec.operands) & set(irreps):
        buffers[slot] = rows_of(case.tensors[slot], irreps[slot], layout)
    outputs = {}
    for slot in direction.outputs:
        shape = given.h.shape if slot == "w" else case.tensors[slot].shape
        start = 0.0 if f"out_{slot}" in plan.zeroed else math.nan
        outputs[slot] = torch.full((math.prod(shape) + GUARD,), start)
        outputs[slot][-GUARD:] = 12345.0
        buffers[f"out_{slot}"] = outputs[slot][:-GUARD].view(shape)
    assert case.sender is not None and case.receiver is not None
    spans, perm = order_by("receiver", case.receiver, case.num_out)
    buffers |= {"sender": case.sender, "receiver": case.receiver, "spans": spans}
    if perm is not None:
        buffers["perm"] = perm
    if plan.marks:
        buffers[MARKS] = torch.zeros(plan.marks, case.num_out) if marks is None else marks
    emulate(plan, buffers, len(given.h), len(case.tensors["x"]), case.num_out)
    found = {}
    for slot, tensor in outputs.items():
        assert bool((tensor[-GUARD:] == 12345.0).all()), f"written past the end of {slot}"
        value = buffers[f"out_{slot}"]
        if slot in irreps and layout == "ir_mul":
            value = relayout(value, irreps[slot], to_ir_mul=False)
        found[{"w": "h", "g": "out"}.get(slot, slot)] = value
    return found
