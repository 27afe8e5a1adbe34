"""Misses: what is kept of a running model's lookups, and that keeping it never disturbs the model."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest
import torch
from database_samples import entry, store
from places import ROOT
from small_net import EDGES, NODES, SmallNet, batch
from typer.testing import CliRunner

from autotune.cli.commands import app
from autotune.database import misses
from autotune.database.misses import MOST_KEPT, Request, keep_misses, misses_path, read_misses
from autotune.modules.rows import SymmetricContraction
from autotune.tune import model as run
from autotune.workload.config import TuneConfig
from autotune.workload.graphs import build_graph
from kernelgen.device import device_facts
from kernelgen.errors import EquituneError
from kernelgen.ops.base import OPERATORS
from kernelgen.runtime.call import WATCHERS

FACTS = device_facts("cpu")
SUPPORT = ROOT / "tests" / "support"


@pytest.fixture
def notes(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[misses._Notes]:
    """Misses are kept, in an empty folder, and written when a test says so; no earlier test has prepared a kernel."""
    monkeypatch.setenv("EQUITUNE_MISSES", "1")
    monkeypatch.setattr(misses, "WATCHED_S", 1e6)
    known = dict(OPERATORS)
    OPERATORS.clear()
    found = misses._notes
    found.forget()
    yield found
    found.write()
    found.forget()
    OPERATORS.update(known)


def step(model: SmallNet) -> None:
    model(*batch()).backward()


def request(**changes: object) -> Request:
    sample = entry()
    kernel = (sample.problem, sample.operation, sample.direction, sample.dtype, sample.layout, False)
    return dataclasses.replace(Request(*kernel, 11872, 424), **changes)  # type: ignore[arg-type]


def test_directions_that_a_model_calls_are_kept_once(notes: misses._Notes) -> None:
    model = SmallNet()
    for _ in range(3):
        step(model)
    assert not misses_path(FACTS.slug).exists(), "nothing is written while the model works"
    notes.write()
    found = read_misses(FACTS)
    assert sorted(miss.direction for miss in found) == ["backward", "forward"]
    assert {(miss.num_edges, miss.num_nodes) for miss in found} == {(EDGES, NODES)}
    assert not WATCHERS, "later runs are not noted"
    step(model)
    notes.write()
    assert read_misses(FACTS) == found


def test_torchs_default_dtype_stays_as_it_is(notes: misses._Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the whole process's, and this is another thread: a model would get tensors of another dtype meanwhile."""
    step(SmallNet())
    set_to: list[torch.dtype] = []
    monkeypatch.setattr(torch, "set_default_dtype", set_to.append)
    notes.write()
    assert read_misses(FACTS) and set_to == []


def test_a_new_direction_is_noted_later(notes: misses._Notes) -> None:
    model, given = SmallNet(), batch()
    positions = given[0].detach().double()
    with torch.no_grad():
        model.double()(positions, *given[1:])
    notes.write()
    assert [miss.direction for miss in read_misses(FACTS)] == ["forward"]
    model(positions.requires_grad_(), *given[1:]).backward()
    notes.write()
    assert sorted(miss.direction for miss in read_misses(FACTS)) == ["backward", "forward"]


def test_what_has_been_tuned_is_no_miss_and_is_removed(notes: misses._Notes, shipped: Path) -> None:
    keep_misses(FACTS, [request(), request(direction="backward")])
    store(shipped, FACTS, entry())
    assert read_misses(FACTS) == [request(direction="backward")]
    assert keep_misses(FACTS)
    assert [row["direction"] for row in json.loads(misses_path(FACTS.slug).read_text())["misses"]] == ["backward"]
    step(SmallNet())
    store(
        shipped,
        FACTS,
        *(
            entry(problem=SmallNet().conv.problem.key, direction=name, graph_class="conv-e9-d4")
            for name in ("forward", "backward")
        ),
    )
    notes.write()
    assert read_misses(FACTS) == [request(direction="backward")], "exact entries answered the model"


