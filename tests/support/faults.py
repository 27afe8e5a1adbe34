"""Puts real faults into the kernel text of chosen schedules, in the worker's process; everything else is real."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autotune.measure.timing import Timing, timing_of
from autotune.measure.trial import TrialJob, TrialSession, TrialSetting, free_memory
from kernelgen.kernels.source import Source
from kernelgen.runtime import kernel as launch

# By fault: the recorded state of its trial.
STATES = {
    "reads far out of bounds": ("crashed", "launch"),
    "reads next to an operand": ("wrong", "wrong"),
    "never ends": ("timeout", "timeout"),
    "does not compile": ("compile", "compile"),
    "exhausts memory": ("memory", "memory"),
    "is wrong from the second launch on": ("wrong", "wrong"),
    "kills its process": ("crashed", "crashed"),
}
# Inserted at the beginning and at the end of the kernel's body.
HOST = {
    "reads far out of bounds": (
        "volatile char byte = static_cast<const volatile char*>(x)[1LL << 46]; (void)byte;",
        "",
    ),
    "reads next to an operand": ("", "static_cast<T*>(out_g)[0] += static_cast<const T*>(x)[-1];"),
    "never ends": ("for (volatile int turn = 1; turn;) {}", ""),
    "does not compile": ("this is not C++;", ""),
    "is wrong from the second launch on": (
        "",
        "static int launches = 0; if (launches++ > 0) static_cast<T*>(out_g)[0] = T(1e6);",
    ),
}
CUDA = {
    "reads far out of bounds": "if (x[1LL << 40] == (Real)1) return;",
    "reads next to an operand": "if (blockIdx.x == 0 && x[-1] != x[-1]) return;",
    "never ends": "for (;;) __nanosleep(1000);",
    "does not compile": "this is not C++;",
    "is wrong from the second launch on": (
        "__shared__ unsigned launch; if (threadIdx.x == 0) launch = blockIdx.x ? 0u : atomicAdd(&launches, 1u);"
        " __syncthreads(); if (launch > 0u) return;"
    ),
}


def spoiled(source: Source, fault: str) -> Source:
    """The source with a fault."""
    text, host = source.text, source.language != "cuda"
    declared = "" if host else "__device__ unsigned launches;\n"
    entry = text.index('extern "C"')
    begin = text.index("{\n", text.index("equitune_kernel(", entry)) + 2
    end = text.rindex("}")
    first, last = HOST.get(fault, ("", "")) if host else (CUDA.get(fault, ""), "")
    body = f"{first}\n{text[begin:end]}{last}\n"
    return dataclasses.replace(source, text=text[:entry] + declared + text[entry:begin] + body + text[end:])


def cost_us(schedule: Any) -> float:
    """A computed time instead of a measured one, so that two studies can be compared exactly."""
    return float(100 + sum(schedule.key.encode()) % 97)


@dataclass(frozen=True)
class FaultySetting(TrialSetting):
    """faults: by key of the schedule."""

    faults: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def open(self) -> TrialSession:
        right_emit, right_load = launch.emit, launch.Kernel._load

        def emit(plan: Any) -> Source:
            fault = self.faults.get(plan.spec.schedule.key)
            return right_emit(plan) if fault is None else spoiled(right_emit(plan), fault)

        def load(kernel: Any) -> Any:
            fault = self.faults.get(kernel.plan.spec.schedule.key)
            if fault == "exhausts memory":
                return lambda *_: torch.empty(1 << 46, dtype=torch.uint8, device=self.device)
            if fault == "kills its process":
                return lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            return right_load(kernel)

        def timing(session: TrialSession, operator: Any, job: TrialJob) -> Timing:
            session.run(operator, job.direction)()
            return timing_of([cost_us(job.schedule)] * 10)

        launch.emit, launch.Kernel._load = emit, load  # type: ignore[method-assign]
        TrialSession._timing = timing  # type: ignore[method-assign]
        free_memory(self.device)
        return TrialSession(self)
