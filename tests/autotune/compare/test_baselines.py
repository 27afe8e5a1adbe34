"""Peers: what runs here agrees with float64 e3nn in every pass; what cannot run says why; wrong numbers are refused."""

from __future__ import annotations

import dataclasses
import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.compare import comparison
from autotune.compare import peers as baselines
from autotune.compare.comparison import Answer, ComparisonSession, ComparisonSetting, of_contender
from autotune.compare.peers import cuequivariance as cuequivariance_peer
from autotune.compare.peers import e3nn as e3nn_peer
from autotune.compare.peers import openequivariance as openequivariance_peer
from autotune.compare.peers import peer_names, peers_for, usable_peers
from autotune.compare.peers.peer import Adapter, CheckedPasses, Peer, Product, Task
from autotune.errors import PeerError
from autotune.measure import timing
from autotune.measure.timing import Sampler
from autotune.workload.config import load_graphs
from autotune.workload.known_kinds import kernel_kind
from autotune.workload.workload import Workload, make_tensors
from kernelgen.arithmetic.directions import DIRECTIONS, Direction
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime.call import DirectCalls, Graph

DIRECTIONS_OF = kernel_kind("conv").passes
PASSES = tuple(name.replace("+", "_") for name in DIRECTIONS_OF)
PROBLEMS = {
    "equal": TensorProductProblem.channelwise("4x0e+4x0o+4x1o+4x1e", "0e+1o", "0o+0e+1o+1e"),
    "unequal": TensorProductProblem.channelwise("8x0e+4x1o+12x2e", "0e+1o+2e", "0e+1o+2e"),
    "connected": TensorProductProblem.fully_connected("3x0e+2x1o", "0e+2x1o", "4x0e+3x1o"),
    "shared": TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o", "0e+1o", shared_weights=True),
    "by hand": TensorProductProblem.from_instructions(
        "2x1o+2x0e", "1o+0e", "2x1o+2x0e+2x1o",
        [(0, 1, 2, "uvu", True, 0.5), (1, 0, 0, "uvu", True), (0, 0, 1, "uvu", True)],
    ),
}  # fmt: skip


def workload(problem: str, operation: str = "conv", layout: str = "mul_ir", dtype: str = "float32") -> Workload:
    return Workload(problem, PROBLEMS[problem], operation, load_graphs()["carbon-small"], dtype, layout)


def peer_named(name: str, work: Workload) -> Peer:
    return next(peer for peer in peers_for(work, "cpu") if peer.name == name)


@pytest.mark.covering(2)
@pytest.mark.parametrize("operation", ["conv", "plain"])
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", ["e3nn", "cuequivariance-naive"])
@pytest.mark.parametrize(
    ("layout", "dtype", "tolerance"),
    [("mul_ir", "float32", 1e-5), ("ir_mul", "float64", 1e-10)],
    ids=["single", "double"],
)
def test_peer_agrees_in_every_pass(
    layout: str, dtype: str, tolerance: float, name: str, problem: str, operation: str
) -> None:
    if name.startswith("cuequivariance"):
        pytest.importorskip("cuequivariance_torch")
    passes = peer_named(name, workload(problem, operation, layout, dtype)).prepare()
    for which in PASSES:
        getattr(passes, which)()
    assert {name: "".join(errors) for name, errors in passes.errors.items()} == {
        name: direction.outputs for name, direction in DIRECTIONS.items()
    }
    assert all(error < tolerance for errors in passes.errors.values() for error in errors.values()), passes.errors
    passes.release()