@pytest.mark.slow
def test_the_file_is_bounded_and_keeps_the_newest(notes: misses._Notes) -> None:
    classes = [request(num_edges=2**e, num_nodes=2**n) for e in range(40) for n in range(0, e, 3)]
    assert len({one.identity for one in classes}) > 200
    keep_misses(FACTS, classes)
    assert len(read_misses(FACTS)) == len({one.identity for one in classes})
    many = [
        request(num_edges=2**e, num_nodes=2**n, dtype=d, layout=layout)
        for e in range(40)
        for n in range(0, e, 3)
        for d in ("float64", "float32")
        for layout in ("ir_mul",)
    ]
    keep_misses(FACTS, many)
    found = read_misses(FACTS)
    assert len(found) == MOST_KEPT and found[-1] == many[-1]


def test_tiny_graphs_are_not_kept(notes: misses._Notes) -> None:
    positions, sender, receiver = batch()
    SmallNet()(positions, sender[:20], receiver[:20])
    notes.write()
    assert read_misses(FACTS) == []


@pytest.mark.parametrize("value", ["0", "false", "off"])
def test_the_environment_turns_it_off(notes: misses._Notes, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("EQUITUNE_MISSES", value)
    step(SmallNet())
    assert not WATCHERS and notes.timer is None
    notes.write()
    assert not misses_path(FACTS.slug).exists()


def test_a_folder_that_cannot_be_written_does_not_disturb(notes: misses._Notes) -> None:
    folder = misses_path(FACTS.slug).parent
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in the place of the folder")
    step(SmallNet())
    notes.write()
    assert keep_misses(FACTS, [request()]) is False
    assert read_misses(FACTS) == []


def test_a_full_disk_does_not_disturb(notes: misses._Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(misses, "replace_file", full)
    step(SmallNet())
    notes.write()
    assert keep_misses(FACTS, [request()]) is False


def test_a_rank_does_not_wait_for_another(notes: misses._Notes) -> None:
    path = misses_path(FACTS.slug)
    path.parent.mkdir(parents=True)
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        assert keep_misses(FACTS, [request()]) is False
    assert keep_misses(FACTS, [request()]) is True


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"format": 2, "misses": [{}]}', '{"format": 1, "misses": [{"problem": "x"}, 3]}',
        json.dumps({"format": 1, "misses": [dataclasses.asdict(request(problem="uvu|nonsense")) | {"num_edges": "9"}]}),
        json.dumps({"format": 1, "misses": [dataclasses.asdict(request(problem="uvu|nonsense"))]}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_no_miss_and_is_replaced(notes: misses._Notes, text: str) -> None:
    path = misses_path(FACTS.slug)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert read_misses(FACTS) == []
    assert keep_misses(FACTS, [request()])
    assert read_misses(FACTS) == [request()]


def test_a_short_process_leaves_its_misses_at_its_end(tmp_path: Path) -> None:
    code = "from small_net import SmallNet, batch\nSmallNet()(*batch()).backward()"
    own = {"EQUITUNE_DATABASE": str(tmp_path), "EQUITUNE_MISSES": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"}
    subprocess.run([sys.executable, "-c", code], env=os.environ | own, check=True)
    (path,) = (tmp_path / "misses").glob("*.json")
    assert len(json.loads(path.read_text())["misses"]) == 2


# Two threads are inside of torch's C++ when the process ends: lookups are a backward pass whose hook, which is
# Python again, takes a second.
INSIDE = """
import threading, time, torch
from autotune.database import misses
from autotune.database.misses import Request
from small_net import SmallNet, batch
began = threading.Semaphore(0)
def look_up(request, facts):
    began.release()
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: time.sleep(1.0))
    x.sum().backward()
    raise RuntimeError
net = SmallNet()
net(*batch())
misses._notes.write()
Request.look_up = look_up
misses._LONGEST_S = misses.LONGEST_S = misses.WATCHED_S = 0.1
inside = 0
while inside < 2:
    misses._notes.watch()
    net(*batch())
    inside += began.acquire(timeout=0.05)
"""


@pytest.mark.slow
def test_a_process_ends_well_while_threads_are_inside_of_torch(tmp_path: Path) -> None:
    """Python ends a thread that goes on after the interpreter's end in a way that aborts the process in C++."""
    own = {"EQUITUNE_DATABASE": str(tmp_path), "EQUITUNE_MISSES": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"}
    done = subprocess.run([sys.executable, "-c", INSIDE], env=os.environ | own, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_at_its_end_a_process_begins_no_lookup_after_a_while_and_leaves_no_thread(
    notes: misses._Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    monkeypatch.setattr(Request, "look_up", lambda request, facts: looked.append(request))
    monkeypatch.setattr(misses, "LONGEST_S", -1.0)
    step(SmallNet())
    (waiting,) = notes.threads
    notes.finish()
    assert not looked and not waiting.is_alive()
    notes.operators[0] = None
    notes.watch()
    assert notes.timer is None, "a thread would outlive the process"


def test_the_end_of_a_process_waits_for_the_thread(notes: misses._Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = threading.Event(), []

    def look_up(request: Request, facts: object) -> None:
        began.set()
        time.sleep(0.3)
        ended.append(request)
        raise EquituneError

    monkeypatch.setattr(Request, "look_up", look_up)
    net = SmallNet()
    monkeypatch.setattr(misses, "WATCHED_S", 0.1)
    for _ in range(100):
        notes.watch()
        step(net)
        if began.wait(0.2):
            break
    thread = notes.threads[0]
    notes.finish()
    assert len(ended) == 1 and not thread.is_alive(), "it ended after the lookup that it was at"


def test_a_forked_process_starts_afresh(notes: misses._Notes) -> None:
    step(SmallNet())
    assert notes.runs
    child = os.fork()
    if child == 0:
        os._exit(0 if not notes.runs and notes.timer is None and notes.lock.acquire(timeout=1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_they_are_listed_and_worked_off(notes: misses._Notes, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed() -> str:
        done = CliRunner().invoke(app, ["show", "--misses", "--device", "cpu"])
        assert done.exit_code == 0
        return done.output

    assert listed().startswith("no model missed a tuned kernel on ")
    keep_misses(FACTS, [request(), request(direction="backward")])
    text = listed()
    assert "2 kernels: 0 tuned before, 0 tuned now, 2 not tuned" in text and "conv-e14-d5" in text
    assert text.endswith("next: equitune tune misses\n")

    def publish(config: TuneConfig, device: str, *_: object, **__: object) -> None:
        (workload,) = config.workloads
        graph = build_graph(workload.graph)
        assert (graph.num_edges, graph.num_nodes, device) == (11872, 424, "cpu")
        assert workload.directions == ("forward", "backward")
        store(shipped, FACTS, *(entry(direction=name) for name in workload.directions))

    monkeypatch.setattr(run, "tune", publish)
    found = run.tune_misses("cpu", 60.0, {})
    assert found.left == 0 and "2 kernels: 0 tuned before, 2 tuned now, 0 not tuned" in str(found)
    assert json.loads(misses_path(FACTS.slug).read_text())["misses"] == []
    assert listed().startswith("no model missed")


@pytest.mark.parametrize(("nodes", "noted"), [(17, ["backward", "forward"]), (16, [])])
def test_contractions_of_small_structures_are_kept_too(notes: misses._Notes, nodes: int, noted: list[str]) -> None:
    """A node is much more work than an edge. 16 are the rows on which accelerate compares a contraction."""
    contraction = SymmetricContraction("8x0e+8x1o", "8x0e", 2, num_elements=3)
    x = torch.randn(nodes, 8, 4, requires_grad=True)
    contraction(x, torch.zeros(nodes, dtype=torch.long)).sum().backward()
    notes.write()
    assert sorted(miss.direction for miss in read_misses(FACTS)) == noted
