"""Modules that were not told a graph class take the schedules of each graph's own: eager, compiled, exported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from database_samples import entry, store
from module_cases import conv_inputs, e3nn_conv, normal, random_graph, small_conv

from autotune.database import store as database
from autotune.modules.convolution import TensorProductConv
from autotune.modules.product import TensorProduct
from autotune.modules.rows import SphericalHarmonics, SphericalHarmonicsConv
from autotune.workload.workload import GraphClass
from kernelgen.arithmetic.directions import DIRECTIONS, HARMONICS_DIRECTIONS
from kernelgen.device import device_facts
from kernelgen.errors import ProblemError
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.kernels.spherical_harmonics import HarmonicsHostSchedule, VectorHostSchedule
from kernelgen.ops.base import OPERATORS
from kernelgen.problem.other_kinds import HarmonicsProblem, VectorProblem
from kernelgen.runtime.call import WATCHERS
from kernelgen.runtime.graph import edge_order

# Edges and nodes of two graphs, their classes, and the schedules that are stored for these. One of them needs no order
# of edges, the other does.
SMALL, LARGE = (40, 10), (300, 40)
CLASSES = {SMALL: "conv-e5-d2", LARGE: "conv-e8-d3"}
SCHEDULES = {
    SMALL: HostSchedule(path_groups=2, channel_block=4, accumulate="atomics"),
    LARGE: HostSchedule(path_groups=2, channel_block=8),
}


@pytest.fixture(autouse=True)
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUITUNE_DATABASE", str(tmp_path / "user"))
    monkeypatch.setattr(database.paths, "results_dir", lambda: tmp_path / "shipped")
    made = [
        entry(SCHEDULES[graph], direction=name, graph_class=CLASSES[graph], dtype=dtype)
        for graph in CLASSES
        for name in DIRECTIONS
        for dtype in ("float32", "float64")
    ]
    store(tmp_path / "shipped", device_facts("cpu"), *made)
    torch.compiler.reset()


@pytest.fixture
def ran() -> Iterator[list[tuple]]:
    """Every run of a direction: its name, the number of edges, and the schedule."""
    runs: list[tuple] = []

    def note(operator: Any, direction: Any, num_edges: int, *_: Any) -> None:
        runs.append((direction.name, num_edges, operator.schedules[direction.name]))

    WATCHERS.append(note)
    yield runs
    WATCHERS.remove(note)


def graph(size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return random_graph(*size, size[1])


def inputs_of(conv: TensorProductConv, size: tuple[int, int]) -> list[torch.Tensor]:
    return [tensor.requires_grad_() for tensor in conv_inputs(conv, *size)]


def training_step(call: Callable, inputs: list[torch.Tensor], *edges: torch.Tensor, **options: Any) -> list:
    """Value, gradient of the edges, and the gradients of a loss on both."""
    out = call(*inputs, *edges, **options)
    (of_edges,) = torch.autograd.grad(out.square().sum(), inputs[1], create_graph=True)
    return [out, of_edges, *torch.autograd.grad(out.sum() + of_edges.square().sum(), inputs)]


def assert_equal_steps(found: list, wanted: list) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_each_graph_takes_its_own_schedules_in_every_direction_and_nothing_is_built_twice(
    ran: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    conv, looked_up = small_conv(), []
    look_up = conv._lookup
    monkeypatch.setattr(conv, "_lookup", lambda *where: looked_up.append(where) or look_up(*where))
    for size in (SMALL, LARGE, SMALL, LARGE):
        edges, inputs = graph(size), inputs_of(conv, size)
        assert_equal_steps(training_step(conv, inputs, *edges), training_step(e3nn_conv(conv, *edges, size[1]), inputs))
        assert conv.tuning["forward"].origin == "exact"
        assert conv.tuning == conv.tuning_for(CLASSES[size])
    assert len(looked_up) == 2 + 4, "one a class, and one for each call of tuning_for"
    assert {num_edges for _, num_edges, _ in ran} == {40, 300}
    assert {name for name, _, _ in ran} >= {"forward", "edge_backward", "joint_backward"}
    assert all(schedule == SCHEDULES[SMALL if num_edges == 40 else LARGE] for _, num_edges, schedule in ran)


def test_other_numbers_of_edges_take_the_nearest_class(ran: list[tuple]) -> None:
    conv = small_conv()
    for size, nearest in (((20, 10), SMALL), ((45, 10), SMALL), ((299, 40), LARGE), ((5000, 200), LARGE)):
        del ran[:]
        with torch.no_grad():
            conv(*conv_inputs(conv, *size), *graph(size))
        assert [schedule for *_, schedule in ran] == [SCHEDULES[nearest]]
        found = conv.tuning["forward"]
        assert found.entry is not None and found.entry.graph_class == CLASSES[nearest]


def test_the_order_of_calls_changes_nothing() -> None:
    sizes = [SMALL, LARGE, (20, 10), (5000, 200)]
    found = []
    for order in (sizes, sizes[::-1]):
        conv = small_conv()
        for size in order:
            conv(*conv_inputs(conv, *size), *graph(size))
        (by_size,) = conv._operators.values()
        found.append({size: built.operator.text for size, built in by_size.items()})
    assert found[0] == found[1] and len(found[0]) == 4


def test_a_given_class_and_given_schedules_win(ran: list[tuple]) -> None:
    both = (small_conv(graph_class=CLASSES[LARGE]), small_conv(schedule=SCHEDULES[LARGE]))
    for conv in both:
        for size in (SMALL, LARGE):
            conv(*conv_inputs(conv, *size), *graph(size))
        assert [len(by_size) for by_size in conv._operators.values()] == [1]
    assert {schedule for *_, schedule in ran} == {SCHEDULES[LARGE]}
    with pytest.raises(ProblemError, match="expected one of a conv product"):
        both[0].tuning_for("plain-e4")


def test_classes_with_the_same_schedules_share_an_operator() -> None:
    conv = TensorProductConv("4x0e+4x1o", "0e+1o", filter_irreps_out="0e+1o")  # nothing is tuned for it
    for size in (SMALL, LARGE):
        conv(*(tensor.float() for tensor in conv_inputs(conv, *size)), *graph(size))
    (by_size,) = conv._operators.values()
    first, second = by_size.values()
    assert first.operator is second.operator
    compiled = torch.compile(conv, fullgraph=True, backend="eager")
    compiled(*(tensor.float() for tensor in conv_inputs(conv, *size)), *graph(size))
    assert set(conv._families.values()) == {first.operator.text}, "a family of one is that one"


@pytest.mark.parametrize("edges_sorted", [False, True])
def test_a_compiled_module_chooses_at_run_time(ran: list[tuple], edges_sorted: bool) -> None:
    conv, graphs = small_conv(), []

    def backend(module: Any, given: Any) -> Any:
        graphs.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, given)

    compiled = torch.compile(conv, fullgraph=True, dynamic=True, backend=backend)
    for size in (SMALL, LARGE, SMALL):
        sender, receiver = graph(size)
        receiver = receiver.sort().values if edges_sorted else receiver
        inputs = inputs_of(conv, size)
        wanted = training_step(e3nn_conv(conv, sender, receiver, size[1]), inputs)
        del ran[:]
        out = compiled(*inputs, sender, receiver, edges_sorted=edges_sorted)
        grads = torch.autograd.grad(out.sum() + 0 * out.square().sum(), inputs)
        torch.testing.assert_close(out, wanted[0], rtol=1e-10, atol=1e-10)
        exact = e3nn_conv(conv, sender, receiver, size[1])(*inputs)
        for one, other in zip(grads, torch.autograd.grad(exact.sum(), inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        assert {name for name, *_ in ran} == {"forward", "backward"}
        assert {schedule for *_, schedule in ran} == {SCHEDULES[size]}
    assert len(graphs) == 1


def test_orders_of_several_graphs_at_once() -> None:
    conv = small_conv()
    text = conv._operator_text(conv._key, torch.device("cpu"), torch.float64)
    receivers = torch.stack((graph(LARGE)[1], graph(LARGE)[1].flip(0)))
    nodes = LARGE[1]
    found = torch.vmap(lambda index: torch.ops.equitune.tp_order(index, nodes, nodes, "receiver", text))(receivers)
    for one, receiver in zip(zip(*found, strict=True), receivers, strict=True):
        assert all(map(torch.equal, one, edge_order(receiver, nodes)[:2]))
    torch.library.opcheck(torch.ops.equitune.tp_order, (receivers[0], nodes, nodes, "receiver", text))


@pytest.mark.gpu
def test_compiled_and_captured_on_a_gpu(ran: list[tuple]) -> None:
    """Small and large graphs have different defaults there; a captured graph has the schedules of its own size."""
    conv = TensorProductConv("32x0e+32x1o", "0e+1o", filter_irreps_out="0e+1o").cuda()
    compiled = torch.compile(conv, fullgraph=True, dynamic=True)
    sizes = ((300, 40), (20_000, 400), (300, 40))
    chosen = []
    for size in sizes:
        edges = [index.cuda() for index in graph(size)]
        inputs = [tensor.float().cuda() for tensor in conv_inputs(conv, *size)]
        wanted = e3nn_conv(conv, *(index.cpu() for index in edges), size[1])(*(t.double().cpu() for t in inputs))
        for call in (conv, compiled):
            del ran[:]
            torch.testing.assert_close(call(*inputs, *edges).cpu().double(), wanted, rtol=1e-4, atol=1e-4)
            chosen.append({schedule for *_, schedule in ran})
        captured = torch.cuda.CUDAGraph()
        del ran[:]
        with torch.cuda.graph(captured):
            out = conv(*inputs, *edges)
        captured.replay()
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
        chosen.append({schedule for *_, schedule in ran})
    small, large = chosen[0], chosen[3]
    assert chosen == [small] * 3 + [large] * 3 + [small] * 3 and small != large


def test_forces_inside_a_compiled_module(ran: list[tuple]) -> None:
    """make_fx with sizes as symbols traces both derivatives, as models do that compile a whole force field."""
    from torch.fx.experimental.proxy_tensor import make_fx

    conv = small_conv()

    def step(*tensors: torch.Tensor) -> list[torch.Tensor]:
        inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        return training_step(conv, inputs, *tensors[3:])

    traced = make_fx(step, tracing_mode="symbolic")(*conv_inputs(conv, *LARGE), *graph(LARGE))
    for size in (SMALL, LARGE):
        del ran[:]
        edges, inputs = graph(size), inputs_of(conv, size)
        found = traced(*(tensor.detach() for tensor in inputs), *edges)
        assert {schedule for *_, schedule in ran} == {SCHEDULES[size]} and len(ran) >= 3
        assert_equal_steps(found, training_step(e3nn_conv(conv, *edges, size[1]), inputs))


LOADING = """
import sys, torch, kernelgen
from kernelgen.runtime.call import WATCHERS
def note(operator, direction, num_edges, *_):
    print(num_edges, operator.schedules[direction.name].key)
