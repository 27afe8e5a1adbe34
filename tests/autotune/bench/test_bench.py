"""The comparison: rows with all that a report needs, kept over runs, and read together in a summary."""

from __future__ import annotations

import dataclasses
import io
import json
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.bench import kernels as bench
from autotune.bench import kernels as bench_plans
from autotune.bench import rows as bench_rows
from autotune.bench.kernels import Plan, plans_of
from autotune.compare import peers as baselines
from autotune.compare import precompile
from autotune.compare.comparison import (
    HOST_ROWS,
    HOST_ROWS_OF_SLOW,
    LEFT_OUT,
    OUR_MIN_SAMPLES,
    Answer,
    ComparisonResult,
    ComparisonSetting,
    Result,
    _Comparison,
    run_comparison,
)
from autotune.compare.peers import e3nn as e3nn_peer
from autotune.compare.peers.e3nn import OUT_OF_TIME
from autotune.compare.precompile import compile_ahead, kind_of, known_failures
from autotune.errors import ConfigError, WorkerError
from autotune.measure.kinds import measured_kind
from autotune.measure.timing import timing_of
from autotune.workload.config import load_config
from autotune.workload.known_kinds import KINDS, kernel_kind
from autotune.workload.workload import PASSES, Workload
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.compile.compiler import compile_source
from kernelgen.device import device_facts
from kernelgen.kernels.dispatch import emit, make_plan
from kernelgen.ops.product import build

DIRECTIONS_OF = kernel_kind("conv").passes
CONFIG = """
problem = "tiny"
graph = "molecule"
layout = "ir_mul"
directions = ["forward", "backward", "edge_backward", "joint_backward"]
"""


def config(folder: Path, text: str = CONFIG) -> Path:
    path = folder / "own.toml"
    path.write_text(text)
    return path


