"""Without the packages of extra ``tune``: models run, and commands say in one line what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from places import ROOT

from autotune import paths
from autotune.paths import TUNE, require_tune
from kernelgen.errors import ToolMissingError
from kernelgen.version import __version__

# Hides packages as if they were not installed: importing them fails, looking for them finds nothing.
HIDE = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in GONE:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Hiding, sys.meta_path)
"""
MODEL = """
import torch
from e3nn import o3
from autotune import SphericalHarmonics, TensorProductConv, accelerate, restore
from autotune.paths import missing_packages

assert set(missing_packages()) == GONE
torch.manual_seed(0)
conv = TensorProductConv("4x0e+4x1o", "0e+1o", filter_irreps_out="0e+1o", dtype=torch.float64, device="cpu")
conv.tuning
x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
y, w = torch.randn(9, 4, dtype=torch.float64), torch.randn(9, conv.weight_numel, dtype=torch.float64)
sender, receiver = torch.randint(0, 5, (2, 9))
conv(x, y, w, sender, receiver).square().sum().backward()
assert bool(x.grad.abs().sum() > 0)

product = o3.FullyConnectedTensorProduct("4x0e+2x1o", "0e+1o", "2x0e+2x1o").double()
model = torch.nn.Sequential(product)
a, b = torch.randn(7, 10, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
before = product(a, b)
found = accelerate(model)
assert found.replaced == 1, found
torch.testing.assert_close(model[0](a, b), before, rtol=1e-10, atol=1e-10)
assert restore(model) == 1 and model[0] is product
print("ran without", *sorted(GONE & set(sys.modules)))

from autotune import tune_model
try:
    tune_model(torch.nn.Identity(), torch.zeros(1))
except Exception as error:
    print(type(error).__name__, error, sep=": ")
"""
# Exit codes of two commands, each behind what it prints.
DOCTOR = """
from autotune.cli import main
for words in (["doctor", "--json"], ["doctor"]):
    try:
        main(words)
    except SystemExit as end:
        print("ended with", end.code or 0)
"""


def run_hidden(gone: Sequence[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = f"GONE = set({list(gone)!r})\n{HIDE}\n{code}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True)


def command(gone: Sequence[str], *words: str) -> subprocess.CompletedProcess[str]:
    return run_hidden(gone, "from autotune.cli import main\nmain(sys.argv[1:])", *words)


@pytest.mark.slow
def test_a_model_runs_and_is_accelerated_without_them() -> None:
    done = run_hidden([name for name in TUNE if name != "scipy"], MODEL.replace("== GONE", ">= GONE"))
    assert done.returncode == 0, done.stderr
    without, error = done.stdout.splitlines()
    assert without == "ran without"
    missing = ", ".join(name for name in TUNE if name != "scipy")
    assert error.startswith(f"ToolMissingError: tune_model needs {missing}; install with: pip install")


@pytest.mark.parametrize(
    "words", [("tune", "quick"), ("bench", "suite"), ("report",), ("show", "mace-mp-medium"), ("db", "stale"), ()]
)
def test_a_command_names_what_is_missing_in_one_line(words: tuple[str, ...]) -> None:
    done = command(TUNE, *words)
    assert (done.returncode, done.stdout) == (2, "")
    said = " ".join(("equitune", *words[:1]))
    assert done.stderr == (
        f"equitune: error: {said} needs {', '.join(TUNE)}; install with: pip install 'equitune[tune]' "
        "(equitune doctor works without)\n"
    )


def test_one_missing_package_is_named_before_anything_runs() -> None:
    done = command(("pandas",), "tune", "quick")
    assert done.returncode == 2 and "equitune tune needs pandas; install with" in done.stderr


def test_the_version_and_the_doctor_answer_without_them() -> None:
    shown = command(TUNE, "--version")
    assert (shown.returncode, shown.stdout) == (0, f"equitune {__version__}\n")
    listed, text, end = run_hidden(TUNE, DOCTOR).stdout.split("ended with 0\n")
    rows = json.loads(listed)
    assert {row["name"]: row["state"] for row in rows}["torch"] == "ok"
    assert not [row for row in rows if row["state"] == "problem"], rows
    assert text.splitlines()[-1] == "next: pip install 'equitune[tune]', to search for schedules; models run without"
    assert end == ""


def test_a_function_that_needs_them_raises_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    require_tune("tune_model")
    monkeypatch.setattr(paths, "TUNE", (*TUNE, "no_such_package"))
    with pytest.raises(ToolMissingError, match=r"tune_model needs no_such_package; install with: pip install 'equi"):
        require_tune("tune_model")


def test_they_are_what_the_extra_installs() -> None:
    from autotune.workload.toml_tables import read_toml

    lines = read_toml(Path(ROOT) / "pyproject.toml")["project"]["optional-dependencies"]["tune"]
    assert sorted(line.partition(">=")[0] for line in lines) == sorted(TUNE)
    assert all(importlib.util.find_spec(name) for name in TUNE)


def test_commands_in_messages_are_those_that_work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "my env" / "bin" / "equitune"
    monkeypatch.setattr(paths.sysconfig, "get_path", lambda name: str(own.parent))
    assert paths.typed("doctor") == f"{sys.executable} -m autotune doctor"
    own.parent.mkdir(parents=True)
    own.touch(0o755)
    assert paths.typed("doctor") == f"'{own}' doctor"
    monkeypatch.chdir(tmp_path)
    assert paths.typed("doctor") == "'my env/bin/equitune' doctor"
    monkeypatch.setenv("PATH", str(own.parent))
    assert paths.typed("doctor") == "equitune doctor"
