"""Harmonics inside the kernels of a product: host and CUDA text against e3nn in float64, and all derivatives."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable

import pytest
import torch
from cuda_emulator import run_direction
from reference import Case, make_case, relative_error, relayout
from vector_cases import PRODUCT, expected, vectors_case, without_zero_vector

from kernelgen import InputError, ProblemError, UnsupportedError
from kernelgen.arithmetic.directions import Direction, backward
from kernelgen.arithmetic.directions import forward as value
from kernelgen.compile.compiler import compile_source
from kernelgen.compile.gpu import nvrtc_version
from kernelgen.device import cuda_facts
from kernelgen.errors import ToolMissingError
from kernelgen.kernels.dispatch import emit, make_plan
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.ops.harmonics import FUSED, HarmonicProduct, build_harmonics
from kernelgen.ops.product import build
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.problem.product import TensorProductProblem

UNIT = HarmonicsProblem((0, 1, 2), "component", True)
RAW = HarmonicsProblem((0, 1, 2), "integral", False)
PASSES = {"forward": value(), "backward": backward(), "edge": backward("y"), "source": backward("x")}


@pytest.mark.parametrize("which", ["forward", "backward", "edge"])
@pytest.mark.parametrize(
    "operation, harmonics, schedule",
    [
        ("conv", UNIT, CudaSchedule(edges_per_warp=4, edge_operand="shared", stage_edges=8, order="receiver")),
        ("conv", RAW, CudaSchedule(accumulate="atomics", edge_operand="inline", edges_per_chunk=8)),
        ("conv", UNIT, CudaSchedule(edges_per_warp=8, edge_operand="basis", stage_edges=4, path_groups=2)),
        ("plain", RAW, CudaSchedule(edge_operand="shared", edges_per_chunk=4, prefetch="copy")),
    ],
    ids=["shared", "inline", "basis", "plain"],
)
def test_cuda_text_lane_by_lane(
    operation: str, harmonics: HarmonicsProblem, schedule: CudaSchedule, which: str
) -> None:
    case, direction = vectors_case(operation), PASSES[which]
    found = run_direction(case, direction, operation, "ir_mul", "float64", schedule, harmonics=harmonics)
    for slot, wanted in expected(case, harmonics, direction).items():
        pair = (without_zero_vector(slot, rows) for rows in (found[slot], wanted))
        assert relative_error(*pair) < 1e-11, slot
        if slot == "y":
            assert torch.allclose(found[slot][2], wanted[2], rtol=1e-9)


@pytest.mark.parametrize("which", ["backward", "edge"])
def test_owners_take_vectors_too(which: str) -> None:
    schedule = CudaSchedule(accumulate="owners", edges_per_chunk=2, path_groups=2, warps_per_edge=2, block_size=64)
    case, direction = vectors_case("conv"), PASSES[which]
    found = run_direction(case, direction, "conv", "ir_mul", "float64", schedule, harmonics=UNIT)
    for slot, wanted in expected(case, UNIT, direction).items():
        assert relative_error(*(without_zero_vector(slot, rows) for rows in (found[slot], wanted))) < 1e-11, slot


@pytest.mark.parametrize(
    "operation, deterministic, layout, harmonics",
    [("conv", False, "mul_ir", UNIT), ("conv", True, "ir_mul", RAW), ("plain", False, "mul_ir", RAW)],
)
def test_host_kernels(operation: str, deterministic: bool, layout: str, harmonics: HarmonicsProblem) -> None:
    case = vectors_case(operation)
    irreps = {"x": PRODUCT.irreps_in1, "g": PRODUCT.irreps_out}
    product = build(PRODUCT, operation=operation, dtype=torch.float64, layout=layout, deterministic=deterministic)
    both = HarmonicProduct(product, build_harmonics(harmonics, dtype=torch.float64))
    t = {
        name: relayout(rows, irreps[name], to_ir_mul=True) if layout == "ir_mul" and name in irreps else rows
        for name, rows in case.tensors.items()
    }
    graph = both.graph(t["x"], t["y"], case.sender, case.receiver, case.num_out, None)
    for direction in PASSES.values():
        operands = (t["x"], None, t["y"], None, t["w"], None, t["g"], None)
        found = both.run_on(graph, direction, operands, poison=True)
        for slot, wanted in expected(case, harmonics, direction).items():
            rows = found[slot]
            if layout == "ir_mul" and slot in irreps:
                rows = relayout(rows, irreps[slot], to_ir_mul=False)
            assert relative_error(without_zero_vector(slot, rows), without_zero_vector(slot, wanted)) < 1e-11, slot


def all_derivatives(call: Callable[..., torch.Tensor], case: Case) -> list[torch.Tensor]:
    """Value, gradients alone and together, and those of a loss on energy and forces, and on all first gradients."""
    inputs = [case.tensors[name].clone().requires_grad_() for name in "xyw"]
    out = call(*inputs, case.sender, case.receiver, num_out=case.num_out)
    energy = out.square().sum()
    first = torch.autograd.grad(energy, inputs, retain_graph=True)
    (alone,) = torch.autograd.grad(energy, inputs[1], retain_graph=True)
    (forces,) = torch.autograd.grad(energy, inputs[1], create_graph=True)
    of_loss = torch.autograd.grad(energy + forces.pow(3).sum(), inputs, retain_graph=True)
    every = torch.autograd.grad(energy, inputs, create_graph=True)
    return [out, *first, alone, forces, *of_loss, *torch.autograd.grad(sum(a.square().sum() for a in every), inputs)]


@pytest.mark.parametrize("fused", [True, False])
def test_all_derivatives_are_those_of_one_after_the_other(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(PRODUCT, "conv")
    case = dataclasses.replace(case, tensors=case.tensors | {"y": case.tensors["y"][:, :3]})
    product, harmonics = build(PRODUCT, dtype=torch.float64), build_harmonics(RAW, dtype=torch.float64)
    wanted = all_derivatives(
        lambda x, v, w, *edges, num_out: product(x, harmonics(v), w, *edges, num_out=num_out), case
    )
    both = pickle.loads(pickle.dumps(copy.deepcopy(HarmonicProduct(product, harmonics, FUSED if fused else ()))))
    fused_passes = []
    run_on = HarmonicProduct.run_on
    monkeypatch.setattr(
        HarmonicProduct,
        "run_on",
        lambda self, graph, direction, *rest: (
            fused_passes.append(direction.name) or run_on(self, graph, direction, *rest)
        ),
    )
    for one, other in zip(all_derivatives(both, case), wanted, strict=True):
        assert relative_error(one, other) < 1e-12
    assert set(fused_passes) == ({"forward", "backward"} if fused else set())


def test_batched_gradients_go_one_after_the_other() -> None:
    case = vectors_case("conv")
    case.tensors["y"][2] = 1.0
    both = HarmonicProduct(build(PRODUCT, dtype=torch.float64), build_harmonics(UNIT, dtype=torch.float64))
    x, v, w = (case.tensors[name].clone().requires_grad_() for name in "xyw")
    out = both(x, v, w, case.sender, case.receiver, num_out=case.num_out)
    cotangents = torch.stack([case.tensors["g"], case.tensors["tg"]])
    found = torch.autograd.grad(out, (x, v, w), cotangents, is_grads_batched=True)
    for number, cotangent in enumerate(cotangents):
        given = dataclasses.replace(case, tensors=case.tensors | {"g": cotangent})
        for slot, rows in expected(given, UNIT, backward()).items():
            assert relative_error(found["xyw".index(slot)][number], rows) < 1e-12, slot


def test_what_cannot_be_fused_runs_one_after_the_other() -> None:
    connected = TensorProductProblem.from_instructions("3x0e+2x1o", "0e+1o", "4x0e", [(0, 0, 0, "uvw", True)])
    harmonics = build_harmonics(HarmonicsProblem((0, 1), "norm", True), dtype=torch.float64)
    both = HarmonicProduct(build(connected, dtype=torch.float64), harmonics)
    assert not both.inside
    case = vectors_case("conv", connected)
    found = both(*(case.tensors[name] for name in "xyw"), case.sender, case.receiver, num_out=case.num_out)
    assert relative_error(found, expected(case, harmonics.problem, value())["g"]) < 1e-12


def test_mistakes_are_told() -> None:
    product = build(PRODUCT)
    with pytest.raises(ProblemError, match=r"degrees \(0, 1\) have 4 components; the second input .* has 9"):
        HarmonicProduct(product, build_harmonics(HarmonicsProblem((0, 1), "norm", True)))
    with pytest.raises(InputError, match=r"v has shape \(4, 9\); expected one vector an edge"):
        HarmonicProduct(product, build_harmonics(UNIT))(
            *(torch.zeros(4, n) for n in (PRODUCT.dim_in1, 9, PRODUCT.weight_numel)), *torch.zeros(2, 4).long()
        )
    with pytest.raises(ProblemError, match="harmonics are torch.float64 and the product torch.float32"):
        HarmonicProduct(product, build_harmonics(UNIT, dtype=torch.float64))
    spec = product.spec(value())
    with pytest.raises(UnsupportedError, match="inside kernels of first derivatives"):
        dataclasses.replace(spec, direction=Direction("double_backward", "y", "xw"), harmonics=UNIT)


@pytest.mark.slow
def test_cuda_text_compiles_without_spills() -> None:
    try:
        nvrtc_version()
    except ToolMissingError as error:
        pytest.skip(str(error))
    problem = TensorProductProblem.channelwise("32x0e+32x1o", "0e+1o+2e+3o", "0e+1o+2e")
    harmonics, facts = HarmonicsProblem((0, 1, 2, 3), "component", True), cuda_facts("sm_90")
    schedule = build(problem).schedules["forward"]
    schedule = CudaSchedule(edge_operand="shared", stage_edges=8)
    for direction in PASSES.values():
        spec = Spec(problem, direction, schedule, "conv", "float32", "ir_mul", "int64", facts, harmonics=harmonics)
        resources = compile_source(emit(make_plan(spec)), facts).resources
        assert resources["spill_bytes"] == resources["stack_bytes"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("operation", ["conv", "plain"])
def test_on_a_gpu(operation: str, dtype: torch.dtype) -> None:
    case = vectors_case(operation, edges=500, nodes=40, num_out=40)
    product = build(PRODUCT, operation=operation, dtype=dtype, device="cuda")
    both = HarmonicProduct(product, build_harmonics(UNIT, dtype=dtype, device="cuda"))
    t = {name: rows.to("cuda", dtype) for name, rows in case.tensors.items()}
    edges = [None if index is None else index.cuda() for index in (case.sender, case.receiver)]
    graph = both.graph(t["x"], t["y"], *edges, case.num_out, None)
    for direction in PASSES.values():
        found = both.run_on(graph, direction, (t["x"], None, t["y"], None, t["w"], None, t["g"], None), poison=True)
        for slot, wanted in expected(case, UNIT, direction).items():
            pair = (without_zero_vector(slot, rows) for rows in (found[slot].cpu(), wanted))
            assert relative_error(*pair) < (1e-5 if dtype is torch.float32 else 1e-12), slot
