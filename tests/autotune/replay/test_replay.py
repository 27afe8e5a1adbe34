"""Recording a restricted space and replaying samplers against it: exact on a made-up record, real on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from database_samples import entry

from autotune.cli.commands import main
from autotune.database import trials as trial_records
from autotune.errors import ConfigError, StudyError
from autotune.measure.kinds import space_of
from autotune.measure.space import Space, search_space
from autotune.replay.samplers import (
    Record,
    _write_header,
    header,
    load_record,
    pruning,
    replay,
    replay_table,
    run,
    trials_to,
    write_replay,
)
from autotune.workload.config import load_config, load_graphs
from autotune.workload.workload import Restriction, Workload, restrictions_from
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.kernels.product.schedule import CudaSchedule, Schedule
from kernelgen.problem.product import TensorProductProblem

pytest.importorskip("optuna")

H200 = cuda_facts("sm_90", "NVIDIA H200")
PROBLEM = TensorProductProblem.channelwise("32x0e+32x1o", "0e+1o", "0e+1o")
CHOICES = {
    "accumulate": ("registers",),
    "order": ("receiver",),
    "path_groups": (1, 2, 3),
    "edges_per_warp": (1,),
    "channels_per_thread": (1,),
    "warps_per_edge": (1, 2),
    "edge_operand": ("inline", "shared"),
    "teams_per_node": (1,),
    "stage_edges": (32,),
    "ahead": ("none",),
    "stream": (False,),
    "prefetch": ("none", "reload"),
    "block_size": (64, 128),
    "min_blocks": (0,),
}
SPILLS = 4000


def workload(**changes: Any) -> Workload:
    return Workload("made-up", PROBLEM, "conv", load_graphs()["molecule"], directions=("forward",), **changes)


def small_space(facts: DeviceFacts = H200) -> Space:
    return search_space(PROBLEM, "conv", "forward", "float32", facts).restricted(CHOICES)


def cost(schedule: Schedule) -> float:
    """Microseconds; the best, 10.0, is (3 groups, 2 warps an edge, shared, no prefetch, 64), alone within 5%."""
    assert isinstance(schedule, CudaSchedule)
    distance = abs(schedule.path_groups - 3) + (schedule.warps_per_edge != 2) + (schedule.edge_operand != "shared")
    distance += (schedule.prefetch != "none") + (schedule.block_size != 64) + 20 * (not schedule.fuse)
    return 10.0 * 1.08**distance


def line_of(number: int, schedule: Schedule) -> dict[str, Any]:
    """As a search writes it; one group with inline edge values spills, and one other schedule crashed."""
    spills = schedule.path_groups == 1 and getattr(schedule, "edge_operand", "") == "inline"
    crashed = schedule.path_groups == 2 and getattr(schedule, "block_size", 0) == 64 and schedule.fuse
    time_us = None if crashed else cost(schedule) * (2 if spills else 1)
    return {
        "number": number,
        "state": "crashed" if crashed else "ok",
        "reason": "SIGSEGV" if crashed else "",
        "schedule": schedule.to_dict(),
        "time_us": time_us,
        "q1_us": time_us,
        "q3_us": time_us,
        "cut": False,
        "errors": {},
        "resources": {"registers": 100, "spill_bytes": SPILLS if spills else 0},
        "compile_s": 0.5,
        "generator": "made-up",
    }


@pytest.fixture
def recorded(tmp_path: Path) -> Record:
    space = small_space()
    path = trial_records.study_path(tmp_path, "device", "made-up", "record")
    trial_records.append(path, header(workload(), "forward", space, 4))
    legal = dict.fromkeys(schedule for schedule in space.shuffled(0) if space.broken_limit(schedule) is None)
    for number, schedule in enumerate((*legal, *space.probes)):
        trial_records.append(path, line_of(number, schedule))
    return load_record(path)


def test_record_is_read_back_as_its_space(recorded: Record) -> None:
    space = small_space()
    assert recorded.space.knobs == dict(space.knobs)
    assert recorded.space.default == space.default and recorded.space.probes == space.probes
    assert len(recorded.space.lines) == space.count_legal(10_000) == recorded.space.count_legal(10_000) > 40
    assert recorded.best_us == 10.0
    assert recorded.default_us == cost(space.default)
    assert recorded.space.broken_limit(dataclasses.replace(space.default, block_size=512)) == "not in the record"


def test_default_order_is_counted_exactly(recorded: Record) -> None:
    space = small_space()
    every = (space.schedule(dict(zip(space.knobs, v, strict=True))) for v in itertools.product(*space.knobs.values()))
    walked = [s for s in dict.fromkeys((space.default, *every)) if space.broken_limit(s) is None]
    best = run(recorded, "default", 0, 1000, ahead=4)
    assert len(best) == len(walked)
    position = next(place for place, schedule in enumerate(walked, 1) if cost(schedule) == 10.0)
    assert position > 1 and trials_to(best, 10.0) == position
    assert trials_to(best[: position - 1], 10.5) is None
    assert run(recorded, "default", 0, 7, ahead=4) == best[:7]


@pytest.mark.slow
@pytest.mark.covering(0)
@pytest.mark.parametrize("sampler", ["tpe", "climb", "random", "gp"])
def test_samplers_walk_the_record_to_its_end(recorded: Record, sampler: str) -> None:
    most = 14 if sampler == "gp" else 1000
    best = run(recorded, sampler, 0, most, ahead=4)
    assert best[0] == recorded.default_us
    assert all(later <= earlier for earlier, later in itertools.pairwise(best))
    assert len(best) == min(most, len(recorded.space.lines))
    assert sampler == "gp" or best[-1] == 10.0
    first = min(most, 20)
    assert best[:first] == run(recorded, sampler, 0, first, ahead=4), "the same seed gives the same search"
    assert sampler == "gp" or best[:first] != run(recorded, sampler, 1, first, ahead=4)


def test_starts_come_after_the_default(recorded: Record) -> None:
    winner = next(schedule for schedule in recorded.space.in_order() if cost(schedule) == 10.0)
    assert run(recorded, "random", 0, 2, ahead=1, starts=[winner]) == [recorded.default_us, 10.0]


def test_pruned_schedules_are_reported_and_never_near_the_best(recorded: Record) -> None:
    spilling = [line for line in recorded.space.lines.values() if line["resources"]["spill_bytes"]]
    found = pruning(recorded)
    assert found["skipped"] == len(spilling) > 0
    assert found["fastest_skipped"] == round(min(line["time_us"] for line in spilling) / 10.0, 4) > 1.1
    assert run(recorded, "random", 0, 1000, ahead=4, prune=False)[-1] == 10.0


def test_result_is_what_the_report_reads(recorded: Record, tmp_path: Path) -> None:
    data = replay(recorded, ["tpe", "random", "default"], 30, seeds=3)
    assert json.loads(write_replay(tmp_path, data).read_text()) == data
    assert (data["space_size"], data["best_us"], data["default_us"]) == (
        len(recorded.space.lines),
        10.0,
        recorded.default_us,
    )
    assert data["device"] == "nvidia-h200" and data["ahead"] == 4
    for name, seeds in (("tpe", 3), ("random", 3), ("default", 1)):
        found = data["samplers"][name]
        assert len(found["curve"]) == 30
        assert {key: len(counts) for key, counts in found["trials_to"].items()} == dict.fromkeys(
            ("0.02", "0.05", "0.10"), seeds
        )
        assert found["curve"][0] == pytest.approx(recorded.default_us / 10.0, abs=1e-4)
        for seed in range(seeds):
            best = run(recorded, name, seed, 30, ahead=4)
            assert found["trials_to"]["0.05"][seed] == trials_to(best, 10.5)
            assert found["trials_to"]["0.10"][seed] == trials_to(best, 11.0)
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(replay_table(data))
    text = console.export_text()
    assert all(
        word in text
        for word in ("tpe", "random", "default", "trials to 5%", f"pruning skips {pruning(recorded)['skipped']}")
    )


def test_what_is_no_record_is_said(tmp_path: Path, recorded: Record) -> None:
    trials = tmp_path / "trials.jsonl"
    trial_records.append(trials, line_of(0, small_space().default))
    with pytest.raises(ConfigError, match="equitune record"):
        load_record(trials)
    only_header = tmp_path / "empty.jsonl"
    trial_records.append(only_header, dict(recorded.header))
    with pytest.raises(ConfigError, match="no time of the default"):
        load_record(only_header)
    with pytest.raises(ConfigError, match="tpe"):
        replay(recorded, ["tpee"], 5)


def test_record_goes_on_only_with_the_same_space(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    wanted = header(workload(), "forward", small_space(), 2)
    _write_header(path, wanted)
    _write_header(path, wanted)
    assert len(trial_records.read(path)) == 1
    with pytest.raises(StudyError, match="another generator and knobs"):
        _write_header(path, {**wanted, "generator": "other", "knobs": {}})


def test_shipped_record_config_leaves_some_hundred_schedules() -> None:
    loaded = load_config("record", "cuda")
    (planned,) = loaded.workloads
    assert (planned.label, planned.layout, planned.dtype, planned.graph.name) == (
        "mace-mp-large",
        "ir_mul",
        "float32",
        "carbon",
    )
    for direction in planned.directions:
        space = space_of(planned, direction, H200).restricted(loaded.record["cuda"].choices(direction))
        assert 500 <= space.count_legal(2000) <= 1000, direction
        assert space.values(space.default) is not None


def test_restriction_keeps_the_default() -> None:
    space = search_space(PROBLEM, "conv", "forward", "float32", H200)
    small = space.restricted({"block_size": (64,), "prefetch": ("none",)})
    assert small.knobs["block_size"] == (64, space.default.block_size)  # type: ignore[attr-defined]
    assert small.knobs["edge_operand"] == space.knobs["edge_operand"]
    plain = search_space(PROBLEM, "plain", "forward", "float32", H200)
    with pytest.raises(ConfigError, match="accumulate"):
        plain.restricted({"accumulate": ("registers",)})


def test_restriction_is_read_by_direction() -> None:
    tables = {"cuda": {"path_groups": [1, 2], "prefetch": ["none"], "backward": {"path_groups": [4]}}}
    assert restrictions_from(tables) == {
        "cuda": Restriction({"path_groups": (1, 2), "prefetch": ("none",)}, {"backward": {"path_groups": (4,)}})
    }
    found = restrictions_from(tables)["cuda"]
    assert found.choices("forward") == {"path_groups": (1, 2), "prefetch": ("none",)}
    assert found.choices("backward") == {"path_groups": (4,), "prefetch": ("none",)}
    assert restrictions_from({}) == {}


@pytest.mark.parametrize(
    "tables, said",
    [
        ({"cuda": {"path_group": [1]}}, "did you mean 'path_groups'"),
        ({"cuda": {"fuse": [True]}}, "unknown knob 'fuse'"),
        ({"cuda": {"path_groups": 2}}, "expected a list"),
        ({"cuda": {"path_groups": []}}, "expected a list"),
        ({"cuda": {"edges_per_warp": [3]}}, "3"),
        ({"cuda": {"backwards": {"path_groups": [1]}}}, "did you mean 'backward'"),
        ({"cude": {}}, "did you mean 'cuda'"),
        ({"cpu": [1]}, "expected a table"),
        ([], "expected tables"),
    ],
)
def test_mistake_in_a_restriction_is_named(tables: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        restrictions_from(tables)


CONFIG = """
problem = "tiny"
graph = "molecule"
directions = ["forward"]
[record.cpu]
accumulate = ["registers"]
order = ["receiver"]
path_groups = [2]
edges_per_chunk = [32]
channel_block = [4]
threads = [0]
"""


@pytest.mark.slow
def test_record_and_replay_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded by the command, not measured twice, replayed by the command."""
    config = tmp_path / "small.toml"
    config.write_text(CONFIG)

    def command(*arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in (*arguments, "--results", tmp_path)])
        assert not ended.value.code
        return capsys.readouterr().out

    said = command("record", config, "--device", "cpu")
    (path,) = (tmp_path / "record").glob("*/*.jsonl")
    assert str(path) in said.replace("\n", "")
    before = path.read_bytes()
    found = load_record(path)
    lines = trial_records.read(path)[1:]
    assert len(lines) == len(found.space.lines) == found.space.count_legal(100) == 3
    assert {line["state"] for line in lines} == {"ok"} and not any(line["samples_us"] for line in lines)
    assert sum(not line["schedule"]["fuse"] for line in lines) == 1
    assert found.header["graph"]["name"] == "molecule" and found.header["generator"] == lines[0]["generator"]
    command("record", config, "--device", "cpu")
    assert path.read_bytes() == before
    assert "4 records (studies: 1)" in command("db", "pack").replace("\n", " ")
    path.unlink()
    path = path.parent.with_name(f"{path.parent.name}.jsonl.gz")
    said = command("replay", path, "--seeds", 2, "--trials", 5, "--sampler", "random", "--sampler", "default")
    (result,) = (tmp_path / "replay").glob("*.json")
    data = json.loads(result.read_text())
    assert data["space_size"] == 3 and set(data["samplers"]) == {"random", "default"}
    assert data["samplers"]["random"]["curve"][-1] == 1.0 and math.isclose(data["best_us"], found.best_us)
    assert "trials to 5%" in said


