"""The CUDA text of every suite problem compiles without a GPU; a small one compiles for all common architectures."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.workload.config import load_problems
from autotune.workload.known_kinds import kernel_kind
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.compile.compiler import compile_source
from kernelgen.device import cuda_facts
from kernelgen.kernels.dispatch import emit, make_plan
from kernelgen.kernels.product.plan import default_schedule
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import Spec

SUITE = load_problems()
DIRECTIONS_OF = kernel_kind("conv").passes

# For these, only the kernels of a training step on forces: all kernels would take minutes to compile.
BIG = {"nequip-benzene", "sevennet-l3i5", "batmobile-l3", "nequip-oam-l"}
CASES = [
    (name, direction, "sm_90")
    for name, problem in SUITE.items()
    if problem.is_channelwise
    for direction in (DIRECTIONS_OF["force_step"] if name in BIG else DIRECTIONS)
]
# Architectures differ in the header only (vector atomics).
CASES += [("tiny", direction, arch) for direction in DIRECTIONS for arch in ("sm_80", "sm_100")]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "direction", "arch"), CASES)
def test_default_schedule_compiles(name: str, direction: str, arch: str) -> None:
    facts = cuda_facts(arch)
    # Gradients of x alone are a deterministic convolution's first of all; summed by atomics they are in backward too.
    kernel = (SUITE[name], DIRECTIONS[direction], CudaSchedule(), "conv", "float32", "mul_ir", "int64", facts)
    spec = Spec(*kernel, deterministic=direction == "source_backward")
    plan = make_plan(dataclasses.replace(spec, schedule=default_schedule(spec)))
    resources = compile_source(emit(plan), facts).resources
    assert 0 < resources["registers"] <= 255
    # The default schedule keeps its sums in registers. A few words spill where the compiler stays at 168 registers,
    # three blocks of 128 threads a multiprocessor, instead of taking 255; more is a wrong estimate.
    assert resources["spill_bytes"] <= 256


@pytest.mark.covering(1)
@pytest.mark.parametrize("direction", DIRECTIONS_OF["force_step"])
@pytest.mark.parametrize("name", [name for name, problem in SUITE.items() if not problem.is_channelwise])
def test_products_of_pairs_compile(name: str, direction: str) -> None:
    facts = cuda_facts("sm_90")
    kernel = (SUITE[name], DIRECTIONS[direction], CudaSchedule(), "conv", "float32", "ir_mul", "int64", facts)
    spec = Spec(*kernel)
    plan = make_plan(dataclasses.replace(spec, schedule=default_schedule(spec)))
    resources = compile_source(emit(plan), facts).resources
    print(name, direction, resources, plan.shared_bytes)
    assert 0 < resources["registers"] <= 168 and resources["spill_bytes"] == 0


@pytest.mark.parametrize("ahead", ["rows", "all", "along"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_requests_ahead_compile(arch: str, ahead: str) -> None:
    facts, schedule = cuda_facts(arch), CudaSchedule(ahead=ahead, path_groups=4)
    spec = Spec(SUITE["mace-mp-first"], DIRECTIONS["backward"], schedule, "conv", "float32", "ir_mul", "int64", facts)
    assert compile_source(emit(make_plan(spec)), facts).resources["spill_bytes"] == 0


@pytest.mark.parametrize("accumulate", ["registers", "atomics"])
def test_what_is_asked_for_along_comes_behind_the_first_load(accumulate: str) -> None:
    """By the generated text; the machine code keeps to it, since each request stands behind a branch."""
    schedule = CudaSchedule(ahead="along", accumulate=accumulate, path_groups=4, warps_per_edge=4, edges_per_chunk=1)
    kernel = ("conv", "float32", "ir_mul", "int64", cuda_facts("sm_90"))
    texts = [
        emit(make_plan(Spec(SUITE["mace-mp-medium"], DIRECTIONS["backward"], form, *kernel))).text
        for form in (schedule, dataclasses.replace(schedule, ahead="all"))
    ]
    entries = [text[text.index("equitune_kernel(") :] for text in texts]
    along, at_once = ([entry.find(call) for call in ("ask_along(b.", "ask_all(b.", "span[0]")] for entry in entries)
    assert along[0] > 0 > along[1] and at_once[1] > 0 > at_once[0]
    if accumulate == "registers":
        assert along[2] < along[0] and at_once[1] < at_once[2]
