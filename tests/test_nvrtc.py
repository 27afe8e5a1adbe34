"""The CUDA text of every suite problem compiles, without a GPU, for the architectures that users have."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.config import load_problems
from kernelgen.compile import compile_source
from kernelgen.device import cuda_facts
from kernelgen.direction import DIRECTIONS
from kernelgen.emit import emit
from kernelgen.plan import Spec, default_schedule, make_plan
from kernelgen.schedule import CudaSchedule

SUITE = load_problems()


# Architectures differ in the header only (vector atomics), so the slowest kernels compile once.
SLOW = {"nequip-benzene", "sevennet-l3i5", "batmobile-l3", "nequip-oam-l"}
CASES = [
    (name, direction, arch)
    for name in SUITE
    for direction in DIRECTIONS
    for arch in ("sm_80", "sm_90", "sm_100")
    if arch == "sm_90" or direction == "forward" or (direction == "backward" and name not in SLOW)
]


@pytest.mark.parametrize(("name", "direction", "arch"), CASES)
def test_default_schedule_compiles(name: str, direction: str, arch: str) -> None:
    facts = cuda_facts(arch)
    spec = Spec(SUITE[name], DIRECTIONS[direction], CudaSchedule(), "conv", "float32", "mul_ir", "int64", facts)
    plan = make_plan(dataclasses.replace(spec, schedule=default_schedule(spec)))
    resources = compile_source(emit(plan), facts).resources
    assert 0 < resources["registers"] <= 255
    # the default schedule keeps its sums in registers: a few spilled words are noise, more is a wrong estimate
    assert resources["spill_bytes"] <= 128
