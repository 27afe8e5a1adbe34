"""The tuner as a whole on the CPU: killed again and again it repeats nothing; comparisons survive bad peers."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from tiny_config import CONFIG

from autotune.compare.comparison import LEFT_OUT, ComparisonSession, ComparisonSetting, run_comparison
from autotune.database import trials as trial_records
from autotune.database.store import Database
from autotune.errors import PeerError
from autotune.measure.space import search_space
from autotune.measure.trial import Outcome
from autotune.measure.worker import Worker
from autotune.search.starting_points import starting_points
from autotune.text import NOT_COMPARED
from autotune.tune.run import open_study, tune
from autotune.tune.settings import PATIENCE, resolve
from autotune.workload.config import load_config, load_graphs
from autotune.workload.workload import Workload
from kernelgen.device import device_facts
from kernelgen.kernels.product.schedule import HostSchedule, schedule_from_dict
from kernelgen.problem.product import TensorProductProblem

# More than any run here gets to.
TRIALS = 200
SCRIPT = """
import sys
from autotune.tune.run import tune

if __name__ == "__main__":
    tune(sys.argv[1], device="cpu", results_dir=sys.argv[2], with_peers=False)
"""
LONG_S = 280


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(trials=TRIALS))
    return path


class Runs:
    """Starts the tuner as its own process group and watches what it leaves on the disk."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.results, self.config, self.script = folder / "results", config, folder / "run.py"
        self.script.write_text(textwrap.dedent(SCRIPT))
        self.database = self.results / f"{device_facts('cpu').slug}.json"

    def start(self) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(self.script), str(self.config), str(self.results)]
        return subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)

    def records(self) -> list[dict[str, Any]]:
        return [line for path in self.results.glob("trials/*/*.jsonl") for line in trial_records.read(path)]

    def stop_when(self, ready: Callable[[], bool], number: signal.Signals) -> tuple[int, str]:
        """Send a signal once ``ready``; the exit code and what was printed."""
        process = self.start()
        give_up = time.monotonic() + LONG_S
        while not ready() and process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.02)
        assert process.poll() is None, f"ended before it could be stopped:\n{process.communicate()[1]}"
        if number == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, number)
        _, printed = process.communicate(timeout=LONG_S)
        return process.returncode, printed

    def check(self) -> list[dict[str, Any]]:
        """No finished trial is there twice; the database is absent or whole."""
        found = self.records()
        keys = [json.dumps(line["schedule"], sort_keys=True) for line in found]
        assert len(keys) == len(set(keys))
        assert [line["number"] for line in found] == list(range(len(found)))
        if self.database.exists():
            assert json.loads(self.database.read_text())["schema"] == 1
        return found


@pytest.mark.slow
@pytest.mark.timeout(5 * LONG_S)
def test_killed_tuner_repeats_nothing(tmp_path: Path, config: Path) -> None:
    runs = Runs(tmp_path, config)
    runs.stop_when(lambda: len(runs.records()) >= 2, signal.SIGKILL)
    finished = len(runs.check())
    assert finished >= 2, "what was finished is still there"
    code, printed = runs.stop_when(lambda: len(runs.records()) > finished, signal.SIGINT)
    assert code == 0 and "interrupted" in printed, printed
    count = len(runs.check())
    assert finished < count < TRIALS
    assert all(line["state"] == "ok" for line in runs.records())
    # A trial holds its samples' time at least, and not the compiler's.
    assert all(line["measure_s"] > sum(line["samples_us"]) * 1e-6 for line in runs.records())
    (entry,) = Database.load(runs.database).entries
    counts = {"count": count, "ok": count, "sampler": "random", "seed": 0}
    assert entry.trials == {**entry.trials, **counts}, "Ctrl-C publishes what there is"
    assert (runs.results / entry.trials["file"]).is_file()
    assert entry.time_us <= entry.default["time_us"], "the published one is the fastest of the comparison"
    assert entry.errors["g"] < entry.tolerance

    before = runs.database.read_bytes()
    again = tune(config, device="cpu", trials=count, results_dir=runs.results, with_peers=False)
    assert [known.identity for known in again] == [entry.identity]
    assert len(runs.check()) == count and runs.database.read_bytes() == before, "nothing to do, nothing done"