WATCHERS.append(note)
program = torch.export.load(sys.argv[1]).module()
for given, wanted in torch.load(sys.argv[2]):
    assert torch.allclose(program(*given), wanted, rtol=0, atol=1e-10)
assert "autotune" not in sys.modules
"""


@pytest.mark.slow
def test_an_exported_program_chooses_in_a_process_without_autotune(tmp_path: Path) -> None:
    conv, edges, nodes = small_conv(), torch.export.Dim("edges", min=2), torch.export.Dim("nodes", min=2)
    cases = []
    for size in (LARGE, SMALL):
        given = (*conv_inputs(conv, *size), *graph(size))
        cases.append((given, e3nn_conv(conv, *given[3:], size[1])(*given[:3])))
    shapes = ({0: nodes}, *({0: edges},) * 4)
    program = torch.export.export(conv, cases[0][0], dynamic_shapes=shapes)
    files = tmp_path / "program.pt2", tmp_path / "cases.pt"
    torch.export.save(program, files[0])
    torch.save(cases, files[1])
    command = [sys.executable, "-c", LOADING, *map(str, files)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[:2] == [f"300 {SCHEDULES[LARGE].key}", f"40 {SCHEDULES[SMALL].key}"]


def test_a_family_chooses_as_its_module_does() -> None:
    conv = small_conv()
    family = OPERATORS[conv._operator_text(conv._key, torch.device("cpu"), torch.float64)]
    assert len(family.members) > 1 and family.by_size == (True, False), "only one of both needs edges in order"
    for log2_edges in range(0, 32, 3):
        for log2_degree in range(0, log2_edges + 1, 2):
            num_edges, num_nodes = 2**log2_edges, 2 ** (log2_edges - log2_degree)
            wanted = conv.tuning_for(GraphClass.of("conv", num_edges, num_nodes))
            member = family.for_size(num_edges, num_nodes)
            assert member.schedules == {name: found.schedule for name, found in wanted.items()}
    assert family.for_size(2**40, 1) is family.for_size(2**31, 1)


def test_products_choose_by_rows(tmp_path: Path, ran: list[tuple]) -> None:
    product = TensorProduct("8x0e+8x1o", "0e+1o", "8x0e", [(0, 0, 0, "uvu", True)], shared_weights=False)
    classes = {16: "plain-e4", 500: "plain-e9"}
    by_rows = {16: HostSchedule(channel_block=4), 500: HostSchedule(channel_block=8)}
    common = {"problem": product.problem.key, "operation": "plain"}
    made = [entry(by_rows[rows], graph_class=classes[rows], **common) for rows in classes]
    store(tmp_path / "shipped", device_facts("cpu"), *made)
    compiled = torch.compile(product, fullgraph=True, dynamic=True, backend="aot_eager")
    for call in (product, compiled):
        for rows in (16, 500, 16):
            del ran[:]
            call(normal(rows, 32).float(), normal(rows, 4).float(), normal(rows, 8).float())
            assert ran == [("forward", rows, by_rows[rows])]
        product(normal(250, 2, 32).float(), normal(2, 4).float(), normal(1, 1, 8).float())
        assert ran[-1] == ("forward", 500, by_rows[500])


def test_harmonics_choose_by_vectors(tmp_path: Path, ran: list[tuple]) -> None:
    problem = HarmonicsProblem((0, 1, 2), "component", True)
    by_rows = {16: HarmonicsHostSchedule(threads=1), 1000: HarmonicsHostSchedule()}
    common = {"problem": problem.key, "operation": "harmonics"}
    made = [
        entry(schedule, graph_class=f"harmonics-e{4 if rows == 16 else 10}", direction=name, **common)  # type: ignore[arg-type]
        for rows, schedule in by_rows.items()
        for name in HARMONICS_DIRECTIONS
    ]
    store(tmp_path / "shipped", device_facts("cpu"), *made)
    module = SphericalHarmonics([0, 1, 2], True, "component")
    for call in (module, torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")):
        for rows in (16, 1000, 16):
            del ran[:]
            v = torch.randn(rows, 3, requires_grad=True)
            torch.autograd.grad(call(v).sum(), v)
            assert {(edges, schedule) for _, edges, schedule in ran} == {(rows, by_rows[rows])} and len(ran) == 2
    told = SphericalHarmonics([0, 1, 2], True, "component", num_vectors=1000)
    told(torch.randn(16, 3))
    assert ran[-1] == ("forward", 16, by_rows[1000])


def test_harmonics_go_inside_by_the_graph(tmp_path: Path) -> None:
    harmonics = SphericalHarmonics([0, 1], normalize=True, normalization="component")
    conv = SphericalHarmonicsConv("8x0e+8x1o", harmonics, filter_irreps_out="0e+1o")
    times = {"time_us": 2.0, "q1_us": 2.0, "q3_us": 2.0}
    made = [
        entry(
            VectorHostSchedule(harmonics=place),  # type: ignore[arg-type]
            problem=VectorProblem(conv.problem, harmonics.problem).key,
            operation="vectors",
            graph_class=f"vectors-{kind}",
            default={"schedule": VectorHostSchedule().to_dict(), **times},
        )
        for kind, place in (("e5-d2", "inside"), ("e8-d3", "apart"))
    ]
    store(tmp_path / "shipped", device_facts("cpu"), *made)
    for size, inside in ((SMALL, True), (LARGE, False), (SMALL, True)):
        x, _, w = (tensor.float() for tensor in conv_inputs(conv, *size))
        conv(x, torch.randn(size[0], 3), w, *graph(size))
        assert ("forward" in conv._met[4].run.inside) is inside
