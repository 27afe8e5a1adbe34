"""Faults in trials, really injected: the study goes on, says what happened, and nobody is offered that kernel again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from faults import CUDA, STATES, FaultySetting, cost_us, spoiled

from autotune.database import store as database
from autotune.database import trials as quarantine
from autotune.database import trials as trial_records
from autotune.database.lookup import find_schedule
from autotune.database.trials import FAULTS, quarantine_path, quarantined
from autotune.errors import TuningMissError
from autotune.measure.kinds import space_of
from autotune.measure.space import Space
from autotune.measure.worker import Worker
from autotune.search import loop as trial_steps
from autotune.search.loop import search
from autotune.search.study import Study
from autotune.workload.config import load_graphs
from autotune.workload.workload import Workload
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.compile.compiler import compile_source
from kernelgen.device import cuda_facts, device_facts
from kernelgen.errors import CompileError
from kernelgen.kernels.dispatch import emit, make_plan
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import TensorProductProblem

PROBLEM = TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o", "0e+1o")
WORKLOAD = Workload("tiny", PROBLEM, "conv", load_graphs()["carbon-small"])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FEW = {
    "cpu": {"path_groups": (1, 2, 4), "channel_block": (4, 8), "accumulate": ("registers", "atomics")},
    "cuda": {"path_groups": (2, 4), "block_size": (64, 128, 256), "edge_operand": ("inline", "shared")},
}


def small_space(device: str) -> Space:
    space = space_of(WORKLOAD, "forward", device_facts(device))
    kept = {knob: FEW[device].get(knob, (getattr(space.default, knob),)) for knob in space.knobs}
    return dataclasses.replace(space.restricted(kept), probes=())


@dataclasses.dataclass
class Run:
    """One search to exhaustion."""

    folder: Path
    device: str
    space: Space

    def __call__(self, faults: dict[str, str]) -> list[dict[str, Any]]:
        """The records of its trials."""
        path, faulty = self.folder / "trials" / "dev" / "tiny.jsonl", quarantine_path(self.folder, "dev")
        setting = FaultySetting(WORKLOAD, self.device, faults)
        with Worker(setting) as worker, Study(self.space, "tiny", path, seed=1, quarantine=faulty) as study:
            prepare = trial_steps.compile_ahead
            measure = trial_steps.Measurer(worker, "forward", 0.0)
            assert search(study, lambda schedule: prepare(study.space, schedule), measure, prune=False) == "exhausted"
        return trial_records.read(path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", DEVICES)
def test_every_fault_is_recorded_and_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setenv("EQUITUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trial_steps, "LEAST_LIMIT_S", 5.0)
    monkeypatch.setattr(trial_steps, "FIRST_LIMIT_S", 30.0)
    space = small_space(device)
    sound = Run(tmp_path / "sound", device, space)({})
    assert {line["state"] for line in sound} == {"ok"} and len(sound) > len(STATES) + 2
    best = min(sound, key=lambda line: line["time_us"])
    keys = [space.kind.read(line["schedule"]).key for line in sound]
    kept = {space.default.key, space.kind.read(best["schedule"]).key}
    faults = dict(zip([key for key in keys if key not in kept], STATES, strict=False))
    assert len(faults) == len(STATES)

    found = Run(tmp_path / "faulty", device, space)(faults)
    outcomes = {space.kind.read(line["schedule"]).key: line for line in found}
    assert len(found) == len(outcomes) == len(sound), "each schedule once"
    column = 0 if device == "cpu" else 1
    for key, line in outcomes.items():
        expected = STATES[faults[key]][column] if key in faults else "ok"
        assert line["state"] == expected, (faults.get(key), line["reason"])
        assert bool(line["reason"]) == (key in faults)
    later = next(outcomes[key] for key, fault in faults.items() if "second launch" in fault)
    assert "right at its first launch" in later["reason"]
    passed = [line for line in found if line["state"] == "ok"]
    assert min(passed, key=lambda line: line["time_us"])["schedule"] == best["schedule"]
    assert all(line["time_us"] == cost_us(space.kind.read(line["schedule"])) for line in passed)

    listed = quarantined([quarantine_path(tmp_path / "faulty", "dev")], space.spec)
    assert set(listed) == set(faults)
    offered = []
    with Study(space, "other", None, quarantine=quarantine_path(tmp_path / "faulty", "dev")) as other:
        while (proposal := other.propose()) is not None:
            offered.append(proposal.schedule.key)
    assert sorted(offered) == sorted(set(keys) - set(faults)), "another graph's study is not offered them"


def test_a_compile_error_before_the_worker_is_a_fault_too(tmp_path: Path) -> None:
    space, path = small_space("cpu"), quarantine_path(tmp_path, "dev")

    def prepare(schedule: Any) -> Any:
        raise CompileError("the compiler gave up")

    with Study(space, "tiny", tmp_path / "trials" / "dev" / "tiny.jsonl", quarantine=path) as study:
        search(study, prepare, lambda *_: pytest.fail("measured"), trials=1)
    assert quarantined([path], space.spec) == {space.default.key: "compile: the compiler gave up"}


def test_what_is_in_quarantine_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUITUNE_DATABASE", str(tmp_path))
    monkeypatch.setattr(database.paths, "results_dir", lambda: tmp_path / "shipped")
    facts, space = device_facts("cpu"), small_space("cpu")
    kernel = (PROBLEM, "conv", "forward", "float32", "mul_ir", facts, WORKLOAD.graph_class())
    assert find_schedule(*kernel).schedule == space.default
    path = quarantine_path(tmp_path, facts.slug)
    fault = {"study": "tiny", "state": "wrong", "reason": "not what e3nn says"}
    quarantine.note_fault(path, space.spec, space.default, fault)
    with pytest.raises(TuningMissError, match="quarantine .*wrong: not what e3nn says"):
        find_schedule(*kernel)
    assert find_schedule(PROBLEM, "conv", "backward", "float32", "mul_ir", facts).origin == "default"
    line = json.loads(path.read_text())
    path.write_text(json.dumps(line | {"generator": "another"}) + "\n")
    assert find_schedule(*kernel).schedule == space.default, "another generator makes another kernel"


def test_faults_are_states_of_trials() -> None:
    from autotune.measure.trial import STATES as ALL

    assert set(FAULTS) == set(ALL) - {"ok", "pruned", "illegal"}
    assert {state for pair in STATES.values() for state in pair} == set(FAULTS)


def test_the_faults_of_a_gpu_compile_where_they_should() -> None:
    facts = cuda_facts("sm_90", "NVIDIA Test", 132)
    spec = Spec(PROBLEM, DIRECTIONS["forward"], CudaSchedule(), "conv", "float32", "mul_ir", "int64", facts)
    for fault in CUDA:
        source = spoiled(emit(make_plan(spec)), fault)
        if fault == "does not compile":
            with pytest.raises(CompileError, match="not C"):
                compile_source(source, facts)
        else:
            assert compile_source(source, facts).resources["registers"]