OWN_SAMPLERS = """
import optuna


class Backwards(optuna.samplers.BaseSampler):
    \"\"\"The last choice of each knob that was not tried, by turns.\"\"\"

    def __init__(self):
        self.turn = 0

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, name, distribution):
        self.turn += 1
        return distribution.choices[-1 - self.turn % len(distribution.choices)]


class Seeded(optuna.samplers.RandomSampler):
    pass


class Other:
    pass
"""


def test_a_sampler_by_its_path_is_replayed_beside_the_others(
    recorded: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_samplers.py").write_text(OWN_SAMPLERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = ["random", "own_samplers:Backwards", "own_samplers:Seeded"]
    data = replay(recorded, names, 20, seeds=2, ahead=1)
    assert list(data["samplers"]) == names
    random, backwards, seeded = data["samplers"].values()
    assert seeded == random != backwards, "the seed reaches a class that takes one"
    assert "own_samplers:Backwards" in {str(cell) for cell in replay_table(data).columns[0].cells}
    for name, said in (
        ("own_samplers:Other", "BaseSampler"),
        ("own_samplers:Missing", "no attribute"),
        ("nowhere:Sampler", "No module"),
    ):
        with pytest.raises(ConfigError, match=said):
            replay(recorded, [name], 5, seeds=1)


def test_a_transfer_is_told_beside_the_search_without_it(recorded: Record) -> None:
    winner = recorded.space.kind.read(recorded.measured[0]["schedule"])
    data = replay(recorded, ["random"], 20, seeds=3, ahead=1, transfers={"another problem": [winner], "none": []})
    assert list(data["transfer"]["from"]) == ["another problem"], "where nothing is known there is nothing to tell"
    moved = data["transfer"]["from"]["another problem"]
    assert (data["transfer"]["sampler"], moved["starts"]) == ("climb", 1)
    assert moved["trials_to"]["0.05"] == [2, 2, 2], "right after the default"
    assert max(data["samplers"]["random"]["trials_to"]["0.05"], key=lambda n: n or 99) != 2


def test_what_is_known_of_the_recorded_kernel_itself_is_no_transfer(recorded: Record) -> None:
    head = recorded.header
    winner = recorded.space.kind.read(recorded.measured[0]["schedule"])
    facts = {"problem": head["problem"], "direction": head["direction"], "layout": head["layout"]}
    own = entry(winner, **facts, graph_class=head["graph_class"])
    assert recorded.transfers([own]) == {"other problems": [], "other graphs too": []}
    elsewhere = dataclasses.replace(own, graph_class="conv-e10-d7")
    assert recorded.transfers([elsewhere]) == {"other problems": [], "other graphs too": [winner]}