@dataclass(frozen=True)
class StrangePeers(ComparisonSetting):
    """A comparison whose peers misbehave in every way that real ones do."""

    def open(self) -> ComparisonSession:
        session = ComparisonSession(ComparisonSetting(self.workload, self.device, peers=()))
        session.peers = {
            name: StrangePeer(name) for name in ("sound", "absent", "raises late", "crashes late", "crashes")
        }
        return session


@dataclass(frozen=True)
class StrangePeer:
    name: str
    warm_up_calls: int = 2
    order: None = None

    @property
    def build_s(self) -> float:
        return 1e6 if self.name == "crashes" else 0.0

    @property
    def adapter(self) -> StrangePeer:
        return self

    def prepare(self) -> StrangePeer:
        if self.name == "absent":
            raise PeerError("not installed")
        if self.name == "crashes":
            ctypes.string_at(0)
        return self

    def release(self) -> None:
        pass

    def forward(self) -> object:
        return torch.ones(10).sum()

    def backward(self) -> object:
        if self.name == "raises late":
            raise RuntimeError("no double backward")
        if self.name == "crashes late":
            ctypes.string_at(0)
        return torch.ones(10).sum()


@pytest.mark.slow
@pytest.mark.timeout(2 * LONG_S)
def test_contest_survives_its_peers(config: Path) -> None:
    (workload,) = load_config(config, "cpu").workloads
    both = HostSchedule(path_groups=2, channel_block=4)
    ours = {"default": {"forward": both, "backward": both}, "other": {"forward": HostSchedule(path_groups=3)}}
    setting = StrangePeers(workload, "cpu")
    comparison = run_comparison(setting, ("forward", "backward"), ours, seconds_each=0.0, copies=True)
    assert set(comparison.results) == {"default", "other", "sound", "absent", "raises late", "crashes late", "crashes"}
    for name, samples in (("default", 10), ("sound", 6)):
        for which in ("forward", "backward"):
            timing = comparison.results[name][which].timing
            assert timing is not None and len(timing.samples_us) == samples
    assert set(comparison.results["other"]) == {"forward"}, "it names no backward schedule"
    assert "not installed" in comparison.results["absent"]["forward"].error
    assert "SIGSEGV" in comparison.results["crashes"]["backward"].error
    for name, error in (("raises late", "no double backward"), ("crashes late", "SIGSEGV")):
        assert comparison.results[name]["forward"].timing is not None, "its sound pass keeps its number"
        assert error in comparison.results[name]["backward"].error
    assert set(comparison.errors["default"]) == {"forward", "backward"}
    assert all(error < 1e-5 for slots in comparison.errors["default"].values() for error in slots.values())
    assert (
        comparison.copy_bandwidth > 0
        and set(comparison.copies) == {"forward", "backward"}
        and min(comparison.copies.values()) > 0
    )


@pytest.mark.slow
@pytest.mark.timeout(2 * LONG_S)
def test_contests_in_a_row_share_a_process_and_skip_what_is_known_to_fail(config: Path) -> None:
    (workload,) = load_config(config, "cpu").workloads
    setting = StrangePeers(workload, "cpu")
    ours = {"default": {"forward": HostSchedule(), "edge_backward": HostSchedule(), "joint_backward": HostSchedule()}}
    with Worker(setting) as worker:
        known = {"crashes": "known to crash", "raises late": "known", "crashes late": "known"}
        for which in ("forward", "force_step"):
            comparison = run_comparison(setting, (which,), ours, seconds_each=0.0, worker=worker, known_failures=known)
            assert comparison.results["crashes"][which].error == "known to crash"
            assert comparison.results["default"][which].timing is not None, comparison.results["default"][which].error
        late = run_comparison(setting, ("forward",), ours, seconds_each=0.0, worker=worker, deadline=time.monotonic())
        assert late.results["default"]["forward"].timing is not None
        reasons = {name: row["forward"].error for name, row in late.results.items() if name not in ours}
        assert reasons.pop("crashes") == LEFT_OUT.format("it takes up to 1000000 s to compile")
        assert set(reasons.values()) == {LEFT_OUT.format("the time for comparisons was over")}
        late = run_comparison(
            setting, ("forward",), ours, seconds_each=0.0, worker=worker, deadline=time.monotonic() + LONG_S
        )
        left_out = {name for name, row in late.results.items() if row["forward"].error.startswith(NOT_COMPARED)}
        assert left_out == {"crashes"}, "it would compile beyond the end"
        assert worker.starts == 1
    assert "has no attribute 'force_step'" in comparison.results["sound"]["force_step"].error
    assert set(comparison.errors["default"]["joint_backward"]) == {"x", "y", "w"}