class Runs:
    """Runs into one folder; how many comparisons each made, and in which passes. All but the first are made up."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.comparisons, self.passes, self.said = folder, 0, (), ""
        self.first: ComparisonResult | None = None
        monkeypatch.setattr(bench, "run_comparison", self._hold)

    def _hold(
        self, setting: ComparisonSetting, passes: tuple[str, ...], *given: Any, **options: Any
    ) -> ComparisonResult:
        self.comparisons, self.passes = self.comparisons + 1, passes
        self.first = self.first or run_comparison(setting, passes, *given, **options)
        return self.first

    def __call__(self, path: Path, **options: Any) -> list[dict[str, Any]]:
        self.comparisons, console = 0, Console(file=io.StringIO(), width=200)
        rows = bench.bench(path, "cpu", self.folder, seconds_each=0.0, console=console, **options)
        self.said = console.file.getvalue()  # type: ignore[attr-defined]
        return rows


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_run_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, path = Runs(tmp_path, monkeypatch), config(tmp_path)
    rows = runs(path, peers=("e3nn",))
    assert runs.comparisons == 1
    assert [row["pass"] for row in rows] == ["forward", "backward", "force_step"]
    check_rows(rows, load_config(path, "cpu").workloads[0])
    assert (
        "speed-up over the fastest peer, geometric mean (worst row)" in runs.said
        and "conv float32 force_step" in runs.said
    )

    assert runs(path, peers=("e3nn",)) == json.loads(json.dumps(rows)) and runs.comparisons == 0
    assert "already measured: 3 rows (--fresh measures them again); left: 0 of 1 workload\n" in runs.said
    assert runs(path, peers=()) and runs.comparisons == 0, "what was measured with more peers serves too"

    aside = bench_rows.bench_path(tmp_path, device_facts("cpu"))
    stored = json.loads(aside.read_text())
    stored["rows"] = [row for row in stored["rows"] if row["pass"] != "backward"]
    aside.write_text(json.dumps(stored))
    assert [row["pass"] for row in runs(path, peers=())] == ["forward", "backward", "force_step"]
    assert runs.comparisons == 1 and runs.passes == ("backward",), "only the missing pass was measured"

    monkeypatch.setattr(bench, "GENERATOR_VERSION", "another")
    assert runs(path, peers=()) and runs.comparisons == 0, "another generator that makes the same kernels"
    written = bench_plans.source_text
    monkeypatch.setattr(bench_plans, "source_text", lambda *kernel: written(*kernel)[::-1])
    assert runs(path, peers=()) and runs.comparisons == 1, "rows of other kernels do not count"
    assert runs(path, peers=(), fresh=True) and runs.comparisons == 1


def check_rows(rows: list[dict[str, Any]], workload: Workload) -> None:
    """Everything that a row is to hold, on a CPU."""
    for row in rows:
        directions = DIRECTIONS_OF[row["pass"]]
        assert set(row["times"]) == {"equitune", "equitune-default", "e3nn"}
        assert not any("error" in times for times in row["times"].values()), row["times"]
        assert all(len(row["times"][name]["samples_us"]) >= OUR_MIN_SAMPLES for name in row["schedules"])
        assert row["deterministic"] is False and row["memory"] == row["host_us"] == {}
        assert row["origins"] == dict.fromkeys(directions, "default")
        for name in ("equitune", "equitune-default"):
            assert set(row["schedules"][name]) == set(row["resources"][name]) == set(directions)
        size = (row["graph"]["edges"], row["graph"]["nodes"])
        assert row["bytes"] == sum(workload.compulsory_bytes(direction, *size) for direction in directions)
        assert row["copy_us"] > 0
        assert set(row["order_ms"]) == set(row["times"])
        assert row["order_ms"]["e3nn"] == 0 < min(row["order_ms"][name] for name in row["schedules"]) < 1e3
        for errors in row["errors"].values():
            assert {name: "".join(slots) for name, slots in errors.items()} == {
                name: DIRECTIONS[name].outputs for name in (directions if row["pass"] != "backward" else ["backward"])
            }
            assert all(error < 1e-5 for slots in errors.values() for error in slots.values())
    floors = {row["pass"]: row["bytes"] for row in rows}
    assert floors["force_step"] > floors["backward"] > floors["forward"]


def test_a_missing_structure_fails_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EQUITUNE_STRUCTURES", raising=False)
    runs = Runs(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"structure file 'water_5184.xyz' .*set EQUITUNE_STRUCTURES"):
        runs(config(tmp_path, 'problem = "tiny"\ngraph = ["molecule", "water"]\n'), peers=())
    assert runs.comparisons == 0


def test_a_workload_that_cannot_be_compared_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(tmp_path, monkeypatch)

    def broken(*_: Any, **__: Any) -> Any:
        raise WorkerError("out of memory")

    monkeypatch.setattr(bench, "run_comparison", broken)
    assert runs(config(tmp_path), peers=()) == []
    assert "not compared, out of memory" in runs.said


def test_unknown_peer_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown peer 'e3n'; did you mean 'e3nn'"):
        bench.bench(config(tmp_path), "cpu", tmp_path, peers=("e3n",))


def test_passes_are_a_models_unless_the_config_says(tmp_path: Path) -> None:
    facts = device_facts("cpu")

    def passes(text: str) -> tuple[str, ...]:
        loaded = load_config(config(tmp_path, text), "cpu")
        return plans_of(loaded, facts, tmp_path)[0].passes

    base = 'problem = "tiny"\ngraph = "molecule"\n'
    assert passes(base) == ("forward", "backward", "force_step")
    assert passes(base + 'directions = ["forward"]\n') == ("forward",)
    assert passes(base + 'directions = ["edge_backward"]\n') == ("edge_backward",)
    assert passes(base + 'passes = ["double_backward", "forward+backward"]\n') == (
        "double_backward",
        "forward+backward",
    )


def test_every_pass_names_its_directions() -> None:
    assert set(DIRECTIONS) < set(PASSES)
    assert DIRECTIONS_OF["force_step"] == ("forward", "edge_backward", "joint_backward")
    for kind in KINDS:
        assert set(kind.passes) <= set(PASSES) and set(kind.directions) < set(kind.passes)
        assert all(set(directions) <= set(kind.directions) for directions in kind.passes.values())


def test_a_deterministic_row_names_the_kernel_that_owns_senders(tmp_path: Path) -> None:
    loaded = load_config(config(tmp_path, 'problem = "tiny"\ngraph = "molecule"\ndeterministic = true\n'), "cpu")
    plan = Plan(loaded.workloads[0], ("force_step",), {}, dict.fromkeys(DIRECTIONS, "default"))
    assert plan.kernels_in("backward") == ("source_backward", "backward")
    assert plan.kernels_in("force_step") == ("forward", "edge_backward", "source_backward", "joint_backward")
    normal = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, deterministic=False))
    assert normal.kernels_in("force_step") == DIRECTIONS_OF["force_step"]


@pytest.mark.timeout(600)
def test_kernels_compiled_ahead_are_found(users_flags: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes compile; this one then needs no compiler, deterministic kernels and their parts included."""
    monkeypatch.setenv("EQUITUNE_CACHE", str(tmp_path))
    workload = load_config(config(tmp_path), "cpu").workloads[0]
    specs = []
    for deterministic in (False, True):
        operator = build(workload.problem, operation="conv", device="cpu", deterministic=deterministic)
        specs.append(measured_kind("conv").specs(operator, ["forward", "backward"]))
    assert [[spec.direction.name for spec in group] for group in specs] == [
        ["forward", "backward"],
        ["forward", "source_backward", "backward"],
    ]
    said: list[str] = []
    compile_ahead([*specs[0], *specs[1], *specs[0]], "cpu", said.append)
    assert len(said) == 1 and said[0].startswith(f"compiling {len(set(specs[0] + specs[1]))} kernels in ")

    def refused(*_: Any) -> Any:
        raise AssertionError("compiled again")

    monkeypatch.setattr("kernelgen.compile.host.build", refused)
    for spec in specs[0] + specs[1]:
        assert compile_source(emit(make_plan(spec)), spec.facts)


