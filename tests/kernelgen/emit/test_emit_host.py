"""The host emitter without operators: kernels launched with only the buffers that a direction names."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from reference import Case, expected, make_case, relative_error, relayout

from kernelgen.arithmetic.directions import DIRECTIONS, Direction, backward, forward
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.kernels.dispatch import make_plan
from kernelgen.kernels.product.emit import emit_host
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime.graph import edge_order
from kernelgen.runtime.kernel import load_kernel

MACE = TensorProductProblem.channelwise("128x0e+128x1o", "0e+1o+2e+3o", "0e+1o+2e+3o")
SMALL = TensorProductProblem.channelwise("5x0e+5x1o", "0e+1o", "0e+1o+2e")
# Two paths into one block, a block of either side without any path, and unequal multiplicities.
UNEVEN = TensorProductProblem.from_instructions(
    "6x1o+3x0e+4x2e+2x0o",
    "1x0e+1x1o",
    "7x0e+6x1o+3x1o+6x0e",
    [(0, 0, 1, "uvu", True), (0, 1, 3, "uvu", True), (0, 0, 1, "uvu", True), (1, 1, 2, "uvu", True)],
)
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def many_cores() -> DeviceFacts:
    """This machine's facts, with enough cores for four threads to be legal anywhere."""
    return dataclasses.replace(device_facts("cpu"), units=8)


def spec_of(
    problem: TensorProductProblem,
    direction: Direction,
    schedule: HostSchedule | None = None,
    *,
    operation: str = "conv",
    dtype: str = "float64",
    layout: str = "mul_ir",
    index: str = "int64",
) -> Spec:
    groups = len({path.mul for path in problem.paths}) or 1
    schedule = schedule or HostSchedule(path_groups=groups, edges_per_chunk=4, threads=4)
    return Spec(problem, direction, schedule, operation, dtype, layout, index, many_cores())


def launch(spec: Spec, case: Case) -> dict[str, torch.Tensor]:
    """Outputs in float64 and mul_ir; every buffer that the direction does not name is null, others start as NaN."""
    kernel, problem, dtype = load_kernel(spec), spec.problem, getattr(torch, spec.dtype)
    irreps = {"x": problem.irreps_in1, "g": problem.irreps_out}

    def convert(name: str) -> torch.Tensor:
        rows = case.tensors[name]
        if spec.layout == "ir_mul" and name[-1] in irreps:
            rows = relayout(rows, irreps[name[-1]], to_ir_mul=True)
        return rows.to(dtype).contiguous()

    buffers = {name: convert(name) for name in spec.direction.operands}
    outputs = {slot: torch.empty_like(case.tensors[slot], dtype=dtype) for slot in spec.direction.outputs}
    for slot, rows in outputs.items():
        rows.fill_(0.0 if f"out_{slot}" in kernel.plan.zeroed else torch.nan)
        if slot in spec.direction.live_outputs:
            buffers[f"out_{slot}"] = rows
    edges = len(case.tensors["y"])
    if case.sender is not None and case.receiver is not None:
        index = getattr(torch, spec.index)
        buffers |= {"sender": case.sender.to(index), "receiver": case.receiver.to(index)}
        if kernel.plan.owner:
            order = edge_order(case.receiver, case.num_out)
            buffers["spans"] = order.spans
            if order.perm is not None:
                buffers["perm"] = order.perm
    kernel.launch(buffers, edges, len(case.tensors["x"]), case.num_out)
    if spec.layout == "ir_mul":
        for slot in set(outputs) & set(irreps):
            outputs[slot] = relayout(outputs[slot], irreps[slot], to_ir_mul=False)
    return {slot: rows.double() for slot, rows in outputs.items()}


def assert_matches(spec: Spec, case: Case) -> None:
    wanted = expected(case, spec.direction.name)
    found = launch(spec, case)
    errors = {slot: relative_error(rows, wanted[slot]) for slot, rows in found.items() if rows.numel()}
    assert max(errors.values(), default=0.0) < TOLERANCE[spec.dtype], f"{spec.direction.text}: {errors}"


