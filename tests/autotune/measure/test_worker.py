"""Workers: whatever a job does to its process becomes data, and the next job finds a fresh one."""

from __future__ import annotations

import ctypes
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
from places import ROOT, SUPPORT

from autotune.compare.peers import e3nn as e3nn_peer
from autotune.database.entry import what_is_wrong
from autotune.errors import PeerError, WorkerError
from autotune.measure import trial
from autotune.measure.trial import Outcome, TrialJob, TrialSession, TrialSetting, run_trial
from autotune.measure.worker import Worker, WorkerLost
from autotune.workload.config import load_graphs
from autotune.workload.workload import Workload
from kernelgen.errors import LaunchError, ToolMissingError
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.ops.product import Operator
from kernelgen.problem.product import TensorProductProblem

PATIENCE_S = 300.0


@dataclass(frozen=True)
class Misbehaving:
    """Its process counts jobs, and does to itself what a job asks for."""

    broken: bool = False

    def open(self) -> Session:
        if self.broken:
            raise FileNotFoundError("no such device")
        TrialSession.measure = Session.do  # type: ignore[assignment, method-assign]
        return Session()


class Session:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def do(self, job: Any) -> Any:
        self.seen.append(job)
        if job == "segfault":
            ctypes.string_at(0)
        if job == "hang":
            time.sleep(3600)
        if isinstance(job, Path):
            started = subprocess.Popen(["sh", "-c", "sleep 3600 & echo $! > started; wait"], cwd=job)
            started.wait()
        if job == "exit":
            os._exit(7)
        if job == "raise":
            raise ValueError("a job must not raise")
        return Outcome("launch", "sticky", device_lost=True) if job == "lose device" else (os.getpid(), len(self.seen))


@pytest.fixture(scope="module")
def worker() -> Any:
    with Worker(Misbehaving()) as made:
        yield made


def test_keeps_its_process_between_jobs(worker: Worker) -> None:
    first, second = worker.ask(PATIENCE_S, Session.do, "a"), worker.ask(PATIENCE_S, Session.do, "b")
    assert first[0] == second[0] != os.getpid()
    assert second[1] == first[1] + 1
    assert not worker.fresh


def test_a_process_that_nobody_wants_any_more_leaves_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    """It was launched ahead and has said that it is ready, which nobody has read."""
    worker = Worker(Misbehaving())
    assert worker.launch().poll(PATIENCE_S)
    worker.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("job", "limit_s", "state", "reason"),
    [
        ("segfault", PATIENCE_S, "crashed", "SIGSEGV"),
        ("exit", PATIENCE_S, "crashed", "exit code 7"),
        ("hang", 0.5, "timeout", "no answer"),
    ],
)
def test_lost_process_is_an_outcome_and_replaced(
    worker: Worker, job: str, limit_s: float, state: str, reason: str
) -> None:
    before = worker.ask(PATIENCE_S, Session.do, "a")
    outcome = run_trial(worker, job, limit_s)  # type: ignore[arg-type]
    assert (outcome.state, outcome.ok) == (state, False)
    assert reason in outcome.reason
    assert worker.fresh
    after = worker.ask(PATIENCE_S, Session.do, "a")
    assert after[0] != before[0] and after[1] == 1


def test_a_process_that_lost_its_device_is_replaced(worker: Worker) -> None:
    worker.ask(PATIENCE_S, Session.do, "a")
    starts = worker.starts
    assert run_trial(worker, "lose device", PATIENCE_S).state == "launch"  # type: ignore[arg-type]
    assert worker.fresh, "a process whose device is lost is not used again"
    worker.ask(PATIENCE_S, Session.do, "a")
    assert worker.starts == starts + 1


def test_what_raises_is_one_error(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="ValueError: a job must not raise"):
        worker.ask(PATIENCE_S, Session.do, "raise")
    assert worker.ask(PATIENCE_S, Session.do, "a")[1] == 1
    with Worker(Misbehaving(broken=True)) as broken, pytest.raises(WorkerError, match="no such device"):
        broken.ask(PATIENCE_S, Session.do, "a")


