"""What is compiled beside the comparisons: who is ready, what stays known, and that nothing outlives its run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT

from autotune.bench.kernels import in_turn, ready_first, with_processes
from autotune.compare import precompile
from autotune.compare.peers import e3nn as e3nn_peer
from autotune.compare.peers.e3nn import OUT_OF_TIME, no_compiler
from autotune.compare.precompile import CompileAhead, Kind, Product, kind_of, name_of
from autotune.measure import worker as processes
from autotune.workload.config import find_problem
from autotune.workload.graphs import GraphSpec, Points
from autotune.workload.workload import Workload

SMALL = GraphSpec("small", Points(30, 0.1), 4.0)
WORKLOADS = {
    dtype: Workload("tiny", find_problem("tiny"), "conv", SMALL, dtype=dtype) for dtype in ("float32", "float64")
}
KINDS: dict[str, Kind] = {name: kind_of(workload) for name, workload in WORKLOADS.items()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("EQUITUNE_CACHE", str(tmp_path))
    monkeypatch.delenv(e3nn_peer.FOLDER, raising=False)
    yield tmp_path
    os.environ.pop(e3nn_peer.FOLDER, None)


class Jobs(CompileAhead):
    """Jobs that a test ends itself."""

    def __init__(self, failures: dict[Kind, str] | None = None) -> None:
        super().__init__("cpu", 1, failures)
        self.asked: list[Any] = []
        self.made: list[Future[str]] = []

    def _submit(self, work: Any, *arguments: Any) -> Future[str]:
        self.asked.append(arguments[0])
        self.made.append(Future())
        return self.made[-1]


def test_torchs_code_lies_beside_our_kernels_unless_the_user_says_where(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert e3nn_peer.keep_compiled() == cache / "torch" and os.environ[e3nn_peer.FOLDER] == str(cache / "torch")
    assert (cache / "torch").stat().st_mode & 0o077 == 0
    monkeypatch.setenv(e3nn_peer.FOLDER, e3nn_peer._torchs_own())
    assert e3nn_peer.keep_compiled() == cache / "torch", "torch itself says so on the import of its compiler"
    monkeypatch.setenv(e3nn_peer.FOLDER, str(cache / "elsewhere"))
    assert e3nn_peer.keep_compiled() == cache / "elsewhere"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_product_is_found_by_another_process(cache: Path) -> None:
    """What a peer compiles lies in the cache's folder, so that whoever compiles it again only traces."""
    if no_compiler(torch.device("cpu")):
        pytest.skip("torch.compile needs a C++ compiler")
    program = (
        "import sys, torch._dynamo\nfrom autotune.compare import precompile\nfrom test_ahead import WORKLOADS\n"
        "reason = precompile.compile_peers(precompile.Product(WORKLOADS['float32']), 'cpu')\n"
        "found = torch._dynamo.utils.counters['aot_autograd']\n"
        "print(repr(reason), found['autograd_cache_hit'], found['autograd_cache_miss'])"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}:{ROOT / 'tests' / 'support'}"}
    told = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    first, second = (run.stdout.split()[-3:] for run in told)
    assert first[:2] == ["''", "0"] and second == ["''", first[2], "0"] and int(first[2]) > 0
    assert e3nn_peer.noted(name_of(KINDS["float32"], ("e3nn-compiled",)), "cpu") == ""


