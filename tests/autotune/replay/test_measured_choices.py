"""Choices that are estimates are measured: which, in which order, for how long, and how it counts."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from autotune.cli.commands import main
from autotune.compare.comparison import ComparisonResult, ComparisonSetting, Result
from autotune.database.predicted import plan_of
from autotune.database.store import load_table
from autotune.errors import WorkerError
from autotune.measure.timing import timing_of
from autotune.measure.worker import Worker
from autotune.replay import measured as measure
from autotune.replay.fit import Compared, comparisons_path, facts_of, name_of, read_comparisons, spec_of
from autotune.replay.measured import Group, groups_of, read_choices
from autotune.replay.untuned import digests, record_path
from kernelgen.device import DeviceFacts, assumed, cuda_facts
from kernelgen.kernels.product.schedule import HostSchedule

RESULTS, SLUG = ROOT / "results", "nvidia-h200"
ARCHIVE = RESULTS / "trials" / f"{SLUG}.jsonl.gz"
# Studies of two problems on one molecule with estimates of their costs, and one whose structure is not shipped.
ASPIRIN, SPIKE = "conv-e8-d4", "conv-e17-d3"
ESTIMATES = {
    ("nequip-water", "forward", ASPIRIN): 1.1,
    ("nequip-water", "backward", ASPIRIN): 1.3,
    ("mace-mp-medium", "forward", ASPIRIN): 1.4,
    ("mace-mp-medium", "edge_backward", ASPIRIN): 1.0,
    ("nequip-benzene", "joint_backward", SPIKE): 1.5,
}
MEASURED = ("nequip-water", "edge_backward", ASPIRIN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results with a record of six choices, five of them estimates, and their entries."""
    data = json.loads((RESULTS / f"{SLUG}.json").read_text())
    record = json.loads((RESULTS / "replay" / f"defaults-{SLUG}.json").read_text())
    wanted = {name: [cost, False] for name, cost in ESTIMATES.items()} | {MEASURED: [1.2, True]}
    rows = [row for row in record["rows"] if (row[0], row[2], row[5]) in wanted and row[3:5] == ["float32", "ir_mul"]]
    rows = [[*row[:7], *wanted[row[0], row[2], row[5]], row[9]] for row in rows]
    assert len(rows) == len(wanted)
    names = [row[:6] for row in rows]
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / ARCHIVE.name).write_bytes(gzip.compress(b""))
    (tmp_path / "replay").mkdir()
    archive, drawn = digests(tmp_path / "trials" / ARCHIVE.name, tmp_path)
    record = {"archive": archive, "drawn": drawn, "rows": rows}
    (tmp_path / "replay" / f"defaults-{SLUG}.json").write_text(json.dumps(record))
    kept = [
        entry
        for entry in data["entries"]
        if [entry[key] for key in ("label", "operation", "direction", "dtype", "layout", "graph_class")] in names
    ]
    (tmp_path / f"{SLUG}.json").write_text(json.dumps(data | {"entries": kept}))
    return tmp_path


@pytest.fixture
def h200() -> Iterator[DeviceFacts]:
    facts = facts_of(load_table(RESULTS / f"{SLUG}.json").device)
    with assumed(facts):
        yield facts


class Device:
    """In the place of a GPU: notes what it compiles and compares; chosen schedules take twice the tuned time."""

    def __init__(self) -> None:
        self.compiled: list[list[Any]] = []
        self.compared: list[tuple[str, tuple[str, ...], dict[str, Any]]] = []
        self.now = 0.0
        self.failing: dict[str, Exception | str] = {}
        self.before: Callable[[], None] = lambda: None

    def compile_ahead(self, specs: list[Any], device: str, say: Any) -> None:
        assert device == "cuda"
        self.compiled.append(specs)

    def run_comparison(self, setting: ComparisonSetting, passes: tuple[str, ...], ours: Any, **_: Any) -> Any:
        assert (setting.device, setting.peers) == ("cuda", ())
        self.before()
        self.now += 40.0
        label = setting.workload.label
        self.compared.append((label, passes, ours))
        failure = self.failing.get(label, "")
        if isinstance(failure, BaseException):
            raise failure
        times = {"tuned": 10.0, "chosen": 20.0, "rules": 30.0}
        found = {name: {which: Result(timing_of([time])) for which in passes} for name, time in times.items()}
        if failure:
            found["chosen"][passes[0]] = Result(error=failure)
        return ComparisonResult(found)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, h200: DeviceFacts) -> Device:
    made = Device()
    monkeypatch.setattr(measure, "compile_ahead", made.compile_ahead)
    monkeypatch.setattr(measure, "run_comparison", made.run_comparison)
    monkeypatch.setattr(measure, "monotonic", lambda: made.now)
    monkeypatch.setattr(Worker, "launch", lambda worker: None)
    return made


