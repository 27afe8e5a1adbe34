"""Convolutions with weights formed in registers: derivatives through autograd, on a GPU or with emulated kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from emulated_radial import emulate_kernels
from radial_cases import RadialCase, make_radial_case
from reference import relative_error, relayout
from torch.fx.experimental.proxy_tensor import make_fx

from kernelgen.errors import InputError, UnsupportedError
from kernelgen.kernels.radial.plan import RadialSchedule
from kernelgen.ops.base import resolve
from kernelgen.ops.product import Operator, build
from kernelgen.ops.radial_convolution import FusedRadial, _rebuild, exported_product, fused_of, radial_product
from kernelgen.problem.product import TensorProductProblem

PROBLEM = TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o", "0e+1o")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def kernels_on(
    device: str, monkeypatch: pytest.MonkeyPatch, hidden: int, accuracy: str = "ieee", **schedules: RadialSchedule
) -> FusedRadial:
    if device == "cpu":
        emulate_kernels(monkeypatch)
    return FusedRadial(PROBLEM, hidden, accuracy, "ir_mul", torch.device(device), schedules)


def operator_on(device: str, **options: Any) -> Operator:
    return build(PROBLEM, operation="conv", layout="ir_mul", **({"dtype": torch.float32, "device": device} | options))


def inputs_of(given: RadialCase, device: str) -> dict[str, torch.Tensor]:
    """x, y, h, m and g in float32 and ir_mul."""
    tensors = given.case.tensors
    inputs = {
        "x": relayout(tensors["x"], PROBLEM.irreps_in1, to_ir_mul=True),
        "y": tensors["y"],
        "h": given.h,
        "m": given.matrix,
        "g": relayout(tensors["g"], PROBLEM.irreps_out, to_ir_mul=True),
    }
    return {name: tensor.float().to(device) for name, tensor in inputs.items()}


def assert_close(found: torch.Tensor, wanted: torch.Tensor, slot: str, tolerance: float) -> None:
    irreps = {"x": PROBLEM.irreps_in1, "out": PROBLEM.irreps_out}
    value = found.detach().cpu()
    value = relayout(value, irreps[slot], to_ir_mul=False) if slot in irreps else value
    assert relative_error(value, wanted) < tolerance, slot


@pytest.mark.parametrize("wanted", ["xyh", "yh", "x", "xyhm"])
@pytest.mark.parametrize("device", DEVICES)
def test_value_and_gradients(device: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the matrix's gradient, all gradients come from parts of at most 30 edges."""
    given, hidden = make_radial_case(PROBLEM, 8, edges=70, num_out=7), 8
    sender, receiver = (index.to(device) for index in (given.case.sender, given.case.receiver))  # type: ignore[union-attr]
    inputs, operator = inputs_of(given, device), operator_on(device)
    leaf = {name: inputs[name].requires_grad_(name in wanted) for name in "xyhm"}
    kernels = kernels_on(device, monkeypatch, hidden)
    out = radial_product(*leaf.values(), sender, receiver, 7, operator, 30, fused=kernels)
    gradients = torch.autograd.grad(out, [leaf[name] for name in wanted], inputs["g"])
    expected = given.expected(wanted)
    assert_close(out, expected["out"], "out", 1e-6)
    for slot, gradient in zip(wanted, gradients, strict=True):
        assert_close(gradient, expected[slot], slot, 1e-6)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_exported(device: str, is_sorted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced on one graph with its gradients inside, and run on another one of other sizes."""
    kernels = kernels_on(device, monkeypatch, 8)

    def step(x: Any, y: Any, h: Any, m: Any, g: Any, sender: Any, receiver: Any) -> tuple[torch.Tensor, ...]:
        leaf = [tensor.detach().requires_grad_() for tensor in (x, y, h)]
        out = exported_product(kernels, *leaf, m, sender, receiver, g.shape[0], is_sorted)
        return out.detach(), *torch.autograd.grad(out, leaf, g)

    def case_of(edges: int, num_out: int) -> tuple[RadialCase, list[torch.Tensor]]:
        given = make_radial_case(PROBLEM, 8, edges=edges, num_out=num_out)
        ends = [given.case.sender, given.case.receiver]
        if is_sorted:
            ends[1] = ends[1].sort().values  # type: ignore[union-attr]
            given = dataclasses.replace(given, case=dataclasses.replace(given.case, receiver=ends[1]))
        return given, [*inputs_of(given, device).values(), *(end.to(device) for end in ends)]  # type: ignore[union-attr]

    traced = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*case_of(30, 5)[1])
    assert "rc_backward" in traced.code
    given, inputs = case_of(70, 7)
    expected = given.expected()
    for slot, found in zip(("out", "x", "y", "h"), traced(*inputs), strict=True):
        assert_close(found, expected[slot], slot, 1e-6)
    assert resolve(kernels.text).text == _rebuild(kernels.text).text == kernels.text


def test_no_gradient_of_the_matrix_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    given = make_radial_case(PROBLEM, 8, edges=30, num_out=5)
    x, y, h, m, _ = inputs_of(given, "cpu").values()
    kernels = kernels_on("cpu", monkeypatch, 8)
    ends = given.case.sender, given.case.receiver
    out = exported_product(kernels, x, y, h, m.requires_grad_(), *ends, 5, False)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="no gradient of its matrix"):
        out.sum().backward()


def require_wgmma(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no compute capability 9.0")


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_four_warps_together(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_wgmma(device)
    given = make_radial_case(PROBLEM, 8, edges=70, num_out=7)
    schedule = RadialSchedule(coupled=1, products="wgmma")
    kernels = kernels_on(device, monkeypatch, 8, backward=schedule)
    inputs, operator = inputs_of(given, device), operator_on(device)
    sender, receiver = (index.to(device) for index in (given.case.sender, given.case.receiver))  # type: ignore[union-attr]
    leaf = [inputs[name].requires_grad_(name != "m") for name in "xyhm"]
    out = radial_product(*leaf, sender, receiver, 7, operator, 30, fused=kernels)
    found = torch.autograd.grad(out, leaf[:3], inputs["g"])
    for slot, gradient in zip("xyh", found, strict=True):
        assert_close(gradient, given.expected()[slot], slot, 1e-6)


VALUES = [
    {"tiles": 1, "paths_at_once": 1},
    {"tiles": 2, "warps": 12, "paths_at_once": 2, "edge_values": "reloaded"},
    {"tiles": 4, "paths_at_once": 1, "ahead": "hidden"},
    {"tiles": 4, "paths_at_once": 10, "path_groups": 2},
]


@pytest.mark.parametrize("knobs", VALUES)
@pytest.mark.parametrize("device", DEVICES)
def test_values_of_four_warps_together(device: str, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    require_wgmma(device)
    given = make_radial_case(PROBLEM, 8, edges=70, num_out=7)
    kernels = kernels_on(device, monkeypatch, 8, forward=RadialSchedule(products="wgmma", **knobs))
    x, y, h, m, _ = inputs_of(given, device).values()
    edges = [index.to(device) for index in (given.case.sender, given.case.receiver)]  # type: ignore[union-attr]
    out = radial_product(x, y, h, m, *edges, 7, operator_on(device), 30, fused=kernels)
    assert_close(out, given.expected()["out"], "out", 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("accuracy", ["ieee", "tf32"])
@pytest.mark.parametrize("hidden", [8, 32, 64, 128])
@pytest.mark.parametrize("knobs", VALUES)
def test_values_of_many_edges(hidden: int, accuracy: str, knobs: dict[str, Any]) -> None:
    """Receivers of 0 to 40 edges and one of 3000, in parts with 64 and 8 channels; rows that several shares cut."""
    require_wgmma("cuda")
    problem = TensorProductProblem.channelwise("136x0e+136x1o", "0e+1o", "0e+1o")
    given = make_radial_case(problem, hidden, edges=9000, num_out=300)
    receiver = given.case.receiver.clone()  # type: ignore[union-attr]
    receiver[:3000] = 7
    given = dataclasses.replace(given, case=dataclasses.replace(given.case, receiver=receiver))
    schedule = RadialSchedule(**({"products": "wgmma"} | knobs))
    kernels = FusedRadial(problem, hidden, accuracy, "mul_ir", torch.device("cuda"), {"forward": schedule})
    tensors, wanted = given.case.tensors, given.expected()["out"]
    rows = [row.float().cuda() for row in (tensors["x"], tensors["y"], given.h, given.matrix)]
    sender, receiver = (index.cuda() for index in (given.case.sender, given.case.receiver))  # type: ignore[union-attr]
    operator = build(problem, operation="conv", layout="mul_ir", dtype=torch.float32, device="cuda")
    for _ in range(3):
        out = radial_product(*rows, sender, receiver, 300, operator, 30, fused=kernels)
        error = relative_error(out.cpu(), wanted)
        assert error < (1e-6 if accuracy == "ieee" else 1e-3), error


@pytest.mark.gpu
@pytest.mark.parametrize("accuracy", ["ieee", "tf32"])
@pytest.mark.parametrize("hidden", [8, 32, 64, 128])
@pytest.mark.parametrize("paths_at_once", [1, 4, 10])
def test_four_warps_together_on_many_edges(hidden: int, accuracy: str, paths_at_once: int) -> None:
    """Receivers of 0 to 40 edges; products, which a GPU does later than it begins them, go on while others begin."""
    require_wgmma("cuda")
    problem = TensorProductProblem.channelwise("128x0e+128x1o", "0e+1o+2e", "0e+1o+2e")
    given = make_radial_case(problem, hidden, edges=6000, num_out=300)
    schedule = RadialSchedule(slices=4, coupled=4, products="wgmma", paths_at_once=paths_at_once)
    kernels = FusedRadial(problem, hidden, accuracy, "mul_ir", torch.device("cuda"), {"backward": schedule})
    tensors, wanted = given.case.tensors, given.expected()
    rows = [tensors["x"], tensors["y"], given.h, given.matrix, tensors["g"]]
    *leaf, g = (row.float().cuda().requires_grad_() for row in rows)
    sender, receiver = (index.cuda() for index in (given.case.sender, given.case.receiver))  # type: ignore[union-attr]
    operator = build(problem, operation="conv", layout="mul_ir", dtype=torch.float32, device="cuda")
    for _ in range(3):
        out = radial_product(*leaf, sender, receiver, 300, operator, 30, fused=kernels)
        for slot, gradient in zip("xyh", torch.autograd.grad(out, leaf[:3], g.detach()), strict=True):
            error = relative_error(gradient.cpu(), wanted[slot])
            assert error < (1e-6 if accuracy == "ieee" else 1e-3), (slot, error)


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step on forces: what fused first derivatives leave for the second ones."""
    given = make_radial_case(PROBLEM, 8, edges=70, num_out=7)
    sender, receiver = (index.to(device) for index in (given.case.sender, given.case.receiver))  # type: ignore[union-attr]
    operator, kernels = operator_on(device), kernels_on(device, monkeypatch, 8)

    def step(convolve: Any, real: torch.dtype) -> list[torch.Tensor]:
        leaf = [tensor.to(real).requires_grad_() for name, tensor in inputs_of(given, device).items() if name != "g"]
        out = convolve(*leaf)
        (forces,) = torch.autograd.grad((out / 30).sin().sum(), leaf[1], create_graph=True)
        return [one.cpu().double() for one in torch.autograd.grad(out.square().sum() + forces.square().sum(), leaf)]

    exact = operator_on(device, dtype=torch.float64)
    wanted = step(lambda x, y, h, m: exact(x, y, h @ m, sender, receiver, num_out=7), torch.float64)
    found = step(lambda *xyhm: radial_product(*xyhm, sender, receiver, 7, operator, 30, fused=kernels), torch.float32)
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) < 3e-6


