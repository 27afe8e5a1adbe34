"""A tuner for each device: which devices are meant, and what becomes of Ctrl-C and of a tuner that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import ROOT
from tiny_config import CONFIG

from autotune.cli import commands
from autotune.cli.options import devices_given, resolve_device
from autotune.database import trials as trial_records
from autotune.database.store import read_table
from autotune.errors import ConfigError
from autotune.measure.worker import _alone, devices_named, on_each
from autotune.tune.model import ModelTuning
from autotune.tune.run import begun_elsewhere
from autotune.tune.settings import resolve
from autotune.workload.config import load_config
from kernelgen.device import device_facts
from kernelgen.errors import InputError, ToolMissingError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def as_given(device: str) -> str:
    return device


def test_devices_by_all_number_and_name(two_gpus: None) -> None:
    assert devices_named("all", as_given) == ["cuda:0", "cuda:1"]
    assert devices_named("1, 0", as_given) == ["cuda:1", "cuda:0"]
    assert devices_named("cuda:0", as_given) == ["cuda:0"]
    assert devices_named("cpu,cpu", as_given) == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("text", "told"),
    [("0,,1", "expected all, numbers"), ("0,0", "cuda:0 twice"), ("0,cpu", "not both"), ("", "expected all")],
)
def test_devices_that_make_no_sense(two_gpus: None, text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        devices_named(text, as_given)


def write_what_is_seen(device: str, name: str, folder: Path) -> None:
    (folder / name).write_text(f"{device} of {os.environ.get('CUDA_VISIBLE_DEVICES')}")


def test_each_process_sees_its_own_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenEquivariance runs on the first GPU that there is, wherever its operands are."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-77,6")
    on_each(["cuda:0", "cuda:1"], "test", write_what_is_seen, tmp_path)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"cuda:0": "cuda:0 of 5", "cuda:1": "cuda:0 of GPU-77"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5, GPU-77,6", "the caller sees what it saw"


@pytest.mark.parametrize(("device", "seen"), [("cuda", "0"), ("cuda:1", "1"), ("cpu", None)])
def test_without_a_choice_of_the_users_a_gpu_goes_by_its_number(
    device: str, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what is set in the test is undone after it
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert _alone(device) == ("cuda:0" if seen else "cpu")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen


def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="torch sees no CUDA device"):
        devices_named("all", resolve_device)
    with pytest.raises((InputError, ToolMissingError)):
        devices_named("0,1", resolve_device)
    with pytest.raises(ConfigError, match="leave one out"):
        devices_given("cpu", "cpu,cpu")


def test_who_shares_what(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(trials=4))

    def settings(storage: str | None, tuners: int | None) -> tuple[str, bool]:
        found, _ = resolve(config, "cpu", None, None, None, storage, 0, tmp_path, False, None, tuners)
        return found.sharing, found.storage == storage

    assert settings(None, None) == ("alone", False)
    assert settings(None, 1) == ("folder", False)
    assert settings("sqlite:///x.db", None) == settings("sqlite:///x.db", 2) == ("storage", True)


@pytest.mark.parametrize("given", [("--devices", "cpu,cpu"), ("--device", "cpu", "--shared")])
def test_the_command_hands_devices_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...]
) -> None:
    received: list[tuple] = []
    monkeypatch.setattr("autotune.tune.run.tune_together", lambda *those, **options: received.append((*those, options)))
    with pytest.raises(SystemExit) as ended:
        commands.main(["tune", "quick", *given, "--trials", "7", "--results", str(tmp_path)])
    assert ended.value.code == 0
    ((config, devices, options),) = received
    assert config.workloads[0].label == "tiny" and devices == ["cpu"] * (2 if "," in given[1] else 1)
    given = {name: value for name, value in options.items() if value is not None}
    assert given == {"trials": 7, "seed": 0, "results_dir": tmp_path, "objective": "time", "counters": "auto"}


def test_tuners_of_a_model_may_share_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    searches: list[dict[str, Any]] = []
    opened = SimpleNamespace(name="m", model=None, passes={}, graph="g", replaced="", dtype="")
    monkeypatch.setattr("autotune.tune.model_passes.open_named", lambda *_: opened)

    def tune_passes(model: Any, passes: Any, seconds: float, search: dict[str, Any], *_: Any, **__: Any) -> ModelTuning:
        searches.append(search)
        return ModelTuning("m", "cpu", (), (), {})

    monkeypatch.setattr("autotune.tune.model.tune_passes", tune_passes)
    for given in ((), ("--shared",)):
        with pytest.raises(SystemExit) as ended:
            commands.main(["tune", "model", "my.model", "--device", "cpu", "--results", str(tmp_path), *given])
        assert ended.value.code == 0
    assert [search["tuners"] for search in searches] == [None, 1]


def test_each_tuner_begins_at_another_workload(tmp_path: Path) -> None:
    """Setting a workload up takes as long as some ten trials: two need not do it at once while there are others."""
    config = load_config("suite", "cuda")
    count, three = len(config.workloads), [begun_elsewhere(load_config("suite", "cuda"), n, 3) for n in range(3)]
    assert three[0] == config and all(set(one.workloads) == set(config.workloads) for one in three)
    firsts = [config.workloads.index(one.workloads[0]) for one in three]
    assert firsts == [0, count // 3, 2 * count // 3]
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(trials=4))
    alone = load_config(path, "cpu")
    assert [begun_elsewhere(alone, n, 2) for n in range(2)] == [alone, alone]


class Run:
    """``equitune tune --devices cpu,cpu`` as a program."""

    def __init__(self, folder: Path, trials: int) -> None:
        self.results, config = folder / "results", folder / "config.toml"
        config.write_text(CONFIG.format(trials=trials))
        command = [sys.executable, "-m", "autotune", "tune", str(config), "--devices", "cpu,cpu", "--no-peers"]
        self.process = subprocess.Popen(
            [*command, "--results", str(self.results)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def lines(self) -> list[dict]:
        return [line for path in self.results.glob("trials/*/*.jsonl") for line in trial_records.read(path)]

    def wait_for(self, ready: Callable[[], bool]) -> None:
        while not ready():
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.05)

    def tuners(self) -> list[int]:
        """Processes: those forked from the program's server that have a server of their own."""
        forked = [pid for server in _children(self.process.pid) for pid in _children(server)]
        return [pid for pid in forked if _children(pid)]


def _children(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_interrupted_tuners_publish_what_there_is(tmp_path: Path) -> None:
    run = Run(tmp_path, 200)
    run.wait_for(lambda: len(run.lines()) >= 3)
    run.process.send_signal(signal.SIGINT)
    _, printed = run.process.communicate()
    assert run.process.returncode == 130, printed
    assert "[cpu 1]" in printed and "[cpu 2]" in printed and "disturbs its timings" in printed
    found = run.lines()
    assert 3 <= len(found) < 200 and len({trial_records.identity(line) for line in found}) == len(found)
    table = read_table(run.results / f"{device_facts('cpu').slug}.json")
    (entry,) = table.by_identity.values()
    assert entry.trials["count"] <= len(found)
    assert printed.count("another tuner is still working") + printed.count("published") >= 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_tuner_that_dies_is_named_and_the_other_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, 8)
    run.wait_for(lambda: len(run.tuners()) == 2)
    os.kill(run.tuners()[0], signal.SIGKILL)
    _, printed = run.process.communicate()
    assert run.process.returncode == 2
    assert "was ended by SIGKILL" in printed and "run the same command again" in printed
    assert len(run.lines()) >= 8 and "tiny on pair, conv float32: " in printed
    assert "published" in printed or "the default stays" in printed or "default confirmed" in printed