def test_neighbours_come_nearest_first(config: Path) -> None:
    workload = Workload(
        "w", TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o", "0e+1o"), "conv", load_graphs()["carbon-small"]
    )
    space = search_space(workload.problem, "conv", "forward", "float32", device_facts("cpu"))
    other = TensorProductProblem.channelwise("8x0e+8x1o", "0e+1o", "0e+1o")

    @dataclass(frozen=True)
    class Known:
        problem: str
        graph_class: str
        chunk: int
        direction: str = "forward"
        operation: str = "conv"
        dtype: str = "float32"
        layout: str = "mul_ir"
        label: str = "w"
        deterministic: bool = False

        @property
        def tuned_schedule(self) -> HostSchedule:
            return HostSchedule(path_groups=2, channel_block=4, edges_per_chunk=self.chunk)

        @property
        def parsed_graph_class(self) -> Any:
            return type(workload.graph_class()).parse(self.graph_class)

    known = [
        Known(other.key, "conv-e11-d5", 8),
        Known(workload.problem.key, "conv-e17-d7", 32),
        Known(workload.problem.key, "conv-e11-d5", 128),
        Known(workload.problem.key, "conv-e11-d5", 8, direction="backward"),
    ]
    found = starting_points(space, workload.graph_class(), known)  # type: ignore[arg-type]
    assert [schedule.edges_per_chunk for schedule in found] == [128, 8, 32], "same problem and same graph by turns"
    kin = search_space(workload.problem, "conv", "edge_backward", "float32", device_facts("cpu"))
    found = starting_points(kin, workload.graph_class(), known)  # type: ignore[arg-type]
    assert [schedule.edges_per_chunk for schedule in found] == [8], "edge_backward begins where backward ended"
    own = Known(other.key, "conv-e11-d5", 32, direction="edge_backward")
    found = starting_points(kin, workload.graph_class(), [own, *known])  # type: ignore[arg-type]
    assert [schedule.edges_per_chunk for schedule in found] == [8, 32], "the same problem goes before the direction"
    none = search_space(workload.problem, "conv", "double_backward", "float32", device_facts("cpu"))
    assert starting_points(none, workload.graph_class(), known) == []  # type: ignore[arg-type]


def test_kindred_direction_of_the_same_run_gives_starts(config: Path, tmp_path: Path) -> None:
    """The first trials of edge_backward are the default and the best of this run's backward."""
    workload = dataclasses.replace(load_config(config).workloads[0], directions=("backward", "edge_backward"))
    settings, _ = resolve(config, "cpu", None, 4, "random", None, 0, tmp_path, False)
    with open_study(workload, "backward", settings, None) as backward:
        while (proposal := backward.propose()) and len(backward.finished) < 8:
            time_us = 1.0 if proposal.schedule.edges_per_chunk == 128 else 5.0
            backward.finish(proposal, Outcome("ok", time_us=time_us + len(backward.finished) / 10))
        assert backward.best is not None and backward.best_us is not None and backward.best_us < 5.0
        with open_study(workload, "edge_backward", settings, None, {"backward": backward}) as study:
            first = [study.propose() for _ in range(2)]
    assert [p.schedule for p in first if p] == [
        study.space.default,
        study.space.nearest(schedule_from_dict(backward.best["schedule"])),
    ]


def test_patience_depends_on_the_backend(config: Path, tmp_path: Path) -> None:
    given = (config, "cpu", None, None, None, None, 0, tmp_path, False)
    assert resolve(*given)[0].patience is None, "on a CPU the budget is the limit"
    assert resolve(*given, 7)[0].patience == 7
    assert PATIENCE["cuda"] == 120
