"""Symmetric contractions as something to tune: configs, spaces, checks, peers, entries, a run as a whole."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from autotune import SymmetricContraction
from autotune.bench.kernels import bench
from autotune.cli.show import show
from autotune.compare import precompile
from autotune.compare.peers import others as contraction_peers
from autotune.compare.peers import peers_for
from autotune.compare.peers.peer import Peer
from autotune.database.store import Database, database_path
from autotune.errors import PeerError, WorkerError
from autotune.measure import references as contraction_reference
from autotune.measure.kinds import measured_kind, space_of
from autotune.measure.trial import TrialJob, TrialSetting, equivariance_error
from autotune.report import write_reports
from autotune.search.loop import compile_ahead
from autotune.tune.publish import workload_of
from autotune.tune.run import tune
from autotune.workload.config import find_problem, load_all, load_config
from autotune.workload.graphs import GraphSpec, NodesAlone, build_graph
from autotune.workload.workload import Workload, moved_bytes
from kernelgen.arithmetic import contraction_couplings as equivariant_polynomials
from kernelgen.arithmetic.contraction import CONTRACTION_DIRECTIONS
from kernelgen.device import DeviceFacts, cuda_facts, device_facts
from kernelgen.kernels.symmetric_contraction import ContractionHostSchedule
from kernelgen.problem.other_kinds import ContractionProblem

PROBLEM = ContractionProblem("0e+1o+2e", "1o+0e", 3, 4)
FEW = GraphSpec("few", NodesAlone(20, 7, 3))
PASSES = ("forward", "backward", "feature_backward", "double_backward", "forward_backward", "force_step")
CONFIG = """
problem = "small"
graph = "few"
trials = 2
directions = ["forward", "feature_backward"]
passes = ["forward", "feature_backward"]
[contractions.small]
irreps_in = "0e+1o"
irreps_out = "0e+1o"
correlation = 2
channels = 8
[graphs.few]
nodes = 60
elements = 7
occurring = 3
"""
FACTS = {"cuda": cuda_facts("sm_90"), "cpu": DeviceFacts("cpu", "a host", "x86_64", 8, vector_bytes=64)}


def workload(
    problem: ContractionProblem = PROBLEM, dtype: str = "float64", layout: str = "mul_ir", graph: GraphSpec = FEW
) -> Workload:
    return Workload("sc", problem, "contraction", graph, dtype, layout)


def written(folder: Path, text: str = CONFIG) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_a_config_names_contractions_and_nodes(tmp_path: Path) -> None:
    more = CONFIG.replace('problem = "small"', 'problem = ["small", "mace-mp-contraction-1o"]')
    small, medium = load_config(written(tmp_path, more), "cpu").workloads
    assert small.problem == ContractionProblem("0e+1o", "0e+1o", 2, 8)
    assert medium.problem == load_all()["mace-mp-contraction-1o"] == find_problem("sc|0e+1o+2e+3o|0e+1o|3|128")
    assert small.operation == "contraction" and small.graph_class().text == "contraction-e6"
    assert small.directions == ("forward", "feature_backward") and workload().directions == tuple(
        CONTRACTION_DIRECTIONS
    )
    graph = build_graph(small.graph)
    assert (graph.num_edges, graph.num_nodes) == (60, 3) and len(graph.sender.unique()) == 3
    assert int(graph.sender.max()) < 7 and graph.sender.bincount().max() == 20
    assert bool((graph.sender[1:] < graph.sender[:-1]).any()), "nodes are not sorted by element"
    assert torch.equal(graph.sender, NodesAlone(60, 7, 3).rows()), "the same each time"
    assert len(NodesAlone(2, 89, 3).rows().unique()) == 2


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_shipped_config_has_both_layouts_and_dtypes(backend: str) -> None:
    config = load_config("contraction", backend)
    kinds = {(work.dtype, work.layout) for work in config.workloads}
    assert kinds == {(dtype, layout) for dtype in ("float32", "float64") for layout in ("ir_mul", "mul_ir")}
    sizes = {"cpu": {200}, "cuda": {21, 1000, 5184}}
    assert {work.num_edges for work in config.workloads} == sizes[backend]
    assert {work.label[-2:] for work in config.workloads} == {"0e", "1o", "2e"}
    assert config.passes is not None and "force_step" in config.passes


@pytest.mark.parametrize("backend", FACTS)
@pytest.mark.parametrize("direction", CONTRACTION_DIRECTIONS)
def test_the_space_has_legal_schedules_of_different_kernels(direction: str, backend: str) -> None:
    space = space_of(workload(), direction, FACTS[backend])
    assert space.broken_limit(space.default) is None and space.values(space.default) is not None
    assert all(space.broken_limit(schedule) is None for schedule in space.probes)
    assert max(space.knobs["nodes_per_task"]) == 32, "no task of more than twice as many nodes"
    sums = direction in ("backward", "double_backward")
    assert ("order" in space.knobs) is not sums and ("gradients" in space.knobs) is sums
    if backend == "cpu":
        assert space.knobs["channel_block"] == (4,)  # all four channels
        legal = {schedule for schedule in space.shuffled(0) if space.broken_limit(schedule) is None}
        assert len(legal) == space.size
    else:
        assert ("sums" in space.knobs) is sums and space.probes
        one_warp = [space.schedule({"block_size": 32, "pace": pace}) for pace in ("free", "parts")]
        assert one_warp[0] == one_warp[1]


def test_compulsory_bytes() -> None:
    work, nodes, elements = workload(dtype="float32"), 10, 2
    x, g, weights = 9 * 4, 4 * 4, 4 * len(equivariant_polynomials.polynomials(PROBLEM))
    found = {name: work.compulsory_bytes(name, nodes, elements) - 4 * nodes for name in CONTRACTION_DIRECTIONS}
    w = elements * weights
    assert found == {
        "forward": 4 * (nodes * (x + g) + w),
        "backward": 4 * (nodes * (2 * x + g) + 2 * w),
        "feature_backward": 4 * (nodes * (2 * x + g) + w),
        "double_backward": 4 * (nodes * (3 * x + 2 * g) + 2 * w),
    }
    parts = work.kind.passes["force_step"]
    assert parts == ("forward", "feature_backward", "double_backward", "backward")
    assert moved_bytes(work, "force_step") == sum(work.compulsory_bytes(name, 20, 3) for name in parts)


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_output_is_held_to_the_reference(dtype: str, layout: str) -> None:
    work, tolerance = workload(dtype=dtype, layout=layout), {"float32": 1e-6, "float64": 1e-13}[dtype]
    kind = measured_kind(work.operation)
    tensors = kind.tensors(work, "cpu")
    reference, operator = kind.reference(work, "cpu", tensors), kind.build(work, {}, "cpu")
    for name, direction in CONTRACTION_DIRECTIONS.items():
        outputs = kind.run(operator, name, tensors, None, poison=True)()
        errors = reference.check(name, outputs)
        assert list(errors) == list(direction.outputs) and max(errors.values()) < tolerance
        for slot, output in outputs.items():
            wrong = output.clone()
            last = (int(tensors.sender[-1]), -1, -1) if slot == "w" else (-1, -1)  # type: ignore[index]
            wrong[last] += 1.0
            assert reference.check(name, {slot: wrong})[slot] > 1e-4, "one element of the last row"
            wrong[last] = torch.nan
            assert reference.check(name, {slot: wrong})[slot] == math.inf
        if dtype == "float64":
            error = equivariance_error(
                work, tensors, lambda t, name=name: kind.run(operator, name, t, None, poison=False)()
            )
            assert error < 1e-12


@pytest.mark.parametrize("problem", ["0e+1o|0e|4", "1e+0o+1o|1e+0e|2", "1o|0e+1o|3", "0e|1o|2"])
def test_the_reference_spans_what_the_basis_spans(problem: str) -> None:
    """Odd parities, degrees without polynomials, and an output that nothing reaches."""
    inside, out, correlation = problem.split("|")
    work = workload(ContractionProblem(inside, out, int(correlation), 3))
    kind = measured_kind("contraction")
    tensors = kind.tensors(work, "cpu")
    reference, operator = kind.reference(work, "cpu", tensors), kind.build(work, {}, "cpu")
    for name in CONTRACTION_DIRECTIONS:
        errors = reference.check(name, kind.run(operator, name, tensors, None, poison=True)())
        assert max(errors.values(), default=0.0) < 1e-12


@pytest.mark.parametrize("fault", ["one is missing", "one is wrong"])
def test_the_reference_refuses_a_wrong_basis(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ContractionProblem("0e+1o", "1o", 2, 2)
    *most, last = equivariant_polynomials.polynomials(problem)
    (*terms, (monomial, coefficient)), *others = last.components
    wrong = dataclasses.replace(last, components=((*terms, (monomial, 1.1 * coefficient)), *others))
    changed = tuple(most) if fault == "one is missing" else (*most, wrong)
    monkeypatch.setattr(contraction_reference, "polynomials", lambda problem: changed)
    contraction_reference.meanings.cache_clear()
    message = "has 0 polynomials of 1" if fault == "one is missing" else "are not equivariant"
    with pytest.raises(WorkerError, match=message):
        contraction_reference.meanings(problem)
    contraction_reference.meanings.cache_clear()


@pytest.mark.parametrize("direction", CONTRACTION_DIRECTIONS)
def test_cuda_kernels_compile(direction: str) -> None:
    space = space_of(workload(dtype="float32"), direction, FACTS["cuda"])
    for schedule in (space.default, space.schedule({"pace": "parts", "min_blocks": 2})):
        assert compile_ahead(space, schedule).resources["registers"] > 0


def test_kernels_of_a_training_step_are_compiled_ahead() -> None:
    kind, work = measured_kind("contraction"), workload()
    specs = kind.specs(kind.build(work, {}, "cpu"), iter(("forward", "double_backward")))
    assert [spec.direction.text for spec in specs] == [
        *("contraction forward:->g", "contraction double_backward:x->xwg", "contraction double_backward:x->xw")
    ]


def test_a_trial_is_checked_and_timed() -> None:
    session = TrialSetting(workload(), "cpu").open()
    job = TrialJob("double_backward", ContractionHostSchedule(2, "element", channel_block=4), max_seconds=0.01)
    outcome = session.measure(job)
    assert outcome.ok and outcome.time_us and set(outcome.errors) == {"x", "w", "g"}, outcome.reason
    given = session.measure(TrialJob("backward", ContractionHostSchedule(2, "given", channel_block=4)))
    assert given.state == "illegal" and "order='given' is not for rows of gradients of the weights" in given.reason


def peer(name: str, work: Workload) -> Peer:
    return next(found for found in peers_for(work, "cpu") if found.name == name)


@pytest.mark.parametrize("name", ["cuequivariance-naive", "mace"])
def test_peers_agree_in_every_pass(name: str) -> None:
    pytest.importorskip({"mace": "mace"}.get(name, "cuequivariance_torch"))
    for layout, dtype in (("mul_ir", "float64"), ("ir_mul", "float32")):
        passes = peer(name, workload(ContractionProblem("0e+1o", "1o+0e", 2, 4), dtype, layout)).prepare()
        for which in PASSES:
            getattr(passes, which)()
        assert {key: "".join(errors) for key, errors in passes.errors.items()} == {
            key: direction.outputs for key, direction in CONTRACTION_DIRECTIONS.items()
        }
        limit = {"float32": 1e-5, "float64": 1e-12}[dtype]
        assert all(error < limit for errors in passes.errors.values() for error in errors.values()), passes.errors
        passes.release()


def test_a_peer_of_other_polynomials_is_refused() -> None:
    def evaluate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x[:, :1] * w.sum(1, keepdim=True)).expand(-1, PROBLEM.dim_out, -1)

    with pytest.raises(PeerError, match="its polynomials are not those of sc"):
        contraction_peers.fitted(PROBLEM, 2, evaluate)


def test_absent_peers_are_listed_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    assert [found.name for found in peers_for(workload(), "cpu")] == ["mace", "cuequivariance-naive"]
    assert [found.name for found in peers_for(workload(), "cuda")] == ["mace", "cuequivariance"]
    monkeypatch.setitem(sys.modules, "mace.modules.symmetric_contraction", None)
    with pytest.raises(PeerError, match=r"mace: not usable \(.*\); install equitune\[models-mace\]"):
        peer("mace", workload()).prepare()


def test_peers_are_set_up_on_nodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Workload] = []
    monkeypatch.setattr("autotune.compare.precompile.peers_for", lambda work, device: met.append(work) or [])
    assert precompile.build_peers(workload(), "cpu", ("mace",), PASSES) == {}
    assert met[0].graph.source == NodesAlone(100)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tuned_benched_shown_and_reported(tmp_path: Path, shipped: Path) -> None:
    """A run as a whole, its entries loaded, compared and shown."""
    config = load_config(written(tmp_path), "cpu")
    entries = tune(config, device="cpu", results_dir=shipped, with_peers=False)
    assert [found.direction for found in entries] == ["forward", "feature_backward"]
    for found in entries:
        assert max(found.errors.values()) < found.tolerance and found.trials["count"] == 2
        assert found.graph == {"name": "few", "edges": 60, "nodes": 3} and found.certificate["bitwise"] is True
    again = Database.load(database_path(shipped, device_facts("cpu").slug))
    assert {e.identity for e in again.entries} == {found.identity for found in entries}
    graph = workload_of(entries[0], ("forward",), {}, by_size=True).graph
    assert graph == GraphSpec("few", NodesAlone(60, occurring=3))
    module = SymmetricContraction("8x0e+8x1o", "8x0e+8x1o", 2, 7, num_nodes=60)
    origins = {name: tuning.origin for name, tuning in module.tuning.items()}
    assert origins == dict.fromkeys(CONTRACTION_DIRECTIONS, "default") | dict.fromkeys(config.passes or (), "exact")
    rows = bench(config, "cpu", shipped, peers=("mace",), seconds_each=0.0)
    assert [row["pass"] for row in rows] == ["forward", "feature_backward"]
    for row in rows:
        assert row["origins"] == {row["pass"]: "exact"} and {"equitune", "equitune-default"} <= set(row["times"])
        assert row["bytes"] == config.workloads[0].compulsory_bytes(row["pass"], 60, 3)
    text = show(PROBLEM.key.replace("0e+1o+2e|1o+0e|3|4", "0e+1o|0e+1o|2|8"))
    assert "forward: nearest" in text and "few, 60 nodes, 3 elements" in text and "8 channels" in text
    (page,) = write_reports(shipped, tmp_path / "reports")
    assert "60 nodes, 3 elements" in page.read_text() and "feature backward" in page.read_text()
