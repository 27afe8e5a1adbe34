"""The judge is judged: e3nn in float32 passes, and every kind of damage to an output is found and sized."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from reference import e3nn_module

from autotune.measure.kinds import AutogradPasses
from autotune.measure.references import Reference, choose_nodes
from autotune.workload.config import load_graphs
from autotune.workload.kind import TOLERANCE
from autotune.workload.workload import Tensors, Workload, make_tensors, relayout
from kernelgen.arithmetic.directions import DIRECTIONS, double_backward
from kernelgen.errors import InputError
from kernelgen.problem.product import TensorProductProblem

SLOTS = {name: direction.outputs for name, direction in DIRECTIONS.items()}


def workload(operation: str = "conv", layout: str = "mul_ir", shared: bool = False, dtype: str = "float64") -> Workload:
    problem = TensorProductProblem.channelwise("3x0e+2x1o+4x1e", "0e+1o+2e", "0e+1o+2e", shared_weights=shared)
    return Workload("test", problem, operation, load_graphs()["carbon-small"], dtype, layout)


def by_e3nn(work: Workload, tensors: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    """Full outputs of every direction by e3nn in the workload's own dtype, through autograd over the whole graph."""
    problem = work.problem
    product = e3nn_module(problem).to(tensors.x.dtype)

    def call(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = relayout(x, problem.irreps_in1, work.layout, "mul_ir")
        if tensors.sender is not None and tensors.receiver is not None:
            messages = product(x[tensors.sender], y, w)
            out = messages.new_zeros(tensors.num_nodes, messages.shape[1]).index_add(0, tensors.receiver, messages)
        else:
            out = product(x, y, w)
        return relayout(out, problem.irreps_out, "mul_ir", work.layout)

    passes = AutogradPasses(call, tensors)
    outputs = {}
    for direction, slots in SLOTS.items():
        values = getattr(passes, direction)()
        outputs[direction] = dict(zip(slots, values if isinstance(values, tuple) else (values,), strict=True))
    for step, joint in zip(passes.force_step(), outputs["joint_backward"].values(), strict=True):
        torch.testing.assert_close(step, joint)
    return outputs


@pytest.mark.covering(2)
@pytest.mark.parametrize("max_edges", [100, 10**9])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("operation", ["conv", "plain"])
def test_e3nn_agrees_with_the_reference(operation: str, layout: str, shared: bool, max_edges: int) -> None:
    work = workload(operation, layout, shared)
    tensors = make_tensors(work, "cpu")
    reference = Reference(work, "cpu", tensors, max_edges=max_edges)
    for direction, outputs in by_e3nn(work, tensors).items():
        errors = reference.check(direction, outputs)
        assert set(errors) == set(SLOTS[direction])
        assert max(errors.values()) < 1e-13, (direction, errors)


def test_float32_is_within_the_tolerance_and_not_exact() -> None:
    work = workload(dtype="float32")
    tensors = make_tensors(work, "cpu")
    reference = Reference(work, "cpu", tensors)
    for direction, outputs in by_e3nn(work, tensors).items():
        errors = reference.check(direction, outputs)
        assert all(1e-9 < error < TOLERANCE["float32"] for error in errors.values()), (direction, errors)


def test_a_subset_checks_whole_nodes_and_about_as_many_edges_as_asked() -> None:
    work = workload()
    reference = Reference(work, "cpu", make_tensors(work, "cpu"), max_edges=100)
    assert 50 <= reference.checked_edges <= 200
    full = Reference(work, "cpu", make_tensors(work, "cpu"), max_edges=10**9)
    for direction in DIRECTIONS:
        for slot, value in reference.expected(direction).items():
            torch.testing.assert_close(value, full.expected(direction)[slot][reference.rows(slot)], rtol=0, atol=1e-12)


def test_every_damage_is_found() -> None:
    work = workload()
    tensors = make_tensors(work, "cpu")
    reference = Reference(work, "cpu", tensors, max_edges=100)
    good = by_e3nn(work, tensors)
    for direction, outputs in good.items():
        for slot in outputs:
            rows = reference.rows(slot)
            row = int(rows[len(rows) // 2])
            nan = outputs[slot].clone()
            outside = next(r for r in range(len(nan)) if r not in set(rows.tolist()))
            nan[outside, -1] = math.nan
            assert reference.check(direction, {slot: nan})[slot] == math.inf
            changed = outputs[slot].clone()
            changed[row] = 0.0
            assert reference.check(direction, {slot: changed})[slot] > 1e-2


def test_one_wrong_path_is_not_hidden_by_the_others() -> None:
    """The error of a small block is relative to that block: a path with a tiny gradient counts in full."""
    problem = TensorProductProblem.from_instructions(
        "4x0e+4x1o", "0e+1o", "4x0e+4x0e", [(0, 0, 0, "uvu", True, 1.0), (1, 1, 1, "uvu", True, 1e-12)],
        path_normalization="none",
    )  # fmt: skip
    work = Workload("small", problem, "conv", load_graphs()["carbon-small"], "float64")
    tensors = make_tensors(work, "cpu")
    reference = Reference(work, "cpu", tensors)
    outputs = by_e3nn(work, tensors)["backward"]
    assert max(reference.check("backward", outputs).values()) < 1e-12
    wrong = outputs["w"].clone()
    wrong[:, 4:] *= -1.0
    assert float((wrong - outputs["w"]).norm() / outputs["w"].norm()) < 1e-4
    assert reference.check("backward", {"w": wrong})["w"] == pytest.approx(2.0)


def test_a_block_without_paths_must_be_zero() -> None:
    problem = TensorProductProblem.from_instructions("2x0e", "0e", "2x0e+2x1o", [(0, 0, 0, "uvu", True)])
    work = Workload("gap", problem, "conv", load_graphs()["carbon-small"], "float64")
    tensors = make_tensors(work, "cpu")
    reference = Reference(work, "cpu", tensors)
    value = by_e3nn(work, tensors)["forward"]["g"].clone()
    assert reference.check("forward", {"g": value})["g"] < 1e-13
    value[reference.nodes[0], -1] = 1e-30
    assert reference.check("forward", {"g": value})["g"] == math.inf


def test_partial_directions() -> None:
    """Forces ask for fewer gradients: only y has a tangent, only some outputs are wanted."""
    work = workload()
    tensors = make_tensors(work, "cpu")
    only_y = dataclasses.replace(tensors, tx=torch.zeros_like(tensors.tx), tw=torch.zeros_like(tensors.tw))
    outputs = by_e3nn(work, only_y)["double_backward"]
    reference = Reference(work, "cpu", tensors)
    direction = double_backward("y", "xwg")
    assert tuple(reference.expected(direction)) == ("x", "w", "g")
    errors = reference.check(direction, {slot: outputs[slot] for slot in "xwg"})
    assert max(errors.values()) < 1e-13


@pytest.mark.parametrize("operation", ["conv", "plain"])
def test_joint_reference_is_the_slope_of_its_loss(operation: str) -> None:
    """Central differences of <ty, dF/dy> + <tg, value> along the tangents of x, y and w; the loss is linear."""
    work = workload(operation)
    tensors = make_tensors(work, "cpu")
    expected = Reference(work, "cpu", tensors, max_edges=10**9).expected("joint_backward")
    assert tuple(expected) == ("x", "y", "w")
    for slot, gradient in expected.items():
        step = 1e-3

        def loss(move: float, slot: str = slot) -> torch.Tensor:
            moved = getattr(tensors, slot) + move * getattr(tensors, "t" + slot)
            reference = Reference(work, "cpu", dataclasses.replace(tensors, **{slot: moved}), max_edges=10**9)
            value, edge_gradient = reference.expected("forward")["g"], reference.expected("edge_backward")["y"]
            return (tensors.ty * edge_gradient).sum() + (tensors.tg * value).sum()

        slope = (loss(step) - loss(-step)) / (2 * step)
        torch.testing.assert_close((gradient * getattr(tensors, "t" + slot)).sum(), slope, rtol=1e-8, atol=1e-8)


def test_wrong_shape_and_slot_are_errors() -> None:
    work = workload()
    reference = Reference(work, "cpu", make_tensors(work, "cpu"))
    with pytest.raises(InputError, match="expected"):
        reference.check("forward", {"g": torch.zeros(3, 3)})
    with pytest.raises(InputError, match="none of direction"):
        reference.check("forward", {"x": torch.zeros(3, 3)})


def test_extreme_nodes_are_always_chosen() -> None:
    receiver = torch.tensor([1] * 50 + [2] * 3)
    sender = torch.tensor([0, 2] * 25 + [3, 4, 5])
    chosen = choose_nodes(sender, receiver, 100, 10**6)
    assert len(chosen) == 100
    few = choose_nodes(sender, receiver, 100, 60).tolist()
    assert {0, 1, 99} <= set(few) and len(few) < 100


def test_tensors_are_deterministic_and_shaped_as_the_kernels_take_them() -> None:
    work = workload(shared=True)
    first, again, other = (make_tensors(work, "cpu", seed) for seed in (0, 0, 1))
    for name in ("x", "y", "w", "g", "tx", "ty", "tw", "tg"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))
    assert first.w.shape == (work.problem.weight_numel,)
    assert first.x.shape == (64, work.problem.dim_in1) and first.g.shape == (64, work.problem.dim_out)
    plain = make_tensors(workload("plain"), "cpu")
    assert plain.sender is None and plain.x.shape[0] == plain.num_edges == plain.num_nodes


def test_compulsory_bytes() -> None:
    problem = TensorProductProblem.channelwise("128x0e+128x1o", "0e+1o+2e+3o", "0e+1o+2e+3o")
    work = Workload("mace", problem, "conv", load_graphs()["mof"])
    edges, nodes = 11872, 424
    x, y, w, g = nodes * 512, edges * 16, edges * 1280, nodes * 5120
    index = 8 * edges
    assert work.compulsory_bytes("forward", edges, nodes) == 4 * (x + y + w + g) + index
    assert work.compulsory_bytes("backward", edges, nodes) == 4 * (2 * (x + y + w) + g) + index
    assert work.compulsory_bytes("edge_backward", edges, nodes) == 4 * (x + w + g + y) + index
    assert work.compulsory_bytes("double_backward", edges, nodes) == 4 * (3 * (x + y + w) + 2 * g) + index
    assert work.compulsory_bytes("joint_backward", edges, nodes) == 4 * (2 * (x + w) + 3 * y + 2 * g) + index
    plain = dataclasses.replace(work, operation="plain", dtype="float64")
    assert plain.compulsory_bytes("forward", edges, nodes) == 8 * edges * (512 + 16 + 1280 + 5120)


def test_layouts_are_inverse_and_move_the_right_elements() -> None:
    irreps = "2x0e+3x1o"
    rows = torch.arange(2 * 11, dtype=torch.float64).reshape(2, 11)
    turned = relayout(rows, irreps, "mul_ir", "ir_mul")
    assert turned[0].tolist() == [0, 1, 2, 5, 8, 3, 6, 9, 4, 7, 10]
    assert torch.equal(relayout(turned, irreps, "ir_mul", "mul_ir"), rows)
    assert relayout(rows, irreps, "ir_mul", "ir_mul") is rows
