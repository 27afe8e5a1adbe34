"""The largest crystal that fits: doubled until a step fails, and what ends it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import MOST_EDGES

from autotune.bench import whole_models
from autotune.bench.contenders import build, contenders_of
from autotune.bench.model_rows import rows_path, stored_rows
from autotune.bench.session import ModelSession, ModelSetting
from autotune.bench.whole_models import (
    LargestRequest,
    contenders_for,
    crystal,
    crystals,
    finished,
    largest_crystals,
    step_on_crystal,
    table_lines,
    why_ended,
)
from autotune.errors import ConfigError, PeerError
from autotune.measure.worker import WorkerLost
from autotune.models.whole_model import open_model, package_named
from kernelgen.device import device_facts

TINY, UNTUNED = "tiny_model:tiny_model", "equitune-default"


class Here:
    """In the place of a contender's process: its jobs run in this one."""

    started: list[str] = []

    def __init__(self, setting: ModelSetting) -> None:
        self.setting, self.session = setting, None
        self.started.append(setting.contender)

    def __enter__(self) -> Here:
        self.session = self.setting.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.session = None

    def ask(self, limit_s: float, method: Any, *given: Any) -> Any:
        return method(self.session, *given)

    def close(self) -> None:
        pass


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> type[Here]:
    for name in ("EQUITUNE_MISSES", "EQUITUNE_UNTUNED"):  # a contender's process sets them
        monkeypatch.setenv(name, "0" if name == "EQUITUNE_MISSES" else "")
    monkeypatch.setattr(whole_models, "Worker", Here)
    monkeypatch.setattr(Here, "started", [])
    return Here


def measure(folder: Path, *contenders: str, say: Any = lambda text: None, **changes: Any) -> dict[str, dict[str, Any]]:
    (row,) = largest_crystals(LargestRequest((TINY,), contenders, **{"most_atoms": 1024} | changes), folder, say)
    return row["contenders"]


def test_the_doubling_ends_where_memory_does(here: type[Here], tmp_path: Path) -> None:
    cell = measure(tmp_path, "full")["full"]
    assert cell["ended"] == {"atoms": 256, "why": "out of memory"} and "error" not in cell
    found = cell["largest"]
    assert found["atoms"] == 128 and 128 * 16 < found["edges"] <= MOST_EDGES and found["wall_ms"] > 0
    assert "peak_mib" not in found, "a CPU's memory is not measured"
    (row,) = stored_rows(tmp_path, device_facts("cpu").slug).values()
    assert (row["structure"], row["pass"], row["atoms"], row["edges"]) == ("diamond", "largest", 128, found["edges"])
    assert row["command"] == f"equitune bench largest --model {TINY} --most-atoms 1024"


def test_what_ends_it_is_told_as_it_is(here: type[Here], tmp_path: Path) -> None:
    cells = measure(tmp_path, "stock", "wraps", "refuses", "breaks", "equitune-streamed", most_atoms=300)
    assert cells["stock"]["ended"] == {"atoms": 512, "why": "more than --most-atoms 300", "ceiling": 300}
    assert cells["stock"]["largest"]["atoms"] == 256
    assert cells["wraps"]["largest"]["atoms"] == 128
    assert cells["wraps"]["ended"]["why"].startswith("wrong values: forces of equal cells differ")
    assert cells["refuses"]["error"] == "refuses: it does not want to" and "ended" not in cells["refuses"]
    assert cells["breaks"]["error"] == "RuntimeError: out of order"
    assert cells["breaks"]["ended"] == {"atoms": 64, "why": "RuntimeError: out of order"}
    assert "nothing of the model was replaced" in cells["equitune-streamed"]["error"]


@pytest.mark.slow
def test_processes_of_their_own_and_their_limit_of_time(tmp_path: Path) -> None:
    said: list[str] = []
    cells = measure(tmp_path, "dies", "slow", "stock", limit_s=8.0, most_atoms=256, say=said.append)
    assert cells["stock"]["largest"]["atoms"] == 256 and "ceiling" in cells["stock"]["ended"]
    assert cells["slow"]["largest"]["atoms"] == 128
    assert cells["slow"]["ended"] == {"atoms": 256, "why": "time limit of 8 s"}
    assert "exit code 3" in cells["dies"]["error"] and cells["dies"]["ended"]["atoms"] == 64
    assert "  256 atoms: time limit of 8 s" in said


