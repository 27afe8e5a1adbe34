"""The comparison: rows with all that a report needs, kept over runs, and read together in a summary."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from database_samples import HOST
from places import ROOT
from rich.console import Console

from autotune.bench import plans as bench_plans
from autotune.bench import rows as bench_rows
from autotune.bench import run as bench
from autotune.bench.plans import Plan, plans_of
from autotune.bench.rows import identity_of, less_accurate, store_rows, stored_rows
from autotune.bench.text import fastest_peer, geometric_mean, markdown_text, ratio, seconds_text, summary_lines
from autotune.compare import peers as baselines
from autotune.compare import precompile, torch_cache
from autotune.compare.ahead import compile_ahead
from autotune.compare.comparison import (
    HOST_ROWS,
    HOST_ROWS_OF_SLOW,
    ComparisonResult,
    _Comparison,
    run_comparison,
)
from autotune.compare.comparison_worker import Answer, ComparisonSetting
from autotune.compare.peers.e3nn import OUT_OF_TIME
from autotune.compare.precompile import kind_of, known_failures
from autotune.compare.sampling import OUR_MIN_SAMPLES
from autotune.errors import ConfigError, WorkerError
from autotune.measure.runs.registry import runs_of
from autotune.report.data.suite_rows import SuiteRow
from autotune.workload.config import load_config
from autotune.workload.config_tables import load_problems
from autotune.workload.kinds.registry import KINDS, kernel_kind
from autotune.workload.passes import PASSES
from autotune.workload.workload import Workload
from kernelgen.compile.compiler import compile_source
from kernelgen.device import device_facts
from kernelgen.emit.kernel_source import emit
from kernelgen.ops.operator import build
from kernelgen.plan.planner import make_plan
from kernelgen.problem.radial_convolution import RadialProblem
from kernelgen.terms.directions import DIRECTIONS

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
    assert "3 rows are already measured; 0 of 1 workloads remain" in runs.said
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
def test_kernels_compiled_ahead_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes compile; this one then needs no compiler, deterministic kernels and their parts included."""
    monkeypatch.setenv("EQUITUNE_CACHE", str(tmp_path))
    workload = load_config(config(tmp_path), "cpu").workloads[0]
    specs = []
    for deterministic in (False, True):
        operator = build(workload.problem, operation="conv", device="cpu", deterministic=deterministic)
        specs.append(runs_of("conv").specs(operator, ["forward", "backward"]))
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
    monkeypatch.setattr(torch_cache, "keep_compiled", lambda: tmp_path)
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


def row(which: str = "forward", ours: float = 100.0, peer: float | None = 200.0, **changes: Any) -> dict[str, Any]:
    times = {"equitune": {"time_us": ours}, "equitune-default": {"time_us": 1.5 * ours}}
    times |= {"slow": {"time_us": 900.0}, "fast": {"error": "broken"} if peer is None else {"time_us": peer}}
    data = {"label": "tiny", "problem": "key", "operation": "conv", "dtype": "float32", "layout": "ir_mul"}
    data |= {"graph_class": "conv-e17-d7", "graph": {"name": "carbon", "edges": 1, "nodes": 1}, "pass": which}
    return data | {"times": times, "floor_us": 50.0, "memory": {}} | changes


def test_summary_says_where_we_stand() -> None:
    rows = [
        row(ours=100.0, peer=400.0),
        row(ours=100.0, peer=102.0, memory={"equitune": 3 << 20, "fast": 1 << 20, "slow": 9 << 20}),
        row("backward", ours=100.0, peer=99.0, memory={"equitune": 1 << 20, "fast": 2 << 20}),
        row("backward", ours=100.0, peer=None, deterministic=True),
    ]
    text = "\n".join(summary_lines(rows))
    assert f"conv float32 forward: {(4.0 * 1.02) ** 0.5:.2f} (1.02), 2 rows" in text
    assert "conv float32 backward: 0.99 (0.99), 1 rows" in text
    assert "conv float32 deterministic backward: 9.00" in text, "the slow peer is the fastest with a number"
    assert "speed-up below 1.00: 1; below 1.05: 2 of 4" in text
    assert "  0.990 tiny on carbon, conv float32, backward (fast)" in text
    assert "on carbon and water (float32), forward: 2.00" in text
    assert "more memory than their fastest peer: 1 of 2" in text and "3.0 MiB, fast 1.0 MiB" in text
    assert "default / tuned: 1.50" in text and "default is faster" not in text