def test_a_note_lasts_as_long_as_the_versions_that_it_is_of(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = name_of(KINDS["float32"], ("e3nn-compiled",))
    assert e3nn_peer.noted(name, "cpu") is None
    e3nn_peer.take_note(name, "cpu", "too long")
    assert e3nn_peer.noted(name, "cpu") == "too long"
    assert e3nn_peer.noted(name_of(KINDS["float64"], ("e3nn-compiled",)), "cpu") is None
    monkeypatch.setattr(e3nn_peer, "installed_version", lambda name: "another")
    assert e3nn_peer.noted(name, "cpu") is None
    e3nn_peer.take_note(name, "cpu", "")
    assert e3nn_peer.noted(name, "cpu") == ""
    for path in cache.glob("torch/equitune-notes/*.json"):
        path.write_text("{")
    assert e3nn_peer.noted(name, "cpu") is None


def test_what_an_earlier_run_compiled_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A success is noted, and a product that takes too long; any other reason may be of the moment."""
    reasons = {"float32": {}, "float64": {"e3nn-compiled": f"PeerError: {OUT_OF_TIME}"}}
    monkeypatch.setattr(precompile, "build_peers", lambda workload, *_: reasons[workload.dtype])
    products = {name: Product(workload) for name, workload in WORKLOADS.items()}
    for product in products.values():
        precompile.compile_peers(product, "cpu")
    second = Jobs()
    for name, kind in KINDS.items():
        second.add(kind, (), products[name])
    assert second.asked == [] and second.failures == {KINDS["float64"]: f"PeerError: {OUT_OF_TIME}"}
    assert all(second.is_ready(kind) for kind in KINDS.values())
    other = Jobs()
    other.add(KINDS["float32"], (), Product(WORKLOADS["float32"], ("cuequivariance",), ("forward",)))
    assert len(other.asked) == 1, "a note is of certain peers"


def test_a_kind_is_ready_when_its_kernels_and_its_product_are() -> None:
    ahead = Jobs()
    ahead.add(KINDS["float32"], ["a", "b"], Product(WORKLOADS["float32"]))
    ahead.add(KINDS["float64"], ["b"])
    assert ahead.asked == [Product(WORKLOADS["float32"]), "a", "b"] and ahead.counts == (2, 1)
    product, first, second = ahead.made
    second.set_result("")
    assert ahead.is_ready(KINDS["float64"]) and not ahead.is_ready(KINDS["float32"])
    first.set_result("")
    assert not ahead.is_ready(KINDS["float32"]) and ahead.failures == {}
    product.set_result("no such thing")
    assert ahead.is_ready(KINDS["float32"]) and ahead.failures == {KINDS["float32"]: "no such thing"}


def test_a_job_that_never_ended_is_no_failure_of_its_product() -> None:
    ahead, said = Jobs(), []
    ahead.add(KINDS["float32"], [], Product(WORKLOADS["float32"]))
    ahead.made[0].set_exception(BrokenProcessPool("killed"))
    ahead.wait(said.append)
    assert ahead.is_ready(KINDS["float32"]) and ahead.failures == {}
    assert len(said) == 1 and said[0].startswith("precompilation ended early (killed)")


def group(name: str) -> list[Any]:
    class Plan:
        workload = WORKLOADS[name]

    return [Plan()]


def test_groups_that_wait_for_no_compilation_come_first() -> None:
    ahead, groups = Jobs(), [group("float32"), group("float64")]
    ahead.add(KINDS["float32"], ["a"])
    ahead.add(KINDS["float64"], ["b"])
    take = ready_first(groups, ahead)
    assert take(False) is None, "something is measured meanwhile"
    ahead.made[1].set_result("")
    assert take(True) is groups[1] and take(False) is None
    ahead.made[0].set_result("")
    assert take(True) is groups[0] and take(True) is None


class Turns:
    value = 0

    def get_lock(self) -> Any:
        return contextlib.nullcontext()


def test_groups_are_shared_in_turn() -> None:
    turns: Any = Turns()
    first, second = in_turn(["a", "b", "c"], turns), in_turn(["a", "b", "c"], turns)  # type: ignore[list-item]
    assert [first(True), second(False), first(True), second(True), first(True)] == ["a", "b", "c", None, None]


class Process:
    """A worker whose pipe a test writes to."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, (self.ours, self.theirs) = name, log, Pipe()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def launch(self) -> Any:
        return self.ours

    def close(self) -> None:
        if f"closed {self.name}" not in self.log:
            self.log.append(f"closed {self.name}")


def test_the_process_that_is_set_up_first_measures_first() -> None:
    log: list[str] = []
    made = {name: Process(name, log) for name in "abc"}
    made["b"].theirs.send("ready")
    left = list("abc")
    pairs = with_processes(lambda must: left.pop(0) if left else None, made.__getitem__, 2)  # type: ignore[arg-type]
    assert next(pairs) == (made["b"], "b") and left == ["c"] and log == []
    made["c"].theirs.send("ready")
    assert next(pairs) == (made["c"], "c") and log == ["closed b"]
    assert next(pairs) == (made["a"], "a"), "the last is waited for by its first job"
    assert list(pairs) == [] and log == ["closed b", "closed c", "closed a"]


def test_processes_end_when_nobody_reads_from_them() -> None:
    log: list[str] = []
    made = {name: Process(name, log) for name in "ab"}
    made["a"].theirs.send("ready")
    left = list("ab")
    pairs = with_processes(lambda must: left.pop(0) if left else None, made.__getitem__, 2)  # type: ignore[arg-type]
    next(pairs)
    pairs.close()
    assert log[0] == "closed b"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_that_is_stopped_leaves_no_process_that_compiles() -> None:
    with pytest.raises(KeyboardInterrupt), CompileAhead("cpu", 2) as ahead:
        jobs = ahead.jobs[None] = [ahead._submit(time.sleep, 600.0) for _ in range(5)]
        pool = ahead._pool
        while not jobs[1].running():
            time.sleep(0.05)
        assert pool is not None
        started = list(pool._processes)
        raise KeyboardInterrupt
    while set(started) & set(processes.descendants(os.getpid())):
        time.sleep(0.05)
    while not all(job.done() for job in jobs):
        time.sleep(0.05)
    assert started and ahead.is_ready(None) and jobs[4].cancelled()


@pytest.mark.timeout(120)
def test_processes_that_have_nothing_left_to_compile_end_during_the_run() -> None:
    with CompileAhead("cpu", 1) as ahead:
        ahead.jobs[None] = [ahead._submit(time.sleep, 0.0)]
        pool = ahead._pool
        assert pool is not None
        started = list(pool._processes)
        ahead.wait_for_one([None])
        while set(started) & set(processes.descendants(os.getpid())):
            time.sleep(0.05)
    assert started and ahead._pool is None