@pytest.mark.parametrize("which", [name for name in DIRECTIONS_OF if name != "double_backward"])
def test_a_pass_of_ours_runs_the_kernels_of_its_directions(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small graph too, where gradients of leaves come in one launch, asked for or not."""
    session = ComparisonSession(ComparisonSetting(workload("equal"), "cpu", peers=()))
    session.prepare_ours("ours", {direction: HostSchedule() for direction in DIRECTIONS_OF[which]})
    call = getattr(session.contenders["ours"], which.replace("+", "_"))
    call()  # its checks may run other directions
    ran, run_on = [], DirectCalls.run_on

    def watched(operator: DirectCalls, graph: Graph, direction: Direction, *rest: Any) -> dict[str, torch.Tensor]:
        ran.append(direction)
        return run_on(operator, graph, direction, *rest)

    monkeypatch.setattr(DirectCalls, "run_on", watched)
    call()
    assert ran == [DIRECTIONS[name] for name in DIRECTIONS_OF[which]]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["ours", "peer"])
def test_a_peers_time_is_no_time_of_its_host(late: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = ComparisonSession(ComparisonSetting(workload("equal"), "cpu", peers=()))
    session.peers["peer"] = None
    sampler = session.samplers[name] = Sampler(lambda: None, "cpu")
    sampler.late = late
    answer = session.sample(name)
    assert ("its host launches one call too slowly" in answer.error) == (late and name == "peer")
    assert answer.error or answer.sample_us > 0
    session.samplers[name] = sampler  # one that fails is released
    assert session.energy(name, 1.0) == Answer(joules=None), "a CPU's is not counted"
    monkeypatch.setattr(timing, "joules_a_call", lambda call, device, seconds: 0.5 if call is sampler.call else None)
    assert session.energy(name, 1.0).joules == 0.5


def test_peers_warm_up_with_as_many_calls_as_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; those that choose kernels in their first calls say how many."""
    session = ComparisonSession(ComparisonSetting(workload("equal"), "cpu", peers=()))
    warmed = []

    class Recorder:
        def __init__(self, call: Any, device: str) -> None:
            self.device = torch.device("cuda")

        def warm_up(self, calls: int, seconds: float, max_seconds: float) -> float:
            warmed.append((calls, seconds, max_seconds))
            return 0.5

        def peak_bytes(self) -> int:
            return 7

        def conditions(self) -> None:
            return None

        def host_row_us(self, seconds: float) -> float:
            assert seconds == 0.5
            return 3.0

    monkeypatch.setattr(timing, "Sampler", Recorder)
    adapters = {"slow": types.SimpleNamespace(warm_up_calls=60), "quick": types.SimpleNamespace(warm_up_calls=3)}
    session.peers = {name: types.SimpleNamespace(adapter=adapter) for name, adapter in adapters.items()}
    for name in ("slow", "quick", "ours"):
        session.contenders[name] = types.SimpleNamespace(force_step=None, release=lambda: None)
        answer = session.warm_up(name, "force+step")
        assert (answer.error, answer.seconds, answer.memory_bytes, answer.host_us) == ("", 0.5, 7, 3.0)
    limit = comparison.WARM_UP_LIMIT_S
    assert warmed == [(60, 0.05, limit), (3, 0.05, limit), (comparison.WARM_UP_CALLS, 0.02, limit)]
    tuning = [adapter.warm_up_calls for adapter in baselines.ADAPTERS if adapter.name == "cuequivariance"]
    assert tuning and min(tuning) >= 60, "its kernels are chosen during the first calls"


def test_a_peer_is_called_before_its_first_sample() -> None:
    session, calls = ComparisonSession(ComparisonSetting(workload("equal"), "cpu", peers=())), []
    session.peers["peer"] = None
    assert session.sample("peer").error.startswith("KeyError"), "there is no sample without a warm-up"
    session.contenders["peer"] = types.SimpleNamespace(forward=lambda: calls.append(1))
    assert not calls and not session.warm_up("peer", "forward").error and len(calls) >= 2


def test_peers_of_the_cpu_are_labelled() -> None:
    names = [peer.name for peer in peers_for(workload("equal"), "cpu")]
    assert names[:3] == ["e3nn", "e3nn-compiled", "cuequivariance-naive"] and "cuequivariance" not in names


def test_a_peer_of_plain_torch_needs_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "ADAPTERS", (Adapter("plain", ("cpu",), lambda device: None, e3nn_peer.eager),))
    assert peer_names("cpu") == ("plain",) and [peer.name for peer in peers_for(workload("equal"), "cpu")] == ["plain"]


