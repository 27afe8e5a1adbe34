"""The processes of a run: workloads of a problem share two, one that searches and one that compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.compare.comparison import ComparisonSession, ComparisonSetting
from autotune.compare.peers.peer import CheckedPasses
from autotune.compare.precompile import IdleProcess, build_peers
from autotune.measure.references import e3nn_product
from autotune.measure.trial import TrialJob, TrialSession, TrialSetting
from autotune.measure.worker import Worker
from autotune.tune.run import WorkerPair, WorkerPairs, tune
from autotune.workload.config import load_graphs
from autotune.workload.kind import Problem
from autotune.workload.workload import Workload
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.problem.product import TensorProductProblem

LIMIT_S = 300.0
PROBLEM = TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o", "0e+1o")
OTHER = TensorProductProblem.channelwise("2x0e+2x1o", "0e+1o", "0e+1o")
WORKLOAD = Workload("tiny", PROBLEM, "conv", load_graphs()["molecule"])
WORKLOADS = (WORKLOAD, dataclasses.replace(WORKLOAD, dtype="float64"), dataclasses.replace(WORKLOAD, operation="plain"))
TWO = """
graph = "molecule"
directions = ["forward"]
[[workload]]
problem = "one"
[[workload]]
problem = "other"
[problems]
one = { in1 = "4x0e+4x1o", in2 = "0e+1o", filter = "0e+1o" }
other = { in1 = "2x0e+2x1o", in2 = "0e+1o", filter = "0e+1o" }
"""
SCHEDULE = HostSchedule(path_groups=2, channel_block=4)


@pytest.fixture
def pairs() -> Iterator[WorkerPairs]:
    with WorkerPairs("cpu") as pairs:
        yield pairs


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_workloads_of_a_problem_share_two_processes(pairs: WorkerPairs) -> None:
    """Across dtypes and operations, at rest in between."""
    pair = pairs.of(PROBLEM)
    pair.launch()
    for workload in WORKLOADS:
        worker = pair.search(workload)
        assert worker.setting == TrialSetting(workload, "cpu")
        outcome = worker.ask(LIMIT_S, TrialSession.measure, TrialJob("forward", SCHEDULE, max_seconds=0.0))
        assert (outcome.state, outcome.reason) == ("ok", "")
        assert outcome.errors["g"] < (1e-12 if workload.dtype == "float64" else 1e-5)
        pair.rest()
        assert worker.ask(LIMIT_S, repr) == "None", "at rest it holds no session"
        pair.comparing.reopen(ComparisonSetting(workload, "cpu", ()))
        assert pair.comparing.ask(LIMIT_S, ComparisonSession.build_seconds) == {}
        answer = pair.comparing.ask(LIMIT_S, ComparisonSession.prepare_ours, "ours", {"forward": SCHEDULE})
        assert not answer.error
    assert pair.searching.starts == pair.comparing.starts == 1
    assert pairs.of(PROBLEM) is pair
    assert pairs.of(OTHER) is not pair
    pair.searching.settle()
    assert pairs.of(PROBLEM) is not pair, "the processes of a problem end where the next begins"


def test_nothing_is_started_that_nobody_needs(pairs: WorkerPairs) -> None:
    pair = pairs.of(PROBLEM)
    pair.rest()
    pairs.launch(PROBLEM, OTHER)
    assert pair.searching.starts == pair.comparing.starts == 0, "on a CPU imports would disturb the clock"
    assert pair.searching.setting == IdleProcess(PROBLEM, "cpu")
    pairs.ahead = True
    pairs.launch(PROBLEM, OTHER)
    assert pair.searching.starts == pair.comparing.starts == 1
    following = pairs._pair(OTHER)
    assert following.searching.starts == 1
    assert pairs.of(OTHER) is following, "what was launched ahead is what serves"


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_what_was_launched_ahead_serves_the_next_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a whole run: publishing a problem does not end the processes that are starting for the next one."""
    started: list[str] = []

    class Ahead(WorkerPairs):
        def __init__(self, device: str) -> None:
            super().__init__(device)
            self.ahead = True

    class Counted(WorkerPair):
        def __init__(self, problem: Problem, device: str) -> None:
            super().__init__(problem, device)
            started.append(problem.key)

    monkeypatch.setattr("autotune.tune.run.WorkerPairs", Ahead)
    monkeypatch.setattr("autotune.tune.run.WorkerPair", Counted)
    config = tmp_path / "two.toml"
    config.write_text(TWO)
    entries = tune(config, "cpu", trials=1, results_dir=tmp_path / "results", with_peers=False)
    assert len({entry.problem for entry in entries}) == 2
    assert started == [PROBLEM.key, OTHER.key]


def products_built(session: object) -> int:
    """How often e3nn's product was built in a process, for its session and before."""
    return e3nn_product.cache_info().misses


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_process_sets_peers_up_before_it_is_needed() -> None:
    """What is built for the small graph serves the comparison, which builds nothing more."""
    peers = ("e3nn", "cuequivariance-naive")
    with Worker(IdleProcess(PROBLEM, "cpu")) as idle, Worker(IdleProcess(PROBLEM, "cpu", WORKLOAD, peers)) as ready:
        assert (idle.ask(LIMIT_S, products_built), ready.ask(LIMIT_S, products_built)) == (0, 1)
        ready.reopen(ComparisonSetting(WORKLOAD, "cpu", peers))
        assert all(not ready.ask(LIMIT_S, ComparisonSession.prepare_peer, name).error for name in peers)
        ready.reopen(IdleProcess(PROBLEM, "cpu"))
        # The comparison's reference is e3nn in float64.
        assert ready.ask(LIMIT_S, products_built) == 2 and ready.starts == 1


def test_peers_run_their_passes_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small graph: some compile a kernel when a pass first calls it."""
    ran = []
    for which in ("forward", "backward", "force_step"):
        monkeypatch.setattr(CheckedPasses, which, lambda passes, which=which: ran.append((passes.name, which)))
    assert build_peers(WORKLOAD, "cpu", ("e3nn", "cuequivariance-naive"), ("forward", "force_step")) == {}
    assert ran == [(name, which) for name in ("e3nn", "cuequivariance-naive") for which in ("forward", "force_step")]


def test_a_peer_that_cannot_be_built_gives_its_reason() -> None:
    reasons = build_peers(WORKLOAD, "cpu", ("openequivariance", "e3nn"))
    assert reasons == {}, "on a CPU OpenEquivariance is no peer"
    odd = dataclasses.replace(
        WORKLOAD,
        problem=TensorProductProblem.from_instructions(
            "2x0e", "2x0e", "2x0e", [(0, 0, 0, "uuu", True)], shared_weights=False
        ),
    )
    assert "only channelwise" in build_peers(odd, "cpu", ("cuequivariance-naive",))["cuequivariance-naive"]