def test_a_process_that_is_lost_before_the_limit_is_no_matter_of_time(
    here: type[Here], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(self: Here, limit_s: float, method: Any, *given: Any) -> Any:
        if method is step_on_crystal and given != ((2, 2, 2),):
            raise WorkerLost("crashed", "the process was ended by SIGKILL")
        return method(self.session, *given)

    monkeypatch.setattr(here, "ask", ask)
    assert measure(tmp_path, "stock")["stock"]["ended"] == {"atoms": 128, "why": "the process was ended by SIGKILL"}
    cells = measure(tmp_path, "stock", fresh=True, limit_s=0.0)
    assert cells["stock"]["error"] == "time limit of 0 s" and "largest" not in cells["stock"]


def test_an_interruption_keeps_what_was_measured(
    here: type[Here], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, ask = measure(tmp_path, "full"), here.ask

    def interrupted(self: Here, limit_s: float, method: Any, *given: Any) -> Any:
        if method is step_on_crystal and given == ((4, 4, 2),):
            raise KeyboardInterrupt
        return ask(self, limit_s, method, *given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(here, "ask", interrupted)
        measure(tmp_path, "full", "stock")
    (row,) = stored_rows(tmp_path, device_facts("cpu").slug).values()
    assert row["contenders"]["full"] == before["full"]
    assert "ended" not in row["contenders"]["stock"] and row["contenders"]["stock"]["largest"]["atoms"] == 128
    assert why_ended(row["contenders"]["stock"]) == "interrupted"
    here.started.clear()
    after = measure(tmp_path, "full", "stock", most_atoms=256)
    assert here.started == ["stock"] and after["stock"]["largest"]["atoms"] == 256 and after["full"] == before["full"]


def test_finished_ones_are_kept_and_a_higher_ceiling_is_measured_again(here: type[Here], tmp_path: Path) -> None:
    first = measure(tmp_path, "full", "stock", most_atoms=128)
    here.started.clear()
    said: list[str] = []
    assert measure(tmp_path, "full", "stock", most_atoms=255, say=said.append) == first and not here.started
    assert said == [f"{TINY}, stock: kept", f"{TINY}, full: kept"]
    more = measure(tmp_path, "full", "stock", most_atoms=256)
    assert here.started == ["stock", "full"]
    assert more["full"]["ended"]["why"] == "out of memory" and more["stock"]["largest"]["atoms"] == 256
    here.started.clear()
    assert measure(tmp_path, "full", most_atoms=512) == more and not here.started
    measure(tmp_path, "full", fresh=True)
    assert here.started == ["full"]


def test_rows_of_other_software_are_measured_again(here: type[Here], tmp_path: Path) -> None:
    measure(tmp_path, "full", "stock")
    path = rows_path(tmp_path, device_facts("cpu").slug)
    record = json.loads(path.read_text())
    record["rows"][0]["software"]["torch"] = "another"
    path.write_text(json.dumps(record))
    assert set(measure(tmp_path, "full")) == {"full"}


def test_other_code_of_ours_is_measured_again(
    here: type[Here], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(tmp_path, "equitune", "stock", most_atoms=64)
    monkeypatch.setattr("autotune.bench.model_rows.own_code", lambda: "another")
    here.started.clear()
    measure(tmp_path, "equitune", "stock", most_atoms=64)
    assert here.started == ["equitune"]


def test_a_cpu_needs_a_ceiling(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="such as --most-atoms 512"):
        measure(tmp_path, "stock", most_atoms=None)
    with pytest.raises(ConfigError, match="--most-atoms is 63; expected at least 64"):
        measure(tmp_path, "stock", most_atoms=63)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_cell_is_not_finished_and_a_ceiling_ends_below_itself() -> None:
    assert not finished({}, 512) and not finished({"largest": {"atoms": 64}}, 512)
    assert finished({"error": "no"}, None) and finished({"ended": {"atoms": 64, "why": "out of memory"}}, None)
    ceiling = {"ended": {"atoms": 1024, "why": "", "ceiling": 512}}
    assert [finished(ceiling, most) for most in (64, 1023, 1024, None)] == [True, True, False, False]


def test_crystals_double_one_direction_after_the_other() -> None:
    sizes = crystals()
    found = [next(sizes) for _ in range(5)]
    repeats = [(2, 2, 2), (4, 2, 2), (4, 4, 2), (4, 4, 4), (8, 4, 4)]
    assert found == list(zip((64, 128, 256, 512, 1024), repeats, strict=True))
    assert [len(crystal(each)) for each in repeats] == [64, 128, 256, 512, 1024]


def test_forces_of_a_crystal_are_alike_and_not_zero() -> None:
    session = ModelSession(ModelSetting(TINY, "stock", "cpu", "float64"))
    out = session.model.energies_and_forces(session.model.inputs([crystal((4, 2, 2))]))
    copies = out.forces.reshape(-1, 8, 3)
    assert float(copies.abs().max()) > 0.01 and torch.allclose(copies, copies[:1].expand_as(copies), atol=1e-12)
    for wrong in (torch.zeros(16, 3), torch.full((16, 3), torch.nan)):
        with pytest.raises(PeerError, match="wrong values"):
            whole_models._require_alike(wrong)


def test_a_host_without_memory_is_not_the_devices_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ModelSession(ModelSetting(TINY, "stock", "cpu", "float32"))
    session.device = "cuda"

    def failing(error: Exception) -> Any:
        def inputs(self: Any, atoms: Any) -> Any:
            raise error

        return inputs

    for error, expected in (
        (MemoryError("Unable to allocate 9 GiB"), PeerError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), PeerError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (RuntimeError("CUDA error: out of memory"), RuntimeError),
    ):
        monkeypatch.setattr("autotune.models.whole_model.WholeModel.inputs", failing(error))
        with pytest.raises(expected) as raised:
            whole_models._inputs(session, crystal((2, 2, 2)))
        assert ("the host has no memory" in str(raised.value)) is (expected is PeerError)


@pytest.mark.gpu
def test_on_a_gpu_memory_is_measured() -> None:
    session = ModelSession(ModelSetting(TINY, "stock", "cuda", "float32"))
    small, large = (step_on_crystal(session, repeats) for repeats in ((2, 2, 2), (16, 16, 16)))
    assert (small["atoms"], large["atoms"]) == (64, 32768) and 0 < small["peak_mib"] < large["peak_mib"]


def test_equitune_takes_part_with_streamed_weights_too() -> None:
    mace = package_named("mace")
    assert contenders_for(mace)[:4] == (*("equitune", "equitune-captured", "equitune-streamed", "equitune-fused"),)
    captured = {name for name in contenders_of(mace) if name.endswith("-captured")} - {"equitune-captured"}
    left_out = {"symmetrix", "equitune-tf32", *captured}
    assert set(contenders_of(mace)) - set(contenders_for(mace)) == left_out and len(captured) == 5
    with pytest.raises(PeerError, match="nothing of the model was replaced"):
        build("equitune-streamed", open_model(TINY))


def test_the_untuned_default_is_measured_if_it_is_named(
    here: type[Here], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "ask", lambda self, *given: {"error": "not asked"})
    assert set(measure(tmp_path)) == {*here.started} == {*contenders_for(open_model(TINY).package)} - {UNTUNED}
    assert set(measure(tmp_path, UNTUNED)) == {*here.started} and here.started[-1] == UNTUNED


def test_the_table_compares_with_the_largest_other_path() -> None:
    def cell(atoms: int, **more: Any) -> dict[str, Any]:
        ended = {"atoms": 2 * atoms, "why": "out of memory"}
        return {"largest": {"atoms": atoms, "edges": 158 * atoms, "wall_ms": 2.0} | more, "ended": ended}

    row = {
        "model": "m",
        "dtype": "float32",
        "contenders": {
            "equitune": cell(131_072, peak_mib=2048.0),
            "equitune-streamed": cell(262_144),
            "stock": cell(8192),
            "cuequivariance": cell(65_536),
            "openequivariance": {"error": "not installed"},
        },
    }
    heads, ours, streamed, stock, cueq, oeq = table_lines([row])
    place = heads.index("over largest other")
    assert [line[place:].split()[0] for line in (ours, streamed, stock, cueq)] == ["2.00×", "4.00×", "0.12×", "1.00×"]
    assert "131,072" in ours and "2.00 GiB" in ours and ours.endswith("262,144 atoms: out of memory")
    assert "Equitune, edge weights streamed" in streamed and oeq.endswith("not installed")
    alone = table_lines([row | {"contenders": {"equitune": cell(64)}}])[1]
    assert alone[heads.index("over") :].strip() and "×" not in alone