def test_cuequivariances_kernels_are_kept_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where the user says, and nowhere if that cannot be written."""
    name = "CUEQUIVARIANCE_OPS_NVRTC_CACHE_DIR"
    monkeypatch.setenv("EQUITUNE_CACHE", str(tmp_path))
    monkeypatch.setenv(name, "elsewhere")
    cuequivariance_peer.keep_compiled()
    assert os.environ[name] == "elsewhere"
    monkeypatch.delenv(name)
    cuequivariance_peer.keep_compiled()
    assert Path(os.environ[name]).is_dir() and Path(os.environ[name]).parent == tmp_path
    monkeypatch.delenv(name)
    (tmp_path / "file").touch()
    monkeypatch.setenv("EQUITUNE_CACHE", str(tmp_path / "file"))
    cuequivariance_peer.keep_compiled()
    assert name not in os.environ


def test_a_gpu_table_lists_cuequivariance_and_says_why_it_has_no_number() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    peers = {peer.name: peer for peer in peers_for(workload("equal"), "cuda")}
    assert "cuequivariance" in peers and "cuequivariance-naive" not in peers
    with pytest.raises(PeerError, match="cuequivariance: "):
        peers["cuequivariance"].prepare()
    reasons = usable_peers("cuda")
    assert reasons["cuequivariance"] and reasons["e3nn"] is None


def test_falling_back_to_naive_is_an_error_not_a_number() -> None:
    pytest.importorskip("cuequivariance_torch")
    import cuequivariance_torch.primitives.segmented_polynomial as primitives

    if primitives.HAS_CUE_OPS:
        pytest.skip("its kernels are installed here")
    task = Task(workload("equal"), torch.device("cpu"))
    with pytest.raises(PeerError, match="asked for uniform_1d, got naive"):
        cuequivariance_peer.with_kernels(task)


@pytest.mark.parametrize("problem", ["equal", "unequal", "by hand"])
def test_flat_polynomial_is_what_uniform_1d_takes(problem: str) -> None:
    """One uniform mode with scalar coefficients, and the same values as the polynomial that is not flattened."""
    cuet = pytest.importorskip("cuequivariance_torch")
    given = PROBLEMS[problem]
    flat = cuequivariance_peer.polynomial(given, flat=True)
    extents = {segment for operand in flat.operands if operand.ndim for segment in operand.segments}
    assert len(extents) == 1 and all(operand.ndim <= 1 for operand in flat.operands)
    assert all(product.coefficient_subscripts == "" for _, product in flat.operations)
    generator = torch.Generator().manual_seed(0)
    sizes = (given.weight_numel, given.dim_in1, given.dim_in2)
    inputs = [torch.randn(5, size, generator=generator, dtype=torch.float64) for size in sizes]
    structured = cuequivariance_peer.polynomial(given, flat=False)
    one, two = (cuet.SegmentedPolynomial(p, method="naive")(inputs)[0] for p in (flat, structured))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_polynomial_is_cuequivariances_own_channelwise_descriptor() -> None:
    cue = pytest.importorskip("cuequivariance")
    from cuequivariance.group_theory.experimental.e3nn import O3_e3nn

    irreps = [cue.Irreps(O3_e3nn, text) for text in ("4x0e+4x0o+4x1o+4x1e", "0e+1o", "0o+0e+1o+1e")]
    theirs = cue.descriptors.channelwise_tensor_product(*irreps).polynomial.flatten_coefficient_modes().squeeze_modes()
    ours = cuequivariance_peer.polynomial(PROBLEMS["equal"], flat=True)
    assert [operand.segments for operand in ours.operands] == [operand.segments for operand in theirs.operands]
    (_, one), (_, two) = ours.operations[0], theirs.operations[0]
    paths = [{path.indices: float(path.coefficients) for path in product.paths} for product in (one, two)]
    assert paths[0].keys() == paths[1].keys()
    assert all(paths[0][key] == pytest.approx(paths[1][key], rel=1e-5) for key in paths[0])


def test_wrong_numbers_are_refused_pass_by_pass() -> None:
    """A peer whose values are right and whose weight gradient is wrong keeps its forward number only."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w: torch.Tensor) -> torch.Tensor:
            return w.clone()

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
            return torch.cat([-gradient[:, :4], gradient[:, 4:]], dim=1)

    def build(task: Task) -> Product:
        right = e3nn_peer.eager(task).call
        return Product(lambda x, y, w: right(x, y, Wrong.apply(w)))

    adapter = Adapter("wrong", ("cpu",), lambda device: None, build)
    passes = Peer(adapter, Task(workload("equal"), torch.device("cpu"))).prepare()
    passes.forward()
    passes.edge_backward()
    for which in ("backward", "forward_backward"):
        with pytest.raises(PeerError, match=r"wrong: backward disagrees .*: w 2\.0e\+00"):
            getattr(passes, which)()
    with pytest.raises(PeerError, match=r"wrong: joint_backward disagrees .*: w "):
        passes.force_step()
    assert set(passes.errors) == {"forward", "edge_backward"}


def test_a_peer_that_fails_in_its_own_way_becomes_a_peer_error() -> None:
    def build(task: Task) -> Product:
        raise ZeroDivisionError("its own business")

    adapter = Adapter("broken", ("cpu",), lambda device: None, build)
    with pytest.raises(PeerError, match="broken: ZeroDivisionError: its own business"):
        Peer(adapter, Task(workload("equal"), torch.device("cpu"))).prepare()


def test_what_has_no_second_derivatives_says_so_without_trying() -> None:
    """torch.compile takes up to a minute for e3nn's product to say what it says of any code at once."""
    reason = e3nn_peer.no_second_derivatives()
    task = Task(workload("equal"), torch.device("cpu"))
    passes = CheckedPasses("compiled", dataclasses.replace(e3nn_peer.eager(task), no_second=reason), task)
    if not reason:  # a torch that can: nothing is refused
        passes.force_step()
        return
    assert "double backward" in reason
    passes.backward()
    for which in ("force_step", "joint_backward", "double_backward"):
        with pytest.raises(PeerError, match="compiled: RuntimeError: .*double backward"):
            getattr(passes, which)()


def test_peers_share_given_tensors() -> None:
    work = workload("equal")
    tensors = make_tensors(work, "cpu", seed=5)
    first, *others = peers_for(work, "cpu", tensors)
    assert first.task.tensors is tensors and all(other.task is first.task for other in others)