def test_a_peer_of_less_accuracy_is_timed_but_not_compared() -> None:
    """TF32 where float32's accuracy is asked; where TF32 is, it is the fastest peer."""
    product = load_problems()["tiny"]
    asked = {
        accuracy: row(
            problem=RadialProblem(product, 8, accuracy).key,
            operation="radial",
            errors={"fast": {"forward": {"g": {"error": 3e-4, "block": "1o"}}}, "slow": {"forward": {"g": 4e-7}}},
        )
        for accuracy in ("ieee", "tf32")
    }
    assert (fastest_peer(asked["ieee"]), fastest_peer(asked["tf32"])) == ("slow", "fast")
    assert (SuiteRow(asked["ieee"]).ratio, SuiteRow(asked["tf32"]).ratio) == (9.0, 2.0)
    told = "less accurate than the row asks, so not compared: fast in 1 rows"
    assert told in "\n".join(summary_lines([*asked.values()]))
    assert told not in "\n".join(summary_lines([asked["tf32"]]))
    assert less_accurate(asked["ieee"] | {"problem": "unknown|key"}) == frozenset()


def test_a_new_graph_in_every_call_is_a_line_where_it_was_measured() -> None:
    orders = {"equitune": 0.05, "slow": 0.0, "fast": 0.0}
    rows = [row(peer=300.0, order_ms=orders), row(peer=300.0, order_ms=orders | {"fast": 0.9}), row()]
    text = "\n".join(summary_lines(rows))
    # 300 / (100 + 50), and 900 / 150: there the slow one is the fastest that has ordered the graph.
    wanted = (
        f"with ordering of a new graph in every call: {(2.0 * 6.0) ** 0.5:.2f} (2.00), 2 rows; the ordering takes 0.50"
    )
    assert wanted in text
    assert "ordering" not in "\n".join(summary_lines([row()])), "older records"


def test_the_parts_of_a_comparison_are_told_the_longest_first() -> None:
    text = seconds_text({"set up": 1.25, "sample forward": 3.0, "copy": 0.01})
    assert text == "4.3 s: sample forward 3.0, set up 1.2"


def test_markdown_has_a_line_a_row_and_the_summary() -> None:
    rows = [row(), row("backward", peer=None, deterministic=True)]
    lines = markdown_text(rows).replace("\N{NO-BREAK SPACE}", " ").splitlines()
    assert lines[2] == "| problem | graph | kernel | pass | equitune | equitune-default | slow | fast |"
    assert lines[3] == "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |"
    assert lines[4].startswith("| tiny | carbon | conv float32 | forward | 100 \N{MICRO SIGN}s | ")
    assert lines[5].startswith("| tiny | carbon | conv float32 deterministic | backward |")
    assert lines[5].endswith("| error |")
    assert lines[7] == "```text" and lines[-1] == "```" and any("geometric mean" in line for line in lines[8:])


def test_summary_names_rows_whose_default_is_faster_beyond_noise() -> None:
    def faster(*samples: float) -> dict[str, Any]:
        times = {
            "equitune": {"time_us": 100.0, "samples_us": [99.0, 100.0, 101.0] * 4},
            "equitune-default": {"time_us": 90.0, "samples_us": samples * 4},
        }
        return row(times=times | {"fast": {"time_us": 200.0}})

    text = "\n".join(summary_lines([row(), faster(89.0, 90.0, 91.0), faster(70.0, 90.0, 110.0)]))
    assert (
        "rows where the default is faster (tune them again): 1 of 3\n  0.900 tiny on carbon, conv float32, forward"
        in text
    )


def test_summary_of_rows_without_numbers() -> None:
    broken = row(peer=None)
    broken["times"] = {"equitune": {"error": "x"}, "equitune-default": {"error": "x"}, "fast": {"error": "y"}}
    assert ratio(broken) is None
    text = "\n".join(summary_lines([broken]))
    assert "no time of the tuned kernel: tiny on carbon" in text and "no time of any peer: tiny on carbon" in text
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_rows_replace_those_of_their_identity_only(tmp_path: Path) -> None:
    old = row()
    store_rows(tmp_path, HOST, [old, row("backward")])
    assert identity_of(old) == identity_of(old | {"deterministic": False}), "rows older than the mode"
    store_rows(tmp_path, HOST, [row(ours=50.0, deterministic=False), row(ours=70.0, deterministic=True)])
    found = stored_rows(tmp_path, HOST)
    assert [(r["pass"], r.get("deterministic", False), r["times"]["equitune"]["time_us"]) for r in found] == [
        ("backward", False, 100.0),
        ("forward", False, 50.0),
        ("forward", True, 70.0),
    ]
    path = bench_rows.bench_path(tmp_path, HOST)
    path.write_text('{"rows": [{"problem": 3}]}')
    assert stored_rows(tmp_path, HOST) == []
    store_rows(tmp_path, HOST, [old])
    assert len(stored_rows(tmp_path, HOST)) == 1
    (aside,) = path.parent.glob("*.corrupt-*.json")
    assert aside.read_text() == '{"rows": [{"problem": 3}]}'