def test_an_answer_that_was_not_awaited_is_not_the_next_jobs(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    for reopens in (False, True):
        before = worker.ask(PATIENCE_S, Session.do, "a")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(worker, "_receive", interrupt)
            worker.ask(PATIENCE_S, Session.do, "b")
        if reopens:
            worker.reopen(Misbehaving())
        after = worker.ask(PATIENCE_S, Session.do, "c")
        assert after[0] != before[0] and after[1] == 1


@dataclass(frozen=True)
class Stillborn:
    def open(self) -> None:
        ctypes.string_at(0)
        raise AssertionError


def test_crash_before_any_job_is_no_outcome() -> None:
    with Worker(Stillborn()) as stillborn, pytest.raises(WorkerError, match="could not be set up.*SIGSEGV") as caught:
        run_trial(stillborn, "a", PATIENCE_S)  # type: ignore[arg-type]
    assert not isinstance(caught.value, WorkerLost)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_worker_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            from autotune.measure.worker import Worker
            from test_worker import Misbehaving, Session

            if __name__ == "__main__":
                worker = Worker(Misbehaving())
                print(worker.ask(300, Session.do, "a")[0], flush=True)
                worker.ask(3600, Session.do, "hang")
            """
        )
    )
    folders = [str(Path(__file__).parent), str(SUPPORT), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    give_up = time.monotonic() + 60
    while is_running(child) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not is_running(child)


@pytest.fixture(scope="module")
def session() -> TrialSession:
    problem = TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o", "0e+1o")
    workload = Workload("tiny", problem, "conv", load_graphs()["carbon-small"])
    return TrialSession(TrialSetting(workload, "cpu"))


def job(direction: str = "forward", **knobs: Any) -> TrialJob:
    return TrialJob(direction, HostSchedule(**{"path_groups": 2, "channel_block": 4, **knobs}), max_seconds=0.0)


@pytest.mark.parametrize("direction", ["forward", "backward", "double_backward"])
def test_session_measures_a_right_kernel(session: TrialSession, direction: str) -> None:
    outcome = session.measure(job(direction))
    assert (outcome.state, outcome.reason) == ("ok", "")
    slots = {"forward": "g", "backward": "xyw", "double_backward": "xywg"}[direction]
    assert set(outcome.errors) == set(slots)
    assert all(error < 1e-5 for error in outcome.errors.values())
    assert len(outcome.samples_us) >= 10 and outcome.time_us is not None and outcome.time_us > 0
    assert outcome.resources


def test_session_cuts_a_hopeless_kernel(session: TrialSession) -> None:
    outcome = session.measure(TrialJob("forward", HostSchedule(path_groups=2, channel_block=4), best_us=1e-6))
    assert outcome.ok and outcome.cut and len(outcome.samples_us) < 10


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    right = Operator.run

    def run(self: Operator, direction: Any, *rest: Any, **options: Any) -> dict[str, torch.Tensor]:
        found = right(self, direction, *rest, **options)
        return {"g": change(found["g"])} if direction.name == "forward" else found

    monkeypatch.setattr(Operator, "run", run)


def overwrite_last(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(out: torch.Tensor) -> torch.Tensor:
        out[-1, -1] = value
        return out

    return change


@pytest.mark.parametrize("value", [1e3, float("nan")])
def test_session_refuses_a_wrong_kernel(session: TrialSession, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """One element is enough, and it is never timed."""
    spoil(monkeypatch, overwrite_last(value))
    outcome = session.measure(job())
    assert outcome.state == "wrong"
    assert "relative error" in outcome.reason
    assert outcome.errors["g"] > 1e-5 and outcome.errors["g"] <= 1e308
    assert outcome.time_us is None and not outcome.samples_us


def test_session_reports_a_failed_launch(session: TrialSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(out: torch.Tensor) -> torch.Tensor:
        raise LaunchError("too many resources requested for launch")

    spoil(monkeypatch, fail)
    outcome = session.measure(job())
    assert (outcome.state, outcome.device_lost) == ("launch", False)
    assert "too many resources" in outcome.reason


def test_session_reports_an_illegal_schedule(session: TrialSession) -> None:
    outcome = session.measure(job(path_groups=100))
    assert outcome.state == "illegal"
    assert "path_groups=100" in outcome.reason


def test_session_reports_a_failed_compilation(
    session: TrialSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) echo "broken 1.0";; *) echo "it breaks" >&2; exit 1;; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    outcome = session.measure(job(edges_per_chunk=16))
    assert outcome.state == "compile"
    assert "it breaks" in outcome.reason


def test_a_machine_at_fault_is_no_outcome_of_a_schedule(session: TrialSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolMissingError, match="no-such-compiler"):
        session.measure(job(edges_per_chunk=16))


def test_errors_in_json_form() -> None:
    assert trial.finite({"x": float("inf"), "y": 1e-7}) == {"x": 1e308, "y": 1e-7}
    assert what_is_wrong({"x": 1e-7}, 1e-5) is None
    assert "w" in (what_is_wrong({"x": 1e-7, "w": float("nan")}, 1e-5) or "")


def test_reopened_in_the_same_process(worker: Worker) -> None:
    before = worker.ask(PATIENCE_S, Session.do, "a")
    worker.reopen(Misbehaving())
    after = worker.ask(PATIENCE_S, Session.do, "b")
    assert after == (before[0], 1), "the same process, another session"
    worker.reopen(Misbehaving(broken=True))
    with pytest.raises(WorkerError, match="no such device"):
        worker.ask(PATIENCE_S, Session.do, "a")
    worker.reopen(Misbehaving())
    again = worker.ask(PATIENCE_S, Session.do, "a")
    assert again[1] == 1 and again[0] != before[0], "a set-up that failed ends the process"


def is_alive(pid: int) -> bool:
    """A zombie, which only waits for its parent to look, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_a_lost_process_started_ends_with_it(tmp_path: Path) -> None:
    """As a compiler would that a job waits for: here the child of a child."""
    with Worker(Misbehaving()) as worker:
        worker.ask(PATIENCE_S, Session.do, "start")
        with pytest.raises(WorkerLost, match="no answer"):
            worker.ask(3.0, Session.do, tmp_path)
        assert_ends(int((tmp_path / "started").read_text()))
        assert worker.ask(PATIENCE_S, Session.do, "go on")[1] == 1


def test_a_compilation_that_is_given_up_leaves_no_compiler_running() -> None:
    before = subprocess.Popen(["sleep", "3600"])
    try:
        with pytest.raises(PeerError, match="given up"), e3nn_peer.time_limit(1, "given up"):
            compiler = subprocess.Popen(["sh", "-c", "sleep 3600; true"])
            compiler.wait()
        assert_ends(compiler.pid)
        assert is_alive(before.pid), "it was there before"
    finally:
        before.kill()
        before.wait()
        compiler.wait()
