"""Results in other autotuners' formats: T4 files come back as they went, Kernel Tuner reads and replays them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from database_samples import GPU, HOST, entry, store
from places import ROOT, SUPPORT

from autotune.cli.commands import main
from autotune.database import trials as trial_archive
from autotune.errors import DatabaseError
from autotune.replay.open_formats import INVALIDITY, export_results, import_trials
from kernelgen.kernels.product.schedule import CudaSchedule

STUDY = "small"
STATES = ("ok", "pruned", "compile", "launch", "wrong", "timeout", "ok")
KERNEL_TUNER = "kernel_tuner==1.5.0"


def trial(number: int, state: str, **changes: Any) -> dict[str, Any]:
    ok = state == "ok"
    return {
        "study": STUDY,
        "number": number,
        "time": f"2026-11-20T12:00:0{number}+00:00",
        "state": state,
        "reason": "" if ok else f"it ended with {state}",
        "schedule": CudaSchedule(path_groups=number + 1, stream=bool(number % 2)).to_dict(),
        "time_us": 100.123 - number if ok else None,
        "q1_us": 99.0 if ok else None,
        "q3_us": 101.5 if ok else None,
        "samples_us": [100.123, 99.877] if ok else [],
        "cut": False,
        "errors": {"g": 3e-7} if ok else {},
        "resources": {"registers": 96, "spill_bytes": 0},
        "clocks": {"sm_mhz": [1980, 1965]} if ok else None,
        "compile_s": 0.125,
        "generator": "0.1.0+0123456789",
        **changes,
    }


@pytest.fixture
def lines() -> list[dict[str, Any]]:
    older = trial(len(STATES), "ok", schedule={"backend": "cuda", "early": 3, "path_groups": 1}, cut=True)
    return [*(trial(number, state) for number, state in enumerate(STATES)), older]


@pytest.fixture
def results(tmp_path: Path, lines: list[dict[str, Any]]) -> Path:
    """A GPU with a study, another study that no entry cites, and a CPU without trials."""
    folder = tmp_path / "results"
    trials = {"file": f"trials/{GPU.slug}/{STUDY}.jsonl", "count": len(lines), "ok": 3}
    store(folder, GPU, entry(CudaSchedule(), trials=trials))
    store(folder, HOST, entry())
    for study in (STUDY, "strange"):
        for line in lines:
            trial_archive.append(trial_archive.study_path(folder, GPU.slug, study), line)
    trial_archive.append(trial_archive.study_path(folder, GPU.slug, "headless", "record"), lines[0])
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_trials_come_back_from_t4_as_they_were(results: Path, lines: list[dict[str, Any]], tmp_path: Path) -> None:
    done = export_results(results, tmp_path / "out")
    assert (done.devices, done.studies, done.trials, done.entries) == (2, 1, len(lines), 2)
    assert done.unnamed == ("strange", "headless")
    path = tmp_path / "out" / GPU.slug / "trials" / f"{STUDY}.t4.json"
    target, count = import_trials(path, tmp_path / "back")
    assert count == len(lines)
    assert trial_archive.read(target) == lines
    assert import_trials(path, tmp_path / "back") == (target, 0), "nothing is new"


def test_t4_says_what_became_of_each_trial(results: Path, tmp_path: Path) -> None:
    export_results(results, tmp_path / "out")
    home = tmp_path / "out" / GPU.slug
    found = read(home / "trials" / f"{STUDY}.t4.json")
    words = [result["invalidity"] for result in found["results"]]
    assert words == [INVALIDITY[state] for state in STATES] + ["correct"]
    first = found["results"][0]
    assert first["measurements"][0] == {"name": "time", "value": 0.100123, "unit": "ms"}
    assert first["times"]["compilation_time"] == 125 and first["configuration"]["stream"] is False
    published, default = read(home / "database.t4.json")["results"]
    assert published["configuration"] == CudaSchedule().to_dict() and published["measurements"][0]["value"] == 1.5
    assert default["measurements"][0]["value"] == 3.0


def test_t1_has_every_knob_with_its_values(results: Path, tmp_path: Path) -> None:
    export_results(results, tmp_path / "out")
    problem = read(tmp_path / "out" / GPU.slug / "trials" / f"{STUDY}.t1.json")
    found = {item["Name"]: item for item in problem["ConfigurationSpace"]["TuningParameters"]}
    assert list(found) == list(CudaSchedule.choices)
    assert found["stream"] == {"Name": "stream", "Type": "int", "Values": "[False, True]"}
    assert found["order"]["Type"] == "string"
    assert not list((tmp_path / "out" / HOST.slug).rglob("*.t1.json")), "T1 has no language of a CPU's kernels"


def test_the_command_exports_one_problem_and_imports(results: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as end:
        main(["db", "export", str(out), "--format", "t4", "--results", str(results)])
    assert end.value.code == 0 and "8 trials of 1 studies" in capsys.readouterr().out
    for words in (
        ["export", str(out), "--format", "t4", "--results", str(results)],
        ["import", str(out / GPU.slug / "database.t4.json"), "--results", str(results)],
    ):
        with pytest.raises(SystemExit) as end:
            main(["db", *words])
        assert end.value.code == 2
    assert "is not empty" in (text := capsys.readouterr().err) and "cannot be imported" in text
    with pytest.raises(DatabaseError, match="no database"):
        export_results(tmp_path / "nowhere", tmp_path / "other")


@pytest.fixture(scope="module")
def python_with_kernel_tuner(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has Kernel Tuner: $EQUITUNE_KERNEL_TUNER, or a new environment if pip can make one."""
    if given := os.environ.get("EQUITUNE_KERNEL_TUNER"):
        return given
    home = tmp_path_factory.mktemp("kernel-tuner")
    python = str(home / "bin" / "python")
    for command in ([sys.executable, "-m", "venv", str(home)], [python, "-m", "pip", "install", "-q", KERNEL_TUNER]):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            pytest.skip(f"Kernel Tuner cannot be installed here: {done.stderr[-300:]}")
    return python


@pytest.mark.slow
def test_kernel_tuner_validates_the_whole_record_and_finds_our_best(
    python_with_kernel_tuner: str, tmp_path: Path
) -> None:
    done = export_results(ROOT / "results", tmp_path / "out")
    assert done.studies > 500 and done.trials > 20_000 and done.unnamed == ()
    command = [python_with_kernel_tuner, str(SUPPORT / "kernel_tuner_reads.py"), str(tmp_path / "out")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    assert told.returncode == 0, told.stderr[-3000:]
    found = json.loads(told.stdout.splitlines()[-1])
    assert found["valid"] == len([path for path in (tmp_path / "out").rglob("*.json") if "cache" not in path.name])
    folder = ROOT / "results" / "record" / "nvidia-h200"
    recorded = trial_archive.read_device(folder)[0]
    assert found["best"].keys() == recorded.keys()
    for study, (_, *trials) in recorded.items():
        timed = [line for line in trials if line["state"] == "ok" and not line["cut"]]
        best = min(timed, key=lambda line: line["time_us"])
        theirs = found["best"][study]
        assert theirs["time"] == pytest.approx(best["time_us"] / 1000)
        assert {name: theirs[name] for name in best["schedule"]} == best["schedule"]
        assert theirs["evaluated"] == len(trials)
