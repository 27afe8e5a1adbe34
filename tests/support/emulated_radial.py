"""Kernels of fused radial convolutions where there is no GPU: their text, executed lane by lane on the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cuda_emulator import FACTS, emulate_addresses

from autotune.modules.radial import convolution
from kernelgen.ops.operator import Operator
from kernelgen.ops.radial import fused
from kernelgen.plan.planner import make_plan
from kernelgen.schedule.radial import RadialSpec


class EmulatedKernel:
    """In place of a loaded kernel. ran: the directions of all that ran."""

    ran: list[str] = []

    def __init__(self, spec: RadialSpec) -> None:
        self.plan = make_plan(spec)

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