def measured(folder: Path, *options: str) -> int:
    """The command's exit code."""
    archive = str(folder / "trials" / ARCHIVE.name)
    with pytest.raises(SystemExit) as left:
        main(["replay", "defaults", archive, "--results", str(folder), *(options or ("--measure", "10m"))])
    assert isinstance(left.value.code, int)
    return left.value.code


def on_gpu(folder: Path, limit: str = "10m") -> int:
    return measured(folder, "--measure", limit, "--device", "cuda")


def stored(folder: Path) -> dict[tuple[str, ...], Compared]:
    found = read_comparisons(comparisons_path(folder, SLUG)).values()
    return {(one.study[0], one.study[2], one.study[5]): one for one in found}


def test_estimates_are_measured_the_most_expensive_first(
    folder: Path, device: Device, h200: DeviceFacts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_gpu(folder) == 0
    text = capsys.readouterr().out
    assert [label for label, _, _ in device.compared] == ["mace-mp-medium", "nequip-water"]
    assert [set(passes) for _, passes, _ in device.compared] == [{"forward", "edge_backward"}, {"forward", "backward"}]
    assert "nequip-benzene: estimates skipped: 1, structure file 'spike_6vxx_22812.xyz'" in text
    choices = {name_of(one.entry): one for one in read_choices(folder / "trials" / ARCHIVE.name, folder)}
    for label, passes, ours in device.compared:
        for direction in passes:
            one = choices[label, "conv", direction, "float32", "ir_mul", ASPIRIN]
            spec = spec_of(one.entry, h200)
            assert ours["tuned"][direction] == one.entry.tuned_schedule
            assert ours["chosen"][direction] == one.schedule
            by_rules = plan_of(spec, ours["rules"][direction])  # type: ignore[arg-type]
            assert by_rules and by_rules.spec.schedule not in (one.schedule, one.entry.tuned_schedule)
    (specs,) = device.compiled
    assert len(specs) == 4 * 3 and {spec.facts for spec in specs} == {h200}
    assert set(stored(folder)) == {name for name in ESTIMATES if name[2] == ASPIRIN}
    assert {one.ratio for one in stored(folder).values()} == {2.0}
    assert "tuned 10.0 us, chosen 20.0 us, rules 30.0 us; 2.000, estimated 1.400" in text
    assert "5 of 6 choices are measured, 4 of them beside the tuned schedule: mean 1.840, worst 2.00" in text
    assert "with 1 estimates mean 1.783, worst 2.00" in text
    assert on_gpu(folder) == 0 and len(device.compared) == 2, "what is measured is not measured again"


def test_no_comparison_begins_after_the_limit(folder: Path, device: Device) -> None:
    assert on_gpu(folder, "40s") == 0
    assert {label for label, _, _ in stored(folder)} == {"mace-mp-medium"}
    assert on_gpu(folder, "40s") == 0
    assert {label for label, _, _ in stored(folder)} == {"mace-mp-medium", "nequip-water"}
    assert len(device.compiled) == 2, "nothing is left, so nothing is compiled"


def test_kernels_are_compiled_for_some_groups_at_a_time(
    folder: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "TOGETHER", 2)
    seen: list[int] = []
    device.before = lambda: seen.append(len(device.compiled))
    assert on_gpu(folder) == 0
    assert seen == [1, 2] and [len(specs) for specs in device.compiled] == [6, 6]


def test_an_interrupted_run_loses_nothing(folder: Path, device: Device) -> None:
    device.failing["nequip-water"] = KeyboardInterrupt()  # type: ignore[assignment]
    assert on_gpu(folder) == 130
    assert {label for label, _, _ in stored(folder)} == {"mace-mp-medium"}


@pytest.mark.parametrize("failure", [WorkerError("no memory left"), "ValueError: wrong: x 0.3"], ids=["group", "one"])
def test_a_failure_is_told_and_the_next_is_measured(
    folder: Path, device: Device, failure: Exception | str, capsys: pytest.CaptureFixture[str]
) -> None:
    device.failing["mace-mp-medium"] = failure
    assert on_gpu(folder) == 1
    text = capsys.readouterr().out
    lost = 2 if isinstance(failure, Exception) else 1
    assert str(failure) in text and f"{lost} comparisons failed" in text
    assert len(stored(folder)) == 4 - lost and ("nequip-water", "backward", ASPIRIN) in stored(folder)


def test_a_comparison_counts_for_the_same_choice_and_tuned_schedule_only(folder: Path, device: Device) -> None:
    archive = folder / "trials" / ARCHIVE.name
    assert on_gpu(folder) == 0
    before = read_choices(archive, folder)
    assert sorted(one.cost.ratio for one in before) == [1.2, 1.5, 2.0, 2.0, 2.0, 2.0]
    assert sum(one.cost.measured for one in before) == 5 and sum(one.cost.compared for one in before) == 4

    chosen, tuned = ("nequip-water", "forward", ASPIRIN), ("mace-mp-medium", "forward", ASPIRIN)
    record = json.loads(record_path(folder, SLUG).read_text())
    (row,) = (row for row in record["rows"] if (row[0], row[2], row[5]) == chosen)
    row[9] = row[9] | {"path_groups": row[9].get("path_groups", 1) + 1}
    record_path(folder, SLUG).write_text(json.dumps(record))
    data = json.loads((folder / f"{SLUG}.json").read_text())
    (entry,) = (e for e in data["entries"] if (e["label"], e["direction"], e["graph_class"]) == tuned)
    entry["schedule"]["path_groups"] += 1
    (folder / f"{SLUG}.json").write_text(json.dumps(data))
    after = {
        (one.entry.label, one.entry.direction, one.entry.graph_class): one.cost for one in read_choices(archive, folder)
    }
    assert {name for name, cost in after.items() if not cost.measured} == {
        chosen,
        tuned,
        ("nequip-benzene", "joint_backward", SPIKE),
    }
    assert after[chosen].ratio == ESTIMATES[chosen] and after[tuned].ratio == ESTIMATES[tuned]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--measure", "60"), "--measure: '60' has no unit"),
        (("--measure", "60s", "--device", "cpu"), "which is no GPU; expected the GPU of the archive, nvidia-h200"),
        (("--device", "cpu"), "expected it beside --measure"),
    ],
)
def test_a_wrong_option_is_one_line(
    folder: Path, options: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(folder, *options) == 2
    assert expected in capsys.readouterr().err


def test_measuring_is_for_the_replay_of_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["replay", "records", "a.jsonl.gz", "--measure", "60s"])
    assert left.value.code == 2 and "No such option: --measure" in capsys.readouterr().err