def test_source_is_deterministic_and_says_what_it_is() -> None:
    plan = make_plan(spec_of(MACE, forward(), HostSchedule(path_groups=2)))
    text = emit_host(plan).text
    assert text == emit_host(dataclasses.replace(plan)).text
    opening = text.splitlines()[:4]
    assert MACE.key in opening[1]
    assert "forward:->g" in opening[2]
    assert plan.spec.schedule.key in opening[3]
    assert "path 3: 128x1o x 1x0e -> 128x1o, weights 384..511" in text
    assert text.count('extern "C"') == 1
    assert '#include "' not in text, "the text must be complete"


def test_each_row_is_declared_only_where_it_is_read() -> None:
    """dF/dw needs x, y and g; a kernel that named w would read through a null pointer."""
    text = emit_host(make_plan(spec_of(SMALL, backward("w")))).text
    assert "reads_w = false" in text and "edge.w +" not in text
    assert "reads_g = true" in text and "edge.g +" in text


@pytest.mark.parametrize("outputs", ["x", "y", "w", "xy"])
@pytest.mark.parametrize("accumulate", ["registers", "atomics"])
def test_only_named_buffers_are_touched(outputs: str, accumulate: str) -> None:
    schedule = HostSchedule(accumulate=accumulate, path_groups=3, channel_block=4, edges_per_chunk=2, threads=4)
    assert_matches(spec_of(SMALL, backward(outputs), schedule), make_case(SMALL, "conv"))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("form", ["conv mul_ir registers", "conv ir_mul atomics", "plain mul_ir registers"])
def test_blocks_without_paths_and_shared_blocks(direction: str, form: str) -> None:
    operation, layout, accumulate = form.split()
    schedule = HostSchedule(accumulate=accumulate, path_groups=4, channel_block=4, edges_per_chunk=2, threads=4)
    spec = spec_of(UNEVEN, DIRECTIONS[direction], schedule, operation=operation, layout=layout, index="int32")
    assert_matches(spec, make_case(UNEVEN, operation))


@pytest.mark.parametrize(("mul", "block"), [(1, 16), (3, 4), (23, 8), (89, 64)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_channels_left_over_by_the_vectors(mul: int, block: int, dtype: str) -> None:
    problem = TensorProductProblem.channelwise(f"{mul}x1o", "1o", "0e+1e+2e")
    schedule = HostSchedule(channel_block=block, threads=4)
    assert_matches(spec_of(problem, backward(), schedule, dtype=dtype), make_case(problem, "conv"))


def test_locks_hold_when_all_threads_meet_at_few_nodes() -> None:
    case = make_case(SMALL, "conv", edges=3000, nodes=2, num_out=3)
    schedule = HostSchedule(accumulate="atomics", edges_per_chunk=1, channel_block=4, threads=4)
    for direction in (forward(), backward()):
        assert_matches(spec_of(SMALL, direction, schedule), case)


def test_shared_weights_sum_over_all_threads() -> None:
    problem = dataclasses.replace(SMALL, shared_weights=True)
    case = make_case(problem, "conv", edges=500)
    assert_matches(spec_of(problem, backward("w")), case)


@pytest.mark.parametrize("block", [4, 8, 16])
def test_weight_gradients_larger_than_the_caches(block: int) -> None:
    """Above 16 MiB they are written past the caches, aligned pieces and others."""
    problem = TensorProductProblem.channelwise("64x0e+3x1o", "0e+1o", "0e+1o")
    edges = (16 << 20) // (8 * problem.weight_numel) + 100
    schedule = HostSchedule(channel_block=block, path_groups=2, threads=4)
    assert_matches(spec_of(problem, backward("w"), schedule), make_case(problem, "conv", edges=edges))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("accumulate", ["registers", "atomics"])
def test_no_edges_at_all(direction: str, accumulate: str) -> None:
    schedule = HostSchedule(accumulate=accumulate, channel_block=4, threads=4)
    found = launch(spec_of(SMALL, DIRECTIONS[direction], schedule), make_case(SMALL, "conv", edges=0))
    assert not any(rows.any() for rows in found.values()), "sums over no edges are zero, also where NaN stood"


@pytest.mark.parametrize("operation", ["conv", "plain"])
def test_no_paths_at_all(operation: str) -> None:
    problem = TensorProductProblem.from_instructions("4x0e", "0e+1o", "3x1o", [])
    found = launch(spec_of(problem, DIRECTIONS["double_backward"], operation=operation), make_case(problem, operation))
    assert found["x"].shape[1] == 4 and found["g"].shape[1] == 9
    assert not any(rows.any() for rows in found.values())
