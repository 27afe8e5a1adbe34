"""On a CUDA device: the numerics of every suite problem, kernel forms, streams and the modules."""

from __future__ import annotations

import pytest
import torch
from pair_problems import MODES, of_mode
from reference import assert_matches_e3nn, make_case

from autotune.workload.config import load_problems
from kernelgen.arithmetic.directions import DIRECTIONS, OPERANDS
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.ops.product import build
from kernelgen.runtime.kernel import load_kernel

pytestmark = pytest.mark.gpu
SUITE = load_problems()
MEDIUM = SUITE["mace-mp-medium"]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("operation", ["conv", "plain"])
@pytest.mark.parametrize("name", SUITE)
def test_suite_problems(name: str, operation: str, dtype: torch.dtype) -> None:
    operator = build(SUITE[name], operation=operation, dtype=dtype, device="cuda")
    assert_matches_e3nn(operator, make_case(SUITE[name], operation), DIRECTIONS, TOLERANCE[dtype], "cuda")


FORMS = {
    "staged": CudaSchedule(edge_operand="shared", path_groups=3, prefetch="copy", stage_edges=8),
    "vectors": CudaSchedule(channels_per_thread=4, path_groups=4, warps_per_edge=2),
    "half-warps": CudaSchedule(
        prefetch="reload", edges_per_warp=2, channels_per_thread=2, stage_edges=16, path_groups=4
    ),
    "atomics": CudaSchedule(accumulate="atomics", edges_per_chunk=8, path_groups=2),
    "runs-in-waves": CudaSchedule(accumulate="atomics", runs="waves", path_groups=3, edge_operand="shared"),
    "stores-rows": {"forward": CudaSchedule(accumulate="atomics", zeros="cut", edges_per_chunk=8, path_groups=3)},
    "stores-rows-of-waves": {
        "forward": CudaSchedule(
            **{"accumulate": "atomics", "zeros": "cut", "runs": "waves", "path_groups": 2, "block_size": 64},
            **{"edge_operand": "shared", "stage_edges": 8, "prefetch": "reload"},
        )
    },
    "writes-rows": CudaSchedule(path_groups=3, edge_operand="shared", stage_edges=8, writes="rows"),
    "writes-rows-of-runs": CudaSchedule(
        accumulate="atomics", edges_per_chunk=8, path_groups=4, channels_per_thread=4, writes="rows"
    ),
    "writes-rows-of-split-nodes": CudaSchedule(
        teams_per_node=4, path_groups=5, edges_per_warp=2, writes="rows", stage_edges=16
    ),
    "by-sender": CudaSchedule(order="sender", path_groups=3, warps_per_edge=2, stream=True, prefetch="reload"),
    "basis": CudaSchedule(edge_operand="basis", edges_per_warp=4, stage_edges=8, channels_per_thread=4, path_groups=4),
    "split-nodes": CudaSchedule(teams_per_node=8, path_groups=3, edge_operand="shared", block_size=256),
    "split-nodes-by-sender": CudaSchedule(order="sender", teams_per_node=4, path_groups=2, channels_per_thread=2),
    "split-nodes-unrolled-by-sender": CudaSchedule(
        order="sender", teams_per_node=4, path_groups=5, channels_per_thread=2, finish="unrolled"
    ),
    "split-nodes-unrolled": CudaSchedule(teams_per_node=8, path_groups=3, block_size=256, finish="unrolled"),
    "ahead": CudaSchedule(ahead="weights", path_groups=4, edge_operand="shared", stage_edges=8),
    "ahead-all": CudaSchedule(ahead="all", path_groups=3, teams_per_node=2, edge_operand="shared"),
    "ahead-along": CudaSchedule(ahead="along", path_groups=3, teams_per_node=2, edge_operand="shared"),
    "ahead-rows": CudaSchedule(ahead="rows", path_groups=4, accumulate="atomics", edges_per_chunk=16, stage_edges=16),
    "ahead-by-sender": CudaSchedule(ahead="rows", path_groups=4, order="sender", edges_per_warp=2, stage_edges=16),
    "unfused": CudaSchedule(fuse=False, path_groups=4, edges_per_chunk=16),
    "ring": CudaSchedule(prefetch="ring4", path_groups=3, edge_operand="shared", stage_edges=8),
    "ring-of-half-warps": CudaSchedule(
        prefetch="ring2", edges_per_warp=2, channels_per_thread=2, stage_edges=16, path_groups=4, order="sender"
    ),
    "owners": dict.fromkeys(
        ("backward", "edge_backward", "joint_backward"),
        CudaSchedule(accumulate="owners", warps_per_edge=4, edges_per_chunk=1, edge_operand="shared", ahead="all"),
    ),
    "owners-of-runs": dict.fromkeys(
        ("backward", "edge_backward", "joint_backward"),
        CudaSchedule(
            **{"accumulate": "owners", "warps_per_edge": 8, "edges_per_chunk": 8, "path_groups": 2},
            **{"block_size": 256, "ahead": "all"},
        ),
    ),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("form", FORMS)
def test_kernel_forms(form: str, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelgen.kernels.product.plan.REGISTER_SLACK", 4)
    operator = build(MEDIUM, FORMS[form], dtype=dtype, layout=layout, device="cuda")
    case = make_case(MEDIUM, "conv", edges=300, nodes=20, num_out=17)
    assert_matches_e3nn(operator, case, DIRECTIONS, TOLERANCE[dtype], "cuda")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("operation", ["conv", "plain"])
@pytest.mark.parametrize("mode", MODES)
def test_kernel_forms_of_pairs(mode: str, operation: str, dtype: torch.dtype) -> None:
    for problem, layout, teams in ((of_mode(mode), "mul_ir", 1), (of_mode(mode, shared=True), "ir_mul", 4)):
        schedule = CudaSchedule(accumulate="atomics", edges_per_warp=teams)
        operator = build(problem, schedule, operation=operation, dtype=dtype, layout=layout, device="cuda")
        case = make_case(problem, operation, edges=300, nodes=20, num_out=17)
        assert_matches_e3nn(operator, case, DIRECTIONS, TOLERANCE[dtype], "cuda")


def test_a_block_that_is_an_edge_sums_its_gradient_in_a_fixed_order() -> None:
    problem, parts = SUITE["mace-mp-large"], ("backward", "edge_backward")
    schedule = CudaSchedule(warps_per_edge=4, edge_operand="shared", prefetch="reload", stage_edges=8)
    operator = build(problem, dict.fromkeys(parts, schedule), layout="ir_mul", device="cuda", deterministic=True)
    assert not any(load_kernel(operator.specs(name)[-1]).plan.partial_y for name in parts)
    case = make_case(problem, "conv", edges=3000, nodes=50, num_out=50)
    assert_matches_e3nn(operator, case, parts, 1e-5, "cuda")


@pytest.mark.parametrize("operation", ["conv", "plain"])
@pytest.mark.parametrize("name", ["mace-mp-large", "nequip-lips", "sevennet-l3i5"])
def test_deterministic_results_are_right_and_repeat_bit_by_bit(name: str, operation: str) -> None:
    operator = build(SUITE[name], operation=operation, device="cuda", layout="ir_mul", deterministic=True)
    case = make_case(SUITE[name], operation, edges=3000, nodes=50, num_out=50)
    assert_matches_e3nn(operator, case, DIRECTIONS, 1e-5, "cuda")
    operands = tuple(case.tensors[name].float().cuda() for name in OPERANDS)
    graph = [None if index is None else index.cuda() for index in (case.sender, case.receiver)]
    for direction in DIRECTIONS.values():
        runs = [operator.run(direction, operands, *graph, case.num_out, None) for _ in range(5)]
        assert all(torch.equal(run[slot], runs[0][slot]) for run in runs for slot in run), direction.text


def test_force_step_captured_in_a_graph_replays_on_new_data() -> None:
    case = make_case(MEDIUM, "conv", edges=500, nodes=20, num_out=20)
    operator = build(MEDIUM, device="cuda")
    x, y, w = (case.tensors[n].float().cuda().requires_grad_() for n in "xyw")
    g, tg, ty = (case.tensors[n].float().cuda() for n in ("g", "tg", "ty"))
    assert case.sender is not None and case.receiver is not None
    sender, receiver = case.sender.cuda(), case.receiver.cuda()
    order = operator.order(sender, receiver, len(x), 20)

    def step() -> tuple[torch.Tensor, ...]:
        out = operator(x, y, w, sender, receiver, num_out=20, order=order)
        (force,) = torch.autograd.grad(out, y, g, create_graph=True)
        return torch.autograd.grad([out, force], [x, y, w], [tg, ty])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for tensor in (x, y, w, g, tg, ty):
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(captured, step(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_runs_on_the_current_stream() -> None:
    case = make_case(MEDIUM, "conv", edges=4000, nodes=50, num_out=50)
    operator = build(MEDIUM, device="cuda")
    x, y, w = (case.tensors[n].float().cuda() for n in "xyw")
    assert case.sender is not None and case.receiver is not None
    sender, receiver = case.sender.cuda(), case.receiver.cuda()
    wanted = operator(x, y, w, sender, receiver, num_out=50)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a kernel on another stream would run ahead of this and read stale x
        late = torch.zeros_like(x)
        late.copy_(x)
        found = operator(late, y, w, sender, receiver, num_out=50)
    stream.synchronize()
    torch.testing.assert_close(found, wanted)


def test_graph_capture_replays_on_new_data() -> None:
    case = make_case(MEDIUM, "conv", edges=500, nodes=20, num_out=20)
    operator = build(MEDIUM, device="cuda")
    x, y, w = (case.tensors[n].float().cuda() for n in "xyw")
    assert case.sender is not None and case.receiver is not None
    sender, receiver = case.sender.cuda(), case.receiver.cuda()
    operator(x, y, w, sender, receiver, num_out=20)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = operator(x, y, w, sender, receiver, num_out=20)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, operator(x, y, w, sender, receiver, num_out=20), rtol=1e-5, atol=1e-4)


def test_autograd_second_order() -> None:
    case = make_case(MEDIUM, "conv", edges=60)
    gradients = []
    for device in ("cpu", "cuda"):
        operator = build(MEDIUM, dtype=torch.float64, device=device)
        leaf = {n: case.tensors[n].to(device).requires_grad_() for n in "xyw"}
        assert case.sender is not None and case.receiver is not None
        indices = case.sender.to(device), case.receiver.to(device)
        out = operator(leaf["x"], leaf["y"], leaf["w"], *indices, num_out=case.num_out)
        force = torch.autograd.grad(out.pow(2).sum(), leaf["y"], create_graph=True)[0]
        second = torch.autograd.grad(force.pow(2).sum() + out.sum(), [leaf[n] for n in "xyw"])
        gradients.append([grad.cpu() for grad in second])
    for host, cuda in zip(*gradients, strict=True):
        torch.testing.assert_close(cuda, host, rtol=1e-9, atol=1e-8)