def test_the_graphs_of_a_problem_share_what_a_peer_builds() -> None:
    one, two = (
        Task(dataclasses.replace(workload("equal"), graph=load_graphs()[name]), torch.device("cpu"))
        for name in ("carbon-small", "molecule")
    )
    made = [cuequivariance_peer.module(t.workload.problem, "naive", "float32", t.device) for t in (one, two)]
    assert made[0] is made[1]
    for task in (one, two):
        passes = Peer(cuequivariance_peer.ADAPTERS[1], task).prepare()
        assert passes.errors["forward"]["g"] < 1e-5


def test_time_limit_interrupts() -> None:
    with pytest.raises(PeerError, match="slept too long"), e3nn_peer.time_limit(1, "slept too long"):
        while True:
            sum(range(1000))


def test_openequivariance_is_given_sorted_edges_and_its_own_weight_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interface, played by e3nn: receivers are rows, senders columns, and the permutation transposes the graph."""
    seen: dict[str, torch.Tensor] = {}
    work = workload("equal")
    task = Task(work, torch.device("cpu"))

    class Conv:
        def __init__(self, problem: types.SimpleNamespace, deterministic: bool) -> None:
            assert problem.given["layout"] == "mul_ir" and problem.given["internal_weights"] is False
            self.product = e3nn_peer.eager(task).call

        def __call__(self, x, y, w, rows, columns, permutation):
            seen.update(rows=rows, columns=columns, permutation=permutation)
            return self.product(x, y, w.flip(-1))

        def reorder_weights_from_e3nn(self, w):
            return w.flip(-1)

        reorder_weights_to_e3nn = reorder_weights_from_e3nn

    module = types.ModuleType("openequivariance")
    module.TPProblem = lambda *arguments, **given: types.SimpleNamespace(arguments=arguments, given=given)
    module.TensorProductConv = Conv
    monkeypatch.setitem(__import__("sys").modules, "openequivariance", module)
    adapter = Adapter("openequivariance", ("cpu",), lambda device: None, openequivariance_peer.ADAPTERS[1].build)
    openequivariance_peer.module.cache_clear()
    passes = Peer(adapter, task).prepare()
    passes.double_backward()
    passes.force_step()
    assert set(passes.errors) == {"forward", "edge_backward", "double_backward", "joint_backward"}
    assert torch.equal(seen["rows"], task.edges[1]) and torch.equal(seen["columns"], task.edges[0])
    count = task.tensors.num_nodes
    transposed = (seen["columns"] * count + seen["rows"])[seen["permutation"]]
    assert bool((transposed[1:] >= transposed[:-1]).all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["e3nn", "cuequivariance", "openequivariance", "openequivariance-deterministic"])
@pytest.mark.parametrize("problem", ["equal", "unequal"])
def test_peer_agrees_on_a_gpu(name: str, problem: str) -> None:
    if reason := usable_peers("cuda")[name]:
        pytest.skip(reason)
    work = workload(problem)
    passes = next(peer for peer in peers_for(work, "cuda") if peer.name == name).prepare()
    for which in PASSES:
        getattr(passes, which)()
    assert all(error < 1e-5 for errors in passes.errors.values() for error in errors.values()), passes.errors


def test_every_adapter_belongs_somewhere() -> None:
    names = [(adapter.name, operation) for adapter in baselines.ADAPTERS for operation in adapter.operations]
    assert len(set(names)) == len(names)
    assert all(set(adapter.backends) <= {"cpu", "cuda"} and adapter.backends for adapter in baselines.ADAPTERS)


def test_openequivariances_order_has_edges_by_receiver_then_sender_and_back() -> None:
    from autotune.compare.peers.openequivariance import _order

    given = torch.randint(0, 9, (2, 200), generator=torch.Generator().manual_seed(0))
    sender, receiver, transposed = _order(*given)
    pairs = list(zip(receiver.tolist(), sender.tolist(), strict=True))
    assert pairs == sorted(zip(given[1].tolist(), given[0].tolist(), strict=True))
    back = list(zip(sender[transposed].tolist(), receiver[transposed].tolist(), strict=True))
    assert back == sorted(zip(given[0].tolist(), given[1].tolist(), strict=True))


@pytest.mark.parametrize("lost", [False, True])
def test_a_contenders_memory_is_freed_unless_its_device_is_lost(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    monkeypatch.setattr("autotune.compare.comparison.device_is_lost", lambda device: lost)
    session: Any = types.SimpleNamespace(device="cpu", release=released.append)

    @of_contender
    def fails(session: ComparisonSession, name: str) -> Answer:
        raise ValueError("no room")

    assert fails(session, "e3nn") == Answer(error="ValueError: no room", device_lost=lost)
    assert released == ([] if lost else ["e3nn"])
