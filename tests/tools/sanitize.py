"""Runs compute-sanitizer over every kernel form, on a CUDA device: ``python tests/tools/sanitize.py [SHARDS]``.

It first compiles the kernels on all cores. Then SHARDS processes (4) for each of memcheck and racecheck launch them
once on small graphs. Each tensor is a separate allocation, so that accesses beyond its end are detected. Exits with 1
for a wrong access, a race in shared memory or a failed launch. Other tests check the results.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import torch
from pair_problems import MODES, of_mode
from places import load_tests

import kernelgen.kernels.product.plan
from kernelgen.arithmetic.contraction import CONTRACTION_DIRECTIONS
from kernelgen.arithmetic.directions import DIRECTIONS, fixed_order_parts
from kernelgen.compile.compiler import compile_source
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.errors import ScheduleError, UnsupportedError
from kernelgen.kernels.dispatch import emit, make_plan
from kernelgen.kernels.product.plan import default_schedule
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import AnySpec, Spec
from kernelgen.kernels.spherical_harmonics import HarmonicsCudaSchedule, HarmonicsSpec
from kernelgen.kernels.symmetric_contraction import ContractionCudaSchedule, ContractionSpec
from kernelgen.ops.symmetric_contraction import build_contraction
from kernelgen.problem.other_kinds import ContractionProblem, HarmonicsProblem
from kernelgen.runtime.call import recipe_of
from kernelgen.runtime.graph import order_by
from kernelgen.runtime.kernel import load_kernel

test_gpu = load_tests("end_to_end/test_gpu.py")
test_zeros = load_tests("kernelgen/runtime/test_zeros.py")
test_harmonics_kernel = load_tests("kernelgen/emit/test_harmonics_kernel.py")
EDGES, NODES_IN, NODES_OUT = 150, 12, 9
ELEMENTS = 5
UNIT = HarmonicsProblem((0, 1, 2, 3), "component", True)
# Channels that fill no block of threads.
CONTRACTION = ContractionProblem("0e+1o+2e", "0e+1o", 3, 20)
# dtype, layout and index type.
KINDS = (("float32", "ir_mul", "int64"), ("float64", "mul_ir", "int32"))
TOOLS = {
    "memcheck": ["--tool", "memcheck", "--report-api-errors", "no"],
    "racecheck": ["--tool", "racecheck"],
}


def channelwise(facts: DeviceFacts) -> Iterator[tuple[str, Spec]]:
    """Forms of convolutions and plain products, legal or not, with every direction."""
    waiting = {f"inside {name}": test_zeros.inside(form) for name, form in test_zeros.FORMS.items()}
    for problem, forms in ((test_gpu.MEDIUM, test_gpu.FORMS), (test_zeros.PROBLEM, waiting)):
        for name, form in forms.items():
            by_direction = form if isinstance(form, dict) else dict.fromkeys(DIRECTIONS, form)
            for direction, schedule in by_direction.items():
                operation = "conv" if schedule.fuse and not name.endswith("plain") else "plain"
                for kind in KINDS if direction == "backward" else KINDS[:1]:
                    spec = Spec(problem, DIRECTIONS[direction], schedule, operation, *kind, facts)
                    yield f"{name}, {direction}, {kind[0]}", spec
    inside = CudaSchedule(edge_operand="shared", stage_edges=8, path_groups=3)
    for direction in ("forward", "backward", "source_backward", "edge_backward"):
        spec = Spec(*(test_gpu.MEDIUM, DIRECTIONS[direction], inside, "conv", *KINDS[0], facts), harmonics=UNIT)
        yield f"harmonics inside, {direction}", spec


def special(facts: DeviceFacts) -> Iterator[tuple[str, Spec]]:
    """Sums in a fixed order, also by rows of partial sums; and shared weights, with rows of odd length."""
    for direction in ("forward", "backward", "edge_backward", "joint_backward"):
        for part in fixed_order_parts(DIRECTIONS[direction]):
            joined = CudaSchedule(warps_per_edge=4, edge_operand="shared", stage_edges=8)
            apart = CudaSchedule(edges_per_warp=2, channels_per_thread=2, path_groups=2, stage_edges=8)
            for schedule in (CudaSchedule(), joined, apart):
                spec = Spec(test_gpu.MEDIUM, part, schedule, "conv", *KINDS[0], facts, deterministic=True)
                if schedule == CudaSchedule():
                    spec = dataclasses.replace(spec, schedule=default_schedule(spec))
                yield f"deterministic, {part.text}, {spec.schedule.key}", spec
    for name, schedule in test_zeros.SHARED.items():
        for form in (schedule, test_zeros.inside(schedule)):
            kind = (DIRECTIONS["backward"], form, "conv", *KINDS[0], facts)
            yield f"shared weights {name}, zeros {form.zeros}, backward", Spec(test_zeros.ODD, *kind)


def pairs(facts: DeviceFacts) -> Iterator[tuple[str, Spec]]:
    """Every mode, with weights an edge and shared weights."""
    for mode in MODES:
        for shared, teams in ((False, 1), (True, 4)):
            schedule = CudaSchedule(accumulate="atomics", edges_per_warp=teams)
            for direction in DIRECTIONS.values():
                kind = ("conv", "float32", "ir_mul" if shared else "mul_ir", "int64")
                yield (
                    f"{mode}, shared={shared}, {direction.name}",
                    Spec(of_mode(mode, shared), direction, schedule, *kind, facts),
                )


def harmonics(facts: DeviceFacts) -> Iterator[tuple[str, HarmonicsSpec]]:
    """Every staging of rows."""
    for staging in HarmonicsCudaSchedule.choices["staging"]:
        schedule = HarmonicsCudaSchedule(block_size=32, staging=staging, stages=2 if staging == "ahead" else 1)
        for direction in test_harmonics_kernel.EACH:
            name = f"harmonics {staging}, {direction.name} {direction.outputs}"
            yield name, HarmonicsSpec(UNIT, direction, schedule, "float32", facts)


def contractions(facts: DeviceFacts) -> Iterator[tuple[str, ContractionSpec]]:
    """Every value of the knobs that are forms, with several nodes a task, the last of which has fewer."""
    for knob in ("order", "gradients", "pace", "sums"):
        for value in ContractionCudaSchedule.choices[knob]:
            for direction in CONTRACTION_DIRECTIONS.values():
                schedule = ContractionCudaSchedule(nodes_per_task=4, order="element", block_size=64)
                schedule = dataclasses.replace(schedule, **{knob: value})
                for kind in KINDS:
                    spec = ContractionSpec(CONTRACTION, direction, schedule, *kind, facts)
                    yield f"contraction {knob}={value}, {direction.name}, {kind[0]}", spec


@contextmanager
def any_registers() -> Iterator[None]:
    """Allow kernels with more estimated registers than there are: they spill, which does not matter here."""
    slack, kernelgen.kernels.product.plan.REGISTER_SLACK = kernelgen.kernels.product.plan.REGISTER_SLACK, 10.0
    try:
        yield
    finally:
        kernelgen.kernels.product.plan.REGISTER_SLACK = slack


@any_registers()
def plan_of(spec: AnySpec) -> Any:
    """The plan of a spec; None if it is not legal."""
    try:
        return make_plan(spec)
    except (ScheduleError, UnsupportedError):
        return None


def cases(facts: DeviceFacts) -> dict[str, AnySpec]:
    """The legal specs by name, each kernel once."""
    every: dict[str, AnySpec] = {}
    for kind in (channelwise, special, pairs, harmonics, contractions):
        every |= dict(kind(facts))
    plans = {name: plan_of(spec) for name, spec in every.items()}
    found = {name: every[name] for name, plan in plans.items() if plan and plan.spec.schedule == every[name].schedule}
    left_out = {name.split(",")[0] for name in every} - {name.split(",")[0] for name in found}
    assert not left_out, f"forms without a legal direction: {sorted(left_out)}"
    return found


@any_registers()
def launch(spec: AnySpec) -> None:
    """Launch a kernel once, on random operands."""
    if isinstance(spec, ContractionSpec):
        return _launch_contraction(spec)
    kernel = load_kernel(spec)
    if isinstance(spec, HarmonicsSpec):
        widths = {name: 3 if name[-1] == "x" else spec.problem.dim_out for name in ("x", "tx", "g", "out_x", "out_g")}
        return kernel.launch({name: _random(spec, EDGES, n) for name, n in widths.items()}, EDGES, EDGES, EDGES)
    plan: Any = kernel.plan
    conv = spec.operation == "conv"
    num_in, num_out = (NODES_IN, NODES_OUT) if conv else (EDGES, EDGES)
    problem = spec.problem
    shapes = {
        "x": (num_in, problem.dim_in1),
        "y": (EDGES, spec.dim_y),
        "w": (1 if problem.shared_weights else EDGES, problem.weight_numel),
        "g": (num_out, problem.dim_out),
    }
    buffers = {name: _random(spec, *shapes[name[-1]]) for name in spec.operands}
    if conv:
        buffers |= _graph(recipe_of(spec, True).order, getattr(torch, spec.index))
    for slot in spec.direction.live_outputs:
        parts = plan.partial_y if slot == "y" else 0
        buffers[f"out_{slot}"] = _random(spec, *(shapes[slot] if not parts else (EDGES, parts, spec.dim_y)))
    for name in sorted(plan.zeroed):
        buffers[name].zero_()
    kernel.launch(buffers, EDGES, num_in, num_out)


def _launch_contraction(spec: ContractionSpec) -> None:
    """By the operator, which orders nodes by element; the last element has none."""
    options: dict[str, Any] = {"dtype": getattr(torch, spec.dtype), "device": "cuda", "layout": spec.layout}
    operator = build_contraction(spec.problem, {spec.direction.name: spec.schedule}, **options)
    shapes: dict[str, tuple[int, ...]] = {slot: (EDGES, operator.widths[slot]) for slot in "xg"}
    shapes["w"] = (ELEMENTS, operator.num_weights, spec.problem.channels)
    given = {name: _random(spec, *shapes[name[-1]]) for name in (*spec.direction.operands, "w")}
    elements = torch.randint(ELEMENTS - 1, (EDGES,), dtype=getattr(torch, spec.index), device="cuda")
    operator.run(spec.direction, given, elements)


def _random(spec: AnySpec, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=getattr(torch, spec.dtype), device="cuda")


def _graph(order: str, index: torch.dtype) -> dict[str, torch.Tensor]:
    """A random graph whose last nodes have no edges. order: the end by which its edges are ordered; empty for none."""
    found = {"sender": torch.randint(NODES_IN - 2, (EDGES,), dtype=index, device="cuda")}
    found["receiver"] = torch.randint(NODES_OUT - 2, (EDGES,), dtype=index, device="cuda")
    if order:
        spans, perm = order_by(order, found[order], {"sender": NODES_IN, "receiver": NODES_OUT}[order])
        assert perm is not None
        found |= {"spans": spans, "perm": perm}
    return found


def compile_case(spec: AnySpec) -> None:
    """Compile a kernel to the cache on disk."""
    compile_source(emit(plan_of(spec)), spec.facts)


def compile_all(specs: list[AnySpec]) -> None:
    """Compile all kernels on all cores."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(compile_case, specs, chunksize=4):
            pass


def launch_share(share: int, shares: int) -> None:
    """Launch every ``shares``-th case, and wait for each."""
    for name, spec in list(cases(device_facts("cuda:0")).items())[share::shares]:
        print(name, flush=True)
        launch(spec)
        torch.cuda.synchronize()


def main(shares: int) -> int:
    """Compile, then sanitize; returns 1 if a process found something."""
    found = cases(device_facts("cuda:0"))
    compile_all(list(found.values()))
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    running = {}
    for tool, options in TOOLS.items():
        for share in range(shares):
            command = ["compute-sanitizer", *options, "--error-exitcode", "9", "--print-limit", "10"]
            command += [sys.executable, __file__, "--launch", str(share), str(shares)]
            running[tool, share] = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
    failed = 0
    for (tool, share), process in running.items():
        text, _ = process.communicate()
        last = text.rstrip().rpartition("\n")[2]
        print(f"{tool} {share + 1}/{shares}: {last}")
        if process.returncode:
            failed += 1
            print(text)
    print(f"{len(found)} kernels, {len(running)} processes, {failed} of them found something")
    return min(failed, 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--launch"]:
        launch_share(*map(int, sys.argv[2:4]))
    else:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 4))
