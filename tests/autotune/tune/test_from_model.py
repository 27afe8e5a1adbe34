"""Tuning what a model runs: what is recorded, which workloads follow, before and after, and a second run."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from database_samples import entry, store
from small_net import EDGES, NODES, SmallNet, batch

from autotune.database.misses import Request
from autotune.errors import ConfigError
from autotune.search.study import Study
from autotune.tune import model as run
from autotune.tune import model_passes
from autotune.tune import run as tuner
from autotune.tune.model import tune_model
from autotune.tune.model_passes import (
    CALL,
    ENERGIES,
    FEWEST_ROUNDS,
    TRAINING,
    Loaded,
    Recording,
    compare,
    every_module,
    label_of,
    needs_of,
    open_named,
    passes_of,
    places_of,
    recorded,
    sources_of,
    workloads_for,
)
from autotune.tune.run import TimeBudget
from autotune.workload.config import TuneConfig, load_all
from autotune.workload.graphs import EdgesAlone, GivenEdges, NodesAlone, RandomNeighbours, build_graph
from autotune.workload.workload import Workload
from kernelgen.compat import o3
from kernelgen.device import device_facts
from kernelgen.errors import InputError
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime.call import WATCHERS
from kernelgen.version import GENERATOR_VERSION

FACTS = device_facts("cpu")


def recording_of(model: torch.nn.Module, training: bool = False, given: Any = None) -> Recording:
    with recorded() as recording:
        for call in passes_of(model, batch() if given is None else given, training).values():
            call()
    return recording


def publish_one(folder: Path) -> Any:
    """What stands for ``tune``: it publishes the first direction of the only workload."""

    def tune(config: Any, *_: Any, **__: Any) -> None:
        (workload,) = config.workloads
        problem, direction = workload.problem.key, workload.directions[0]
        store(folder, FACTS, entry(problem=problem, direction=direction, graph_class=workload.graph_class().text))

    return tune


def directions(recording: Recording) -> list[str]:
    return sorted(request.direction for request in recording.requests)


def tuned(request: Request, **changes: Any) -> Any:
    """A database entry that answers a request exactly."""
    kernel = {name: getattr(request, name) for name in ("problem", "operation", "direction", "dtype", "layout")}
    return entry(**kernel, graph_class=request.graph_class.text, deterministic=request.deterministic, **changes)


def test_what_a_model_runs_is_recorded_with_its_graph(shipped: Path) -> None:
    recording = recording_of(SmallNet())
    assert directions(recording) == ["backward", "forward"], "forces need the gradients of edges and of weights"
    for request, source in recording.requests.items():
        assert (request.operation, request.dtype, request.layout) == ("conv", "float32", "mul_ir")
        assert (request.num_edges, request.num_nodes) == (EDGES, NODES)
        assert isinstance(source, GivenEdges)
    assert recording.device == torch.device("cpu")
    assert not WATCHERS


def test_the_graph_to_tune_on_is_the_models_own(shipped: Path) -> None:
    positions, sender, receiver = batch()
    shuffled = torch.randperm(EDGES, generator=torch.Generator().manual_seed(1))
    recording = recording_of(SmallNet(), given=(positions, sender[shuffled], receiver[shuffled]))
    (workload,) = workloads_for(needs_of(recording.requests, FACTS), "box")
    graph = build_graph(workload.graph)
    assert (graph.name, graph.num_nodes, graph.num_edges) == ("box", NODES, EDGES)
    assert torch.equal(graph.receiver, receiver) and torch.equal(graph.sender, sender), "sorted as all graphs are"


def test_a_training_step_runs_more_directions(shipped: Path) -> None:
    found = directions(recording_of(SmallNet(), training=True))
    assert set(found) > {"forward", "backward"}
    assert {"double_backward", "joint_backward"} & set(found)


def test_a_deterministic_convolution_asks_for_the_schedules_of_its_parts(shipped: Path) -> None:
    model = SmallNet(deterministic=True)
    asked = recording_of(model, training=True).requests
    assert all(request.deterministic for request in asked)
    assert "source_backward" in {request.direction for request in asked}


def test_the_recorder_ends_with_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), recorded():
        raise ZeroDivisionError
    assert not WATCHERS


def test_the_model_and_its_gradients_stay_as_they_were(shipped: Path) -> None:
    model, given = SmallNet(), batch()
    model.eval()
    for call in passes_of(model, given, training=True).values():
        call()
    assert not model.training
    assert given[0].grad is None and all(weight.grad is None for weight in model.parameters())


def test_a_batch_may_be_a_tensor_a_dict_or_a_function() -> None:
    seen: list[Any] = []

    class Takes(torch.nn.Module):
        def forward(self, given: Any) -> dict[str, Any]:
            seen.append(given)
            return {"energy": given["x"].sum() if isinstance(given, dict) else given.sum()}

    passes_of(Takes(), torch.ones(2))[ENERGIES]()
    data = {"x": torch.ones(2, requires_grad=True)}
    passes_of(Takes(), data)[ENERGIES]()
    assert torch.equal(seen[0], torch.ones(2)) and seen[1] is not data and torch.equal(seen[1]["x"], data["x"])
    called = passes_of(Takes(), lambda: seen.append("called"), training=True)
    assert list(called) == [CALL]
    called[CALL]()
    assert seen[2] == "called"
    with pytest.raises(InputError, match="no output that depends on a weight"):
        passes_of(Takes(), data, training=True)[TRAINING]()


def test_directions_of_one_kernel_make_one_workload_and_tuned_ones_are_left_out(shipped: Path) -> None:
    asked = list(recording_of(SmallNet(), training=True).requests)
    forward = next(request for request in asked if request.direction == "forward")
    store(shipped, FACTS, tuned(forward))
    needs = needs_of(recording_of(SmallNet(), training=True).requests, FACTS)
    assert [need.request.direction for need in needs if need.is_tuned] == ["forward"]
    (workload,) = workloads_for(needs, "box")
    assert "forward" not in workload.directions
    assert {workload.identity(direction) for direction in workload.directions} == {
        request.identity for request in asked if request is not forward
    }
    order = Workload("x", workload.problem, "conv", workload.graph).directions
    assert list(workload.directions) == sorted(workload.directions, key=order.index), "as in a whole search"


def test_a_kernel_of_too_few_trials_is_gone_on_with(shipped: Path) -> None:
    requests = recording_of(SmallNet()).requests
    for request in requests:
        count = 8 if request.direction == "forward" else 40
        trials = {"file": "", "count": count, "ok": count, "ended": "time"}
        store(shipped, FACTS, tuned(request, generator=GENERATOR_VERSION, trials=trials))
    needs = needs_of(requests, FACTS)
    assert all(need.is_tuned for need in needs)
    (workload,) = workloads_for(needs, "box")
    assert workload.directions == ("forward",)
    found = run.ModelTuning("m", "cpu", needs, needs, {})
    assert found.left == 1 and "tuned already: too few trials (8)" in str(found)
    assert "0 not tuned; 1 not finished" in str(found) and "nothing is left" not in str(found)
    more = workloads_for(needs_of(requests, FACTS, trials=50), "box")
    assert more[0].directions == ("forward", "backward"), "the user wants more trials"


def test_names_made_from_keys_are_explained(shipped: Path) -> None:
    problem = TensorProductProblem.channelwise("+".join(f"8x{degree}e" for degree in range(8)), "0e", "0e")
    request = Request(problem.key, "plain", "forward", "float32", "mul_ir", False, 500, 0)
    known = Request(load_all()["tiny"].key, "plain", "forward", "float32", "mul_ir", False, 500, 0)
    needs = needs_of(sources_of([request, known]), FACTS)
    (line,) = run.opaque_names(needs)
    label = label_of(problem, "plain", {})
    assert line.startswith(f"{label} is 8x0e+8x1e+")
    assert line in str(run.ModelTuning("m", "cpu", needs, needs, {}))


def test_convolutions_come_first_and_names_do_not_depend_on_the_model() -> None:
    names = {problem: name for name, problem in load_all().items()}
    known = load_all()["mace-mp-medium"]
    assert label_of(known, "conv", names) == "mace-mp-medium"
    assert label_of(known, "conv", {}) == label_of(known, "conv", {}) != label_of(known, "plain", {})
    kind = ("float32", "mul_ir", False)
    plain = Request(known.key, "plain", "forward", *kind, 500, 0)
    conv = Request(known.key, "conv", "forward", *kind, 500, 20)
    contraction = Request("sc|0e+1o|0e|2|8", "contraction", "forward", *kind, 50, 0)
    sources = sources_of([plain, conv, contraction])
    assert sources == {plain: EdgesAlone(500), conv: RandomNeighbours(20, 500), contraction: NodesAlone(50)}
    found = workloads_for(needs_of(sources, FACTS), "random")
    assert [workload.operation for workload in found] == ["conv", "contraction", "plain"]


def test_requests_of_one_graph_class_count_once(shipped: Path) -> None:
    positions, sender, receiver = batch()
    model = SmallNet()
    with recorded() as recording:
        model(positions, sender, receiver)
        model(positions, sender[:-4], receiver[:-4])
    assert len(recording.requests) == 2
    assert len(needs_of(recording.requests, FACTS)) == 1


def test_a_table_of_misses_has_no_column_of_modules_which_a_miss_does_not_know(shipped: Path) -> None:
    model = SmallNet()
    needs = needs_of(recording_of(model).requests, FACTS)
    of_model, of_misses = (str(run.ModelTuning("m", "cpu", needs, needs, places)) for places in (places_of(model), {}))
    title = next(line for line in of_misses.splitlines() if "kernel" in line)
    assert title.split()[:2] == ["kernel", "direction"]
    assert "module" in of_model and "conv " in of_model


def test_modules_that_another_hides_are_found_too() -> None:
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    hidden = SmallNet().conv
    model.layer.__dict__["_hidden"] = hidden
    assert ("layer", hidden) in every_module(model)
    assert places_of(model) == {hidden.problem.key: ["layer"]}


def test_before_and_after_run_their_own_schedules(shipped: Path) -> None:
    model, given = SmallNet(), batch()
    (request,) = [asked for asked in recording_of(model).requests if asked.direction == "forward"]
    before = Loaded(model)
    assert model.conv.tuning["forward"].origin == "default"
    store(shipped, FACTS, tuned(request, schedule=HostSchedule(threads=1)))
    graph_class = request.graph_class.text
    ran: list[str] = []

    def call() -> None:
        model(*given)
        found = model.conv.tuning["forward"]
        ran.append(found.origin if found.entry is None else found.entry.graph_class)

    (times,) = compare({"energies": call}, model, before, torch.device("cpu"))
    assert times.rounds >= FEWEST_ROUNDS and times.low <= times.ratio <= times.high
    assert ran[:4] == [graph_class, "default", graph_class, "default"], "in turn, after a first call"
    assert ran.count("default") == ran.count(graph_class) - 1
    model(*given)
    assert model.conv.tuning["forward"].entry is not None, "the model keeps the new schedules"
    before.put_back()
    assert model.conv.tuning["forward"].origin == "default"


def test_a_model_without_our_kernels_is_an_error() -> None:
    with pytest.raises(InputError, match=r"ran no kernel of Equitune on this batch; call autotune.accelerate"):
        tune_model(torch.nn.Linear(3, 1), torch.ones(2, 3))
    with pytest.raises(InputError, match="model is of type str"):
        tune_model("my.model", torch.ones(2, 3))  # type: ignore[arg-type]


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("EQUITUNE_CACHE", str(tmp_path))
    product = o3.FullTensorProduct("1x0e+1x1o", "1x0e+1x1o")
    monkeypatch.setattr(model_passes, "returned_by", lambda text: (torch.nn.Sequential(product), torch.ones(1)))
    with pytest.raises(InputError, match="no part of the model is Equitune's: .*no C.. compiler"):
        open_named("mine:net", None, "cpu", None, training=False)


@pytest.mark.slow
def test_a_model_is_tuned_once(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given, results = SmallNet(), batch(), tmp_path / "own"
    first = tune_model(model, given, budget="2m", trials=1, sampler="random", results=results, graph="box")
    assert [need.found.origin for need in first.before] == ["default", "default"]
    assert first.left == 0 and [times.name for times in first.times] == [ENERGIES]
    text = str(first)
    assert "2 kernels: 0 tuned before, 2 tuned now, 0 not tuned" in text
    assert f"{ENERGIES}: " in text and "nothing is left to tune here" in text and " conv " in text
    saved = first.after[0].found.entry
    assert saved is not None and saved.graph == {"name": "box", "edges": EDGES, "nodes": NODES}

    monkeypatch.setattr(run, "tune", lambda *_, **__: pytest.fail("a second run has nothing to search"))
    second = tune_model(SmallNet(), given, results=results)
    assert second.left == 0 and second.times == ()
    assert "2 kernels: 2 tuned before, 0 tuned now, 0 not tuned" in str(second)


def test_what_does_not_fit_into_the_budget_is_left_to_a_later_run(shipped: Path) -> None:
    needs = needs_of(recording_of(SmallNet()).requests, FACTS)
    (workload,) = workloads_for(needs, "box")
    now = time.monotonic()
    budget = TimeBudget(1000.0, 2, begin=now, comparison_s=100.0, setup_s=50.0, trial_s=10.0)
    assert len(workload.directions) == 2
    assert not budget.is_spent(8, workload), "1000 s are left, 310 s are needed"
    budget.begin = now - 680.0
    assert not budget.is_spent(8, workload)
    budget.begin = now - 700.0
    assert budget.is_spent(8, workload)
    assert not budget.is_spent(4, workload)
    assert not TimeBudget(None, 2, comparison_s=1e9).is_spent(8, workload)


def test_nothing_begins_after_the_budget_though_another_tuner_has_the_first(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (first,) = workloads_for(needs_of(recording_of(SmallNet()).requests, FACTS), "box")
    begun: list[str] = []

    def left_to_another(job: Any, *_: Any) -> tuple[list[Any], bool]:
        begun.append(job.workload.label)
        job.left = True
        return [], False

    monkeypatch.setattr(tuner._Job, "run", left_to_another)
    config = TuneConfig(tmp_path / "a model", (first, dataclasses.replace(first, label="second")))
    tuner.tune(config, "cpu", 1e-9, results_dir=tmp_path, fewest_trials=8)
    assert begun == [first.label]
    assert "the time is up; 1 of 2 workloads are left" in capsys.readouterr().err


def test_a_model_is_not_timed_again_after_the_budget(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "tune", publish_one(shipped))
    model = SmallNet()
    found = run.tune_passes(model, passes_of(model, batch()), 1e-9, {}, name="m", graph="g")
    assert found.times == () and str(found).endswith("the model was not timed again: the budget is used up")


def test_a_longer_budget_is_named_by_what_trials_take() -> None:
    """Not by the start, nor by one trial that waited."""
    lines = [{"compile_s": 2.0, "measure_s": 1.0}] * 4 + [{"compile_s": 0.0, "measure_s": 300.0}]
    study: Any = SimpleNamespace(finished=dict(enumerate(lines)))
    assert Study.trial_s(study, compilers=2) == 2.0


def test_after_an_interruption_nothing_more_is_timed(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "tune", publish_one(shipped))
    model = SmallNet()
    passes = passes_of(model, batch())
    found = run.tune_passes(model, passes, 10.0, {}, name="m", graph="g", stopped=lambda: True)
    assert found.left == 1 and found.times == ()
    assert "2 kernels: 0 tuned before, 1 tuned now, 1 not tuned" in str(found)
    assert dataclasses.replace(found, after=found.before).left == 2


@pytest.mark.parametrize(("ending", "package"), [(".model", "mace"), (".pth", "sevennet"), (".zip", "nequip")])
def test_a_missing_package_says_what_to_install(
    tmp_path: Path, ending: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"my{ending}"
    path.write_bytes(b"")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"{package} is not installed .*: pip install "):
        open_named(str(path), "mof", "cpu", None, training=False)


def test_a_function_may_return_a_model_and_its_inputs(shipped: Path) -> None:
    opened = open_named("small_net:net_for_commands", None, "cpu", None, training=False)
    assert (opened.name, opened.graph, list(opened.passes)) == (
        "small_net:net_for_commands",
        "net_for_commands",
        [ENERGIES],
    )
    with recorded() as recording:
        opened.passes[ENERGIES]()
    assert directions(recording) == ["backward", "forward"]
