"""Kernels that form edge weights in tensor cores: lane by lane against e3nn, and compiled for each architecture."""

from __future__ import annotations

import math

import pytest
import torch
from cuda_emulator import FACTS, GUARD, emulate
from radial_cases import RadialCase, make_radial_case, rows_of
from reference import relative_error, relayout

from autotune.workload.config_tables import load_problems
from kernelgen.compile.compiler import compile_source
from kernelgen.device import cuda_facts
from kernelgen.emit.kernel_source import emit
from kernelgen.errors import ScheduleError, UnsupportedError
from kernelgen.plan.radial import radial_plan
from kernelgen.problem.tensor_product import TensorProductProblem
from kernelgen.runtime.graph import order_by
from kernelgen.schedule.radial import RadialSchedule, RadialSpec
from kernelgen.terms.directions import Direction, backward, forward

SUITE = load_problems()
# Channels that fill a warp's 16 rows in part or more than once; blocks of different multiplicities.
SMALL = TensorProductProblem.channelwise("6x0e+6x1o", "0e+1o", "0e+1o")
UNEVEN = TensorProductProblem.channelwise("18x0e+4x1o+2x2e", "0e+1o+2e", "0e+1o+2e")
CASES = {"small": SMALL, "uneven": UNEVEN}


def run(
    given: RadialCase, direction: Direction, schedule: RadialSchedule, accuracy: str = "ieee", layout: str = "ir_mul"
) -> dict[str, torch.Tensor]:
    """Outputs by name (``out``, ``x``, ``y``, ``h``) in mul_ir, from the kernel's text executed lane by lane."""
    case, problem, hidden = given.case, given.problem, given.h.shape[1]
    spec = RadialSpec(problem, hidden, direction, schedule, accuracy, layout, "int64", FACTS)
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
    emulate(plan, buffers, len(given.h), len(case.tensors["x"]), case.num_out)
    found = {}
    for slot, tensor in outputs.items():
        assert bool((tensor[-GUARD:] == 12345.0).all()), f"written past the end of {slot}"
        value = buffers[f"out_{slot}"]
        if slot in irreps and layout == "ir_mul":
            value = relayout(value, irreps[slot], to_ir_mul=False)
        found[{"w": "h", "g": "out"}.get(slot, slot)] = value
    return found


def assert_right(given: RadialCase, direction: Direction, tolerance: float, *how: object) -> None:
    wanted = given.expected()
    for name, value in run(given, direction, *how).items():  # type: ignore[arg-type]
        assert relative_error(value, wanted[name]) < tolerance, (name, relative_error(value, wanted[name]))


@pytest.mark.parametrize("tiles", RadialSchedule.choices["tiles"])
@pytest.mark.parametrize("outputs", ["", "x", "y", "w", "yw", "xyw"])
def test_lane_by_lane(outputs: str, tiles: int) -> None:
    """Receivers with up to 40 edges: less than a tile, several, more than are staged at a time; one has none."""
    schedule = RadialSchedule(warps=2, tiles=tiles)
    assert_right(make_radial_case(SMALL, 8, edges=60, num_out=4), backward(outputs) if outputs else forward(), 1e-6, schedule)