def test_a_product_that_does_not_compile_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(task: Any) -> Any:
        raise RuntimeError("no such thing")

    adapters = [
        dataclasses.replace(adapter, build=broken) if adapter.name == precompile.COMPILED_PEER else adapter
        for adapter in baselines.ADAPTERS
    ]
    monkeypatch.setattr(baselines, "ADAPTERS", adapters)
    workload = load_config(config(tmp_path), "cpu").workloads[0]
    monkeypatch.setattr(e3nn_peer, "keep_compiled", lambda: tmp_path)
    assert precompile.compile_peers(precompile.Product(workload), "cpu") == "RuntimeError: no such thing"
    assert list(tmp_path.glob("**/*.json")) == [], "another run may fare better"
    assert precompile.build_peers(workload, "cpu", ("e3nn",)) == {}


def test_a_product_that_ran_out_of_time_is_not_compiled_again(tmp_path: Path) -> None:
    workloads = load_config(config(tmp_path), "cpu").workloads
    kinds = [kind_of(workload) for workload in workloads]
    names = ("problem", "operation", "dtype", "layout")

    def stored(reason: str) -> dict[str, Any]:
        kind = dict(zip(names, (kinds[0][0].key, *kinds[0][1:]), strict=True))
        software = {"torch": "2.9", "e3nn": "0.5", "optuna": "4"}
        return kind | {"times": {"e3nn-compiled": {"error": reason}}, "software": software}

    reason, here = f"PeerError: {OUT_OF_TIME}", {"torch": "2.9", "e3nn": "0.5", "mace-torch": "0.3"}
    assert known_failures([stored(reason)], workloads, here) == {kinds[0]: reason}, "of any other software"
    assert known_failures([stored(reason)], workloads, here | {"torch": "2.10"}) == {}
    assert known_failures([stored("RuntimeError: no double backward")], workloads, here) == {}, "of one pass only"