def test_another_gpu_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with assumed(cuda_facts("sm_80", "NVIDIA A100", 108)):
        assert on_gpu(folder) == 2
    assert "(NVIDIA A100); expected the GPU of the archive, nvidia-h200" in capsys.readouterr().err


def test_a_record_that_does_not_fit_says_what_to_run(
    folder: Path, h200: DeviceFacts, capsys: pytest.CaptureFixture[str]
) -> None:
    path, archive = record_path(folder, SLUG), folder / "trials" / ARCHIVE.name
    record = json.loads(path.read_text())

    def refused(**changed: Any) -> str:
        path.write_text(json.dumps(record | changed))
        assert on_gpu(folder) == 2
        said = capsys.readouterr().err
        assert f"run first: equitune replay defaults {archive}" in said
        return said

    assert "it is of the trials ('0123', '')" in refused(archive="0123")
    assert "'4567')" in refused(drawn="4567")
    refused(rows=[row[:9] for row in record["rows"]])
    refused(rows=[["gone", *row[1:]] for row in record["rows"]])
    path.unlink()
    assert on_gpu(folder) == 2 and "does not exist; run first" in capsys.readouterr().err


def test_a_graph_of_another_class_is_skipped(folder: Path, h200: DeviceFacts) -> None:
    data = json.loads((folder / f"{SLUG}.json").read_text())
    choices = read_choices(folder / "trials" / ARCHIVE.name, folder)
    moved = [
        dataclasses.replace(one, entry=dataclasses.replace(one.entry, graph_class="conv-e9-d4")) for one in choices
    ]
    said: list[str] = []
    assert groups_of(moved, said.append) == [] and len(data["entries"]) >= len(moved)
    assert any("graph 'aspirin' has class conv-e8-d4 here" in text for text in said)


@pytest.mark.slow
def test_the_real_comparison_gives_times_of_every_direction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with its schedules in the place of the GPU's."""
    choices = read_choices(folder / "trials" / ARCHIVE.name, folder)
    group = groups_of([one for one in choices if one.entry.label == "nequip-water"], print)[0]
    blocks = {"tuned": HostSchedule(), "chosen": HostSchedule(channel_block=8), "rules": HostSchedule(channel_block=16)}
    ours = {name: {one.entry.direction: each for one in group.choices} for name, each in blocks.items()}
    monkeypatch.setattr(Group, "contenders", lambda self, facts: ours)
    monkeypatch.setattr(measure, "SECONDS_EACH", 0.01)
    said: list[str] = []
    facts = cuda_facts("sm_90", "NVIDIA H200", 132)
    with Worker(ComparisonSetting(group.workload, "cpu", ())) as worker:
        found = measure._compare(group, facts, "cpu", worker, said.append)
    assert {one.study[2] for one in found} == {"forward", "backward"}, said
    assert all(min(one.chosen_us, one.tuned_us, one.rules_us or 0.0) > 0 for one in found)
    assert len(said) == 2 and all("; " in text for text in said)