@pytest.mark.parametrize("device", DEVICES)
def test_no_edges_and_one_product(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = operator_on(device)
    none = make_radial_case(PROBLEM, 8, edges=0)
    x, y, h, m, _ = inputs_of(none, device).values()
    empty = torch.zeros(0, dtype=torch.long, device=device)
    kernels = kernels_on(device, monkeypatch, 8)
    out = radial_product(x, y, h, m, empty, empty, 6, operator, 30, fused=kernels)
    assert out.shape == (6, PROBLEM.dim_out) and not out.any()
    given = make_radial_case(PROBLEM, 8, edges=40)
    x, y, h, m, _ = inputs_of(given, device).values()
    edges = [index.to(device).int() for index in (given.case.sender, given.case.receiver)]  # type: ignore[union-attr]
    out = radial_product(x, y, h, m, *edges, 6, operator, 30, fused=kernels_on(device, monkeypatch, 8, "tf32"))
    assert_close(out, given.expected()["out"], "out", 1e-3)
    with pytest.raises(AssertionError):
        assert_close(out, given.expected()["out"], "out", 1e-5)
    with pytest.raises(
        InputError, match=r"h is torch.float64 on .* and the matrix torch.float32 on .*; expected torch.float32"
    ):
        radial_product(x, y, h.double(), m, *edges, 6, operator, 30, fused=kernels)


def test_where_there_is_no_such_kernel() -> None:
    assert fused_of(operator_on("cpu"), 8, "float32") is None


@pytest.mark.gpu
def test_where_there_is_one() -> None:
    assert fused_of(operator_on("cuda"), 8, "tf32").accuracy == "tf32"  # type: ignore[union-attr]
    assert fused_of(operator_on("cuda"), 6, "float32") is None
    assert fused_of(operator_on("cuda", dtype=torch.float64), 8, "float32") is None
    assert fused_of(operator_on("cuda", deterministic=True), 8, "float32") is None


@pytest.mark.gpu
def test_a_captured_graph_takes_other_edges() -> None:
    """Value and gradients in one CUDA graph, replayed with other values and other edges."""
    cases = [make_radial_case(PROBLEM, 8, edges=70, num_out=7, seed=seed) for seed in (0, 1)]
    given = [
        {**inputs_of(one, "cuda"), "sender": one.case.sender.cuda(), "receiver": one.case.receiver.cuda()}  # type: ignore[union-attr]
        for one in cases
    ]
    held = {name: tensor.clone() for name, tensor in given[0].items()}
    leaf = [held[name].requires_grad_() for name in "xyh"]
    operator = operator_on("cuda")
    kernels = FusedRadial(PROBLEM, 8, "ieee", "ir_mul", torch.device("cuda"))

    def step() -> list[torch.Tensor]:
        out = radial_product(*leaf, held["m"], held["sender"], held["receiver"], 7, operator, 30, fused=kernels)
        return [out, *torch.autograd.grad(out, leaf, held["g"])]

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for one, tensors in zip(cases[::-1], given[::-1], strict=True):
        for name, tensor in tensors.items():
            held[name].data.copy_(tensor)
        graph.replay()
        expected = one.expected()
        for slot, value in zip(("out", *"xyh"), found, strict=True):
            assert_close(value, expected[slot], slot, 1e-6)