def test_host_times_are_the_least_of_rows_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = _Comparison(None, "cuda", ("forward",), {}, 1.0, print)  # type: ignore[arg-type]
    asked: list[str] = []

    def ask(name: str, which: str, limit_s: float, method: Any, *given: Any) -> Answer:
        asked.append(name)
        return (
            Answer(error="lost")
            if name == "gone"
            else Answer(host_us={"quick": 30.0, "slow": 5000.0, "behind": 120.0}[name] + len(asked))
        )

    monkeypatch.setattr(comparison, "_ask", ask)
    warm = {
        "quick": Answer(host_us=90.0),
        "slow": Answer(host_us=5200.0),
        "behind": Answer(host_us=300.0),
        "gone": Answer(host_us=40.0),
        "large": Answer(),
    }
    found = comparison._host_times("forward", warm)
    assert found == {"quick": 31.0, "slow": 5002.0, "behind": 123.0, "gone": 40.0}
    assert asked[:8] == ["quick", "slow", "behind", "gone"] * 2
    counts = [asked.count(name) for name in ("quick", "slow", "behind")]
    assert counts == [HOST_ROWS, HOST_ROWS_OF_SLOW, HOST_ROWS_OF_SLOW]


class MadeUp:
    """Comparisons that take 40 s of a clock of their own; e3nn has the ``cell`` that is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cell: Result) -> None:
        self.now, self.cell, self.compared, self.deadlines = 1000.0, cell, list[str](), list[float | None]()
        monkeypatch.setattr(bench, "run_comparison", self._hold)
        monkeypatch.setattr(bench, "time", types.SimpleNamespace(monotonic=lambda: self.now))

    def _hold(self, setting: ComparisonSetting, passes: tuple[str, ...], *_: Any, **options: Any) -> ComparisonResult:
        self.now += 40.0
        self.compared.append(setting.workload.graph.name)
        self.deadlines.append(options["deadline"])
        cells = {name: Result(timing_of([1.0] * 10)) for name in ("equitune", "equitune-default")} | {"e3nn": self.cell}
        return ComparisonResult({name: dict.fromkeys(passes, cell) for name, cell in cells.items()}, copy_bandwidth=1e9)

    def __call__(self, path: Path, **options: Any) -> str:
        """What a run says."""
        self.compared.clear()
        console = Console(file=io.StringIO(), width=200)
        bench.bench(path, "cpu", path.parent, peers=("e3nn",), console=console, **options)
        return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_row_is_measured_again_once_its_peers_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = MadeUp(monkeypatch, Result(error="e3nn: forward disagrees")), config(tmp_path)
    run(path)
    assert "already measured: 3 rows (--fresh measures them again); left: 0 of 1 workload\n" in run(path)
    assert run.compared == [], "it would fail again"
    monkeypatch.setattr("autotune.compare.peers.peer._hash_of_file", lambda path: "another")
    assert "failed in 3 rows, e3nn: forward disagrees" in run(path) and run.compared == ["molecule"]
    run(path)
    assert run.compared == []
    run.cell = Result(error=LEFT_OUT.format("the time for comparisons was over"))
    run(path, fresh=True)
    run(path)
    assert run.compared == ["molecule"], "there was no time for it"


def test_a_budget_leaves_workloads_to_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MadeUp(monkeypatch, Result(timing_of([2.0] * 10)))
    path = config(tmp_path, 'problem = "tiny"\ngraph = ["molecule", "carbon-small", "carbon"]\n')
    said = run(path, budget=110.0, begin=990.0)
    assert len(run.compared) == 2 and set(run.deadlines) == {1100.0}
    assert "[1/3, 10 s, 100 s left] tiny on " in said and "2 workloads compared; 90 s since the start" in said
    assert "the time is up; 1 of 3 workloads left out: run the same again" in said
    first = list(run.compared)
    assert "the time is up" not in run(path, budget=110.0)
    assert len(run.compared) == 1 and not set(run.compared) & set(first)
