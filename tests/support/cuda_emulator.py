"""Runs a plan's generated CUDA text on the host (see cuda_emulator.hpp), with the same buffers as on a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from reference import Case, relayout

from kernelgen.arithmetic.directions import Direction
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.kernels.dispatch import AnyPlan, emit, geometry, make_plan
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.radial.plan import RadialPlan
from kernelgen.kernels.spec import BUFFERS, Spec
from kernelgen.kernels.spherical_harmonics import HarmonicsPlan
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.runtime.graph import longest_first

FACTS = cuda_facts("sm_90")
# Elements after each output that must stay unchanged.
GUARD = 64


def emulate(
    plan: AnyPlan | HarmonicsPlan,
    buffers: dict[str, torch.Tensor],
    num_edges: int,
    num_in: int,
    num_out: int,
    held: int = 0,
) -> None:
    """Execute every lane of every block; outputs in ``buffers`` are written in place. held: see ``geometry``."""
    pointers = [buffers[name].data_ptr() if name in buffers else 0 for name in BUFFERS]
    emulate_addresses(plan, pointers, num_edges, num_in, num_out, held)


def emulate_addresses(
    plan: AnyPlan | HarmonicsPlan, addresses: Sequence[int], num_edges: int, num_in: int, num_out: int, held: int = 0
) -> None:
    """:func:`emulate` with addresses in the order of ``BUFFERS``, 0 for none."""
    flags = ("-DTENSOR_CORES",) if isinstance(plan, RadialPlan) else ()
    if isinstance(plan, RadialPlan) and plan.by_warpgroups:
        flags = (*flags, "-DWARPGROUPS")
    if plan.spec.facts.is_hip:
        flags = (*flags, f"-DHIP_WAVE={plan.spec.facts.wave}")
    function = _compiled(emit(plan).text, flags)
    pointers = (ctypes.c_void_p * len(BUFFERS))(*(address or None for address in addresses))
    blocks, threads, _ = geometry(plan, num_edges, num_in, num_out, held)
    assert blocks > 0, "a GPU refuses a grid without blocks"
    function(
        pointers,
        *(ctypes.c_longlong(n) for n in (num_edges, num_in, num_out)),
        ctypes.c_int(blocks),
        ctypes.c_int(threads),
    )


@functools.cache
def with_runtime() -> Path:
    """The emulator's header, whose functions this process has from now on."""
    shim = Path(__file__).with_name("cuda_emulator.hpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "emulator.so"
        command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-nodefaultlibs"]
        subprocess.run([*command, str(shim.with_suffix(".cpp")), "-lgcc", "-o", str(library)], check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return shim


@functools.lru_cache(maxsize=64)
def _compiled(text: str, flags: tuple[str, ...]) -> Callable[..., None]:
    """The function that executes a kernel's text."""
    with tempfile.TemporaryDirectory() as folder:
        kernel, library = Path(folder) / "kernel.inc", Path(folder) / "kernel.so"
        kernel.write_text(text)
        # Without the C libraries, which this process has anyway: linking them takes a fifth of the time.
        command = ["g++", "-x", "c++", "-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-nodefaultlibs", *flags]
        command += ["-fno-exceptions", "-fno-asynchronous-unwind-tables"]
        command.append(f'-DKERNEL_TEXT="{kernel}"')
        subprocess.run([*command, str(with_runtime()), "-lgcc", "-o", str(library)], check=True)
        return ctypes.CDLL(str(library)).emulate


def run_direction(
    case: Case,
    direction: Direction,
    operation: str,
    layout: str,
    dtype: str,
    schedule: CudaSchedule,
    deterministic: bool = False,
    harmonics: HarmonicsProblem | None = None,
    permuted: bool = False,
    facts: DeviceFacts = FACTS,
    held: int = 0,
) -> dict[str, torch.Tensor]:
    """Execute one direction in the emulator and return {slot: result in mul_ir}.

    harmonics: if given, the kernel computes them, and the case's y holds vectors. held: see ``geometry``.
    """
    problem = case.problem
    real = getattr(torch, dtype)
    spec = Spec(problem, direction, schedule, operation, dtype, layout, "int64", facts, deterministic, harmonics)
    spec = dataclasses.replace(spec, permuted=permuted)
    plan = make_plan(spec)
    irreps = {"x": problem.irreps_in1, "g": problem.irreps_out}
    buffers = {}
    for name in spec.operands:
        rows = case.tensors[name]
        if layout == "ir_mul" and name[-1] in irreps:
            rows = relayout(rows, irreps[name[-1]], to_ir_mul=True)
        buffers[name] = rows.to(real).contiguous()
    guarded: dict[str, torch.Tensor] = {}
    for slot in direction.outputs:
        started = f"out_{slot}" in plan.zeroed and schedule.zeros == "apart"
        empty = 0.0 if started else float("nan")
        shape = tuple(case.tensors[slot].shape)
        if slot == "y" and plan.partial_y:
            shape = (shape[0], plan.partial_y, shape[1])
        guarded[slot] = torch.full((math.prod(shape) + GUARD,), empty, dtype=real)
        guarded[slot][-GUARD:] = 12345.0
        buffers[f"out_{slot}"] = guarded[slot][:-GUARD].view(shape)
    edges = len(case.tensors["y"])
    if case.sender is not None and case.receiver is not None:
        buffers |= {"sender": case.sender, "receiver": case.receiver}
        by, count = (case.sender, len(case.tensors["x"])) if plan.owner == "sender" else (case.receiver, case.num_out)
        order = torch.argsort(by, stable=True)
        bounds = torch.searchsorted(by[order], torch.arange(count + 1))
        spans = torch.stack((torch.arange(count), bounds[:-1], bounds[1:]), 1).int()
        buffers |= {"perm": order.int(), "spans": longest_first(spans)}
    emulate(plan, buffers, edges, len(case.tensors["x"]), case.num_out, held)
    results = {}
    for slot in direction.outputs:
        assert bool((guarded[slot][-GUARD:] == 12345.0).all()), f"written past the end of {slot}"
        rows = buffers[f"out_{slot}"]
        if slot == "y" and plan.partial_y:
            rows = rows.sum(1)
        results[slot] = relayout(rows, irreps[slot], to_ir_mul=False) if layout == "ir_mul" and slot in irreps else rows
    return results
