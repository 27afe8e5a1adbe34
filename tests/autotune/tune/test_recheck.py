"""Entries checked again: what holds, drifted or broke, what a lookup does then, and what is tuned again."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from database_samples import PROBLEM, entry, store
from typer.testing import CliRunner

from autotune.cli.commands import app
from autotune.database import store as database
from autotune.database.entry import Entry
from autotune.database.lookup import find_schedule
from autotune.database.maintenance import environment_hash
from autotune.database.store import read_table
from autotune.errors import ConfigError, DatabaseError
from autotune.measure.trial import Outcome, TrialJob, TrialSession, TrialSetting
from autotune.tune import publish as recheck
from autotune.tune.publish import DRIFT, Verdict
from autotune.workload.config import load_graphs
from autotune.workload.graphs import build_graph
from autotune.workload.workload import Workload
from kernelgen.device import device_facts
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.version import GENERATOR_VERSION

FACTS = device_facts("cpu")


def on_molecule(**changes: Any) -> Entry:
    """Of PROBLEM on a graph that there is."""
    graph = build_graph(load_graphs()["molecule"])
    given = {"name": graph.name, "edges": graph.num_edges, "nodes": graph.num_nodes}
    return entry(graph=given, graph_class="conv-e8-d4", **changes)


def outcomes(monkeypatch: pytest.MonkeyPatch, **by_direction: Outcome) -> None:
    """Trials that no process runs."""
    monkeypatch.setattr(recheck, "run_trial", lambda worker, job, limit: by_direction[job.direction])


def test_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    time = entry().time_us
    outcomes(
        monkeypatch,
        forward=Outcome("ok", time_us=time * 1.1),
        backward=Outcome("ok", time_us=time * 2),
        edge_backward=Outcome("wrong", "relative error above 1e-05: y 1.0e+00"),
        joint_backward=Outcome("timeout", "no answer within 120 s"),
    )
    names = ("forward", "backward", "edge_backward", "joint_backward")
    gone = entry(dtype="float64", graph={"name": "gone", "edges": 1, "nodes": 1})
    other = on_molecule(layout="ir_mul")
    other = dataclasses.replace(other, graph={**other.graph, "edges": 5})
    told: list[Verdict] = []
    found = recheck.recheck([*(on_molecule(direction=name) for name in names), gone, other], "cpu", told.append)
    assert told == found
    by_name = {(v.entry.direction, v.entry.dtype, v.entry.layout): v for v in found}
    assert {key: verdict.state for key, verdict in by_name.items()} == {
        ("forward", "float32", "mul_ir"): "ok",
        ("backward", "float32", "mul_ir"): "drifted",
        ("edge_backward", "float32", "mul_ir"): "wrong",
        ("joint_backward", "float32", "mul_ir"): "timeout",
        ("forward", "float64", "mul_ir"): "skipped",
        ("forward", "float32", "ir_mul"): "skipped",
    }
    drifted = by_name["backward", "float32", "mul_ir"]
    assert drifted.ratio == 2 > DRIFT and drifted.reason == "takes 2.00 times as long as recorded"
    assert drifted.noted.checked["state"] == "drifted" and not drifted.noted.failed_check
    wrong = by_name["edge_backward", "float32", "mul_ir"].noted
    assert wrong.failed_check == "wrong: relative error above 1e-05: y 1.0e+00"
    assert "graph 'gone' is not known here" in by_name["forward", "float64", "mul_ir"].reason
    assert "edges here and had 5" in by_name["forward", "float32", "ir_mul"].reason
    assert by_name["forward", "float64", "mul_ir"].noted is gone


def test_what_was_noted_comes_back_and_bad_notes_do_not() -> None:
    checked = {"date": "2026-11-21", "state": "wrong", "reason": "y"}
    noted = entry(checked=checked)
    assert Entry.from_dict(noted.to_dict()) == noted and "checked" not in entry().to_dict()
    with pytest.raises(DatabaseError, match=r"checked\['state'\] is 5; expected text"):
        entry(checked={"state": 5})


def test_an_entry_that_failed_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database.paths, "results_dir", lambda: tmp_path)
    kernel = (PROBLEM, "conv", "forward", "float32", "mul_ir", FACTS, "conv-e8-d4")
    good, bad = on_molecule(), on_molecule(checked={"date": "d", "state": "wrong", "reason": "g is off"})
    store(tmp_path, FACTS, good)
    assert find_schedule(*kernel).origin == "exact"
    store(tmp_path, FACTS, bad)
    tuning = find_schedule(*kernel)
    assert tuning.origin == "default" and "failed its last check, wrong: g is off" in tuning.reason
    store(tmp_path, FACTS, on_molecule(checked={"date": "d", "state": "drifted"}))
    assert find_schedule(*kernel).origin == "exact", "slower than noted is no reason for another kernel"


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process checks one sound entry, and one whose schedule is not legal for its problem."""
    illegal = on_molecule(direction="backward").to_dict()
    illegal["schedule"] = illegal["schedule"] | {"path_groups": 100}
    path = store(tmp_path, FACTS, on_molecule(generator=GENERATOR_VERSION), Entry.from_dict(illegal))

    def run(*arguments: object) -> str:
        given = ["db", *map(str, arguments), "--device", "cpu", "--results", str(tmp_path)]
        done = CliRunner().invoke(app, given, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    said = run("verify")
    assert "small conv backward float32 mul_ir conv-e8-d4: illegal" in said and "2 entries: " in said
    states = {entry.direction: entry.checked["state"] for entry in read_table(path).by_identity.values()}
    assert states["backward"] == "illegal" and states["forward"] in ("ok", "drifted")

    tuned = []
    monkeypatch.setattr("autotune.tune.run.tune", lambda config, *rest: tuned.extend(config.workloads))
    said = run("retune")
    (workload,) = tuned
    assert workload.directions == ("backward",) and workload.graph.name == "molecule"
    assert "tuning 1 entries of 1 workloads again" in said


def test_missing_certificates_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in place of one without an equivariance error; one that is there stays. Nothing is timed."""
    known = {"bitwise": False, "equivariance": 4e-7, "edges": 3, "environment": "0123456789abcdef"}
    part = {name: value for name, value in known.items() if name != "equivariance"}
    given = {"forward": {}, "backward": part, "edge_backward": known}
    path = store(tmp_path, FACTS, *(on_molecule(direction=name, certificate=of) for name, of in given.items()))
    arguments = ["db", "verify", "--uncertified", "--device", "cpu", "--results", str(tmp_path)]
    monkeypatch.setattr(recheck, "run_trial", lambda worker, job, limit: TrialSession(worker.setting).measure(job))
    monkeypatch.setattr("autotune.measure.timing.time_callable", lambda *given, **options: pytest.fail("timed"))
    said = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert said.exit_code == 0 and "2 entries: 2 ok" in said.output
    found = {entry.direction: entry for entry in read_table(path).by_identity.values()}
    assert found["edge_backward"].certificate == known and not found["edge_backward"].checked
    for name in ("forward", "backward"):
        certificate = found[name].certificate
        assert 0 < certificate["equivariance"] < 1e-6 and certificate["edges"] > 3
        assert certificate["environment"] == environment_hash(FACTS) and "time_us" not in found[name].checked


def test_a_certificate_above_its_tolerance_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is measured now, or was recorded and cannot be measured; another kernel's says nothing of this one."""
    over = {"bitwise": True, "equivariance": 1.5, "edges": 3, "environment": "0123456789abcdef"}
    path = store(tmp_path, FACTS, on_molecule())
    raw = json.loads(path.read_text())
    raw["entries"][0]["certificate"] = over
    path.write_text(json.dumps(raw))
    outcomes(monkeypatch, forward=Outcome("wrong", "relative error under a rotation above 1e-05: 1.5e+00"))
    arguments = ["db", "verify", "--device", "cpu", "--results", str(tmp_path)]
    said = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert said.exit_code == 1 and "1 entries: 1 wrong" in said.output
    (noted,) = read_table(path).by_identity.values()
    assert noted.failed_check.startswith("wrong: relative error under a rotation")
    outcomes(monkeypatch, forward=Outcome("ok", time_us=1500.0, certificate={**over, "equivariance": 1e-7}))
    (verdict,) = recheck.recheck([noted], "cpu")
    assert verdict.state == "ok" and verdict.noted.certificate["equivariance"] == 1e-7
    (verdict,) = recheck.recheck([dataclasses.replace(noted, source="of another")], "cpu")
    assert verdict.state == "skipped" and "equitune db retune" in verdict.reason


def test_a_trial_measures_the_certificate_that_it_is_asked_for() -> None:
    session = TrialSession(TrialSetting(Workload("small", PROBLEM, "conv", load_graphs()["molecule"]), "cpu"))
    job = TrialJob("forward", HostSchedule(), max_seconds=None, certifies=True)
    found = session.measure(job)
    assert found.ok and found.time_us is None and 0 < found.certificate["equivariance"] < 1e-6
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("autotune.measure.trial.equivariance_error", lambda *given: math.nan)
        found = session.measure(job)
    assert found.state == "wrong" and "under a rotation above 1e-05: nan" in found.reason


def test_entries_on_a_models_own_graph_are_retuned_on_one_of_its_size() -> None:
    of_model = entry(graph={"name": "my box", "edges": 700, "nodes": 40}, graph_class="conv-e9-d4")
    rows = entry(graph={"name": "my box", "edges": 500, "nodes": 0}, operation="plain", graph_class="plain-e9")
    for item in (of_model, rows):
        ((_, refused),) = recheck.workloads_of([item])
        assert isinstance(refused, ConfigError)
        ((_, workload),) = recheck.workloads_of([item], by_size=True)
        assert isinstance(workload, Workload)
        built = build_graph(workload.graph)
        assert {"name": built.name, "edges": built.num_edges, "nodes": built.num_nodes} == dict(item.graph)
        assert workload.identity("forward") == item.identity