def test_a_peer_that_fails_on_this_machine_costs_no_stored_row(tmp_path: Path) -> None:
    console, same = Console(file=io.StringIO(), width=300), {"sources": {"forward": "a"}, "software": {"torch": "2.11"}}
    run = bench._Run("cpu", HOST, tmp_path, ("fast",), 0.0, console)
    before = row(schedules={"equitune": {"forward": {"lanes": 4}}}, date="2026-11-01T00:00:00+00:00", **same)
    store_rows(tmp_path, HOST, [before])
    newer = row(ours=90.0, peer=None, schedules=before["schedules"], date="2026-11-02T00:00:00+00:00", **same)
    new = row("backward", peer=None, **same)
    assert run._kept([newer, new]) == [before | {"tried": newer["date"]}, new]
    told = "tiny on carbon, conv float32, forward: fast failed and has a time in the stored row, which stays: broken"
    assert told in console.file.getvalue()  # type: ignore[attr-defined]
    for changed in ({"sources": {"forward": "b"}}, {"software": {"torch": "2.13"}}, {"schedules": {}}):
        assert run._kept([newer | changed]) == [newer | changed], "the kernel or the peer may be another one"
    assert run._kept([row(ours=90.0, **same)]) == [row(ours=90.0, **same)], "nothing failed"


def test_a_record_has_a_line_a_row_and_no_digits_that_mean_nothing(tmp_path: Path) -> None:
    times = {"equitune": {"time_us": 100.123, "samples_us": [100.123, 9876.543]}}
    noisy = row(times=times, floor_us=34.87842130088806, errors={"equitune": {"forward": {"g": 1.23456789e-07}}})
    noisy["certificates"] = {"equitune": {"forward": {"bitwise": True, "equivariance": 2.3456789e-07, "edges": 12288}}}
    noisy["order_ms"] = {"equitune": 0.061234567}
    store_rows(tmp_path, HOST, [noisy, row("backward")])
    path = bench_rows.bench_path(tmp_path, HOST)
    head, *lines, last = path.read_text().splitlines()
    assert head.endswith('"rows":[') and len(lines) == 2 and last == "]}" and ": " not in lines[0]
    (_, found) = stored_rows(tmp_path, HOST)
    assert found["times"] == times and found["floor_us"] == noisy["floor_us"], "times keep all their digits"
    assert found["errors"]["equitune"]["forward"] == {"g": 1.235e-07}
    certificate = {"bitwise": True, "equivariance": 2.346e-07, "edges": 12288}
    assert found["certificates"]["equitune"]["forward"] == certificate and found["order_ms"] == {"equitune": 0.06123}

    path.write_text(json.dumps({"schema": 1, "device": {}, "rows": [noisy]}, indent=1))
    assert stored_rows(tmp_path, HOST) == [noisy], "records with spaces and all digits are read as before"


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "bench").glob("*.json")), ids=str)
def test_published_rows_are_understood(path: Path) -> None:
    facts = dataclasses.replace(HOST, name=path.stem.replace("-", " "))
    assert facts.slug == path.stem
    rows = stored_rows(path.parent.parent, facts)
    assert rows and len({identity_of(row) for row in rows}) == len(rows)


def test_host_times_are_the_least_of_rows_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = _Comparison(None, "cuda", ("forward",), {}, 1.0, print)  # type: ignore[arg-type]
    asked: list[str] = []

    def call(name: str, which: str, job: Any, limit_s: float) -> Answer:
        asked.append(name)
        return (
            Answer(error="lost")
            if name == "gone"
            else Answer(host_us={"quick": 30.0, "slow": 5000.0, "behind": 120.0}[name] + len(asked))
        )

    monkeypatch.setattr(comparison, "_call", call)
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
