"""A comparison shared out to several devices: every row once, and nothing lost when one of them falls out."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.bench import kernels as bench
from autotune.bench.rows import stored_rows
from autotune.errors import ConfigError, StudyError
from autotune.workload.config import load_config
from kernelgen.device import cuda_facts, device_facts

CONFIG = """
problem = ["a", "b", "c"]
graph = "molecule"
directions = ["forward"]
passes = ["forward"]

[problems]
a = { in1 = "2x0e", in2 = "0e", filter = "0e" }
b = { in1 = "2x0e+2x1o", in2 = "0e+1o", filter = "0e+1o" }
c = { in1 = "2x1o", in2 = "1o", filter = "0e" }

[[workload]]
dtype = "float32"

[[workload]]
dtype = "float64"
problem = "b"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(CONFIG)
    return path


def run(config: Path, **options: Any) -> tuple[list[dict[str, Any]], str]:
    console = Console(file=io.StringIO(), width=200)
    options = {"peers": (), "seconds_each": 0.0, "console": console, "devices": ("cpu", "cpu"), **options}
    rows = bench.bench(config, None, config.parent, **options)
    return rows, console.file.getvalue()  # type: ignore[attr-defined]


def names(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["label"], row["dtype"]) for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_row_is_measured_once(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows, said = run(config)
    assert names(rows) == [("a", "float32"), ("b", "float32"), ("b", "float64"), ("c", "float32")]
    assert "4 workloads compared" in said
    told = capfd.readouterr().err
    assert "[cpu 1]" in told and "[cpu 2]" in told and "disturbs its timings" in told
    # "[cpu 1] [1/2, 3 s] b on ..." of each workload.
    assert sorted(line.split("] ")[2].split(" on ")[0] for line in told.splitlines() if " s] " in line) == [*"abbc"]

    before = stored_rows(config.parent, device_facts("cpu"))
    again, said = run(config)
    assert again == rows and "already measured: 4 rows" in said
    assert stored_rows(config.parent, device_facts("cpu")) == before


def fall_out(device: str, name: str, shared: tuple, groups: list, turns: Any, *rest: Any) -> None:
    """The second device takes a turn and dies of it."""
    if name == "cpu 2":
        bench.in_turn(groups, turns)(True)
        raise MemoryError("out of everything")
    bench._compare_share(device, name, shared, groups, turns, *rest)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_device_that_falls_out_costs_its_problem_only(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bench, "_compare_share", fall_out)
        with pytest.raises(StudyError, match=r"the bench on cpu 2 failed.*run the same command again"):
            run(config)
    kept = stored_rows(config.parent, device_facts("cpu"))
    assert 0 < len(kept) < 4
    rows, said = run(config, devices=("cpu",))
    assert f"already measured: {len(kept)} row" in said and len(rows) == 4
    assert all(row in rows for row in kept)


def test_gpus_of_two_models_make_no_record(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"cuda:0": cuda_facts("sm_90", "NVIDIA H200"), "cuda:1": cuda_facts("sm_80", "NVIDIA A100")}
    monkeypatch.setattr(bench, "device_facts", facts.__getitem__)
    with pytest.raises(ConfigError, match="NVIDIA H200 and NVIDIA A100"):
        bench.bench(load_config(config, "cuda"), None, config.parent, devices=("cuda:0", "cuda:1"))
