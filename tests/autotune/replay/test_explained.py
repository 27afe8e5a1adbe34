"""The fewest schedules near the best everywhere: exact on made-up trials, and what they say of the real ones."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from database_samples import GPU, entry, store
from places import ROOT

from autotune.cli.commands import main
from autotune.database import trials as trial_archive
from autotune.database.store import device_record, read_table
from autotune.errors import ConfigError
from autotune.replay.explained import as_data, explain, lines_of
from autotune.replay.open_formats import StudyFile, studies_of
from kernelgen.kernels.product.schedule import CudaSchedule

FACTS = {"operation": "conv", "direction": "forward", "dtype": "float32", "layout": "ir_mul"}
# Times by block size; the trials with three path groups are those of another schedule of the same rule.
STUDIES = {
    "a": {64: 100.0, 128: 104.0, 256: 150.0},
    "b": {64: 130.0, 128: 100.0, 256: 104.0},
    "c": {64: 100.0, 128: 103.0},
    "d": {64: 160.0, 256: 100.0},
    "e": {512: 100.0},
}


def line(block_size: int, time_us: float, **changes: Any) -> dict[str, Any]:
    schedule = CudaSchedule(block_size=block_size, path_groups=changes.pop("path_groups", 1)).to_dict()
    return {"schedule": schedule, "state": "ok", "time_us": time_us, "cut": False, "generator": "now", **changes}


def study(name: str, lines: list[dict[str, Any]], edges: int = 14, **facts: Any) -> StudyFile:
    known = {**FACTS, "label": name, "graph_class": f"conv-e{edges}-d5", **facts}
    return StudyFile(name, "trials", known, device_record(GPU), lines)


def made_up() -> list[StudyFile]:
    return [
        study(name, [line(size, time) for size, time in times.items()], 10 + number)
        for number, (name, times) in enumerate(STUDIES.items())
    ]


def test_the_fewest_schedules_cover_all() -> None:
    (found,) = explain(made_up())
    covered = [("".join(one.name for one in rule.studies), rule.knobs["block_size"]) for rule in found.rules]
    assert covered == [("abc", 128), ("e", 512), ("d", 256)]
    assert found.rules[0].worst == pytest.approx(1.04)
    assert found.rules[0].where == "float32, ir_mul, 2^10 to 2^12 edges: a and 2 others"
    assert "block_size" not in found.shared and found.shared["order"] == "receiver"
    assert found.beyond(1) == ([], 2), "d and e never tried it"
    (nearer,) = explain(made_up(), near=0.0)
    assert [rule.knobs["block_size"] for rule in nearer.rules] == [64, 512, 128, 256]
    assert nearer.beyond(1) == ([pytest.approx(1.3), pytest.approx(1.6)], 1)


def test_path_groups_are_a_range_and_other_generators_do_not_count() -> None:
    lines = [line(64, 50.0, generator="before"), line(128, 100.0, path_groups=3), line(128, 120.0)]
    failed = [line(256, 1.0, cut=True), {**line(512, 1.0), "state": "wrong"}]
    (found,) = explain([study("a", lines + failed), study("b", [line(128, 9.0)]), study("none", failed)])
    (rule,) = found.rules
    assert rule.knobs["block_size"] == 128 and rule.free == {"path_groups": (1, 3)} and len(rule.studies) == 2


def test_the_words() -> None:
    (found,) = explain(made_up())
    text = list(lines_of(found, most=2))
    assert text[0] == "conv forward: 5 kernels, 3 schedules within 5% of the best of each"
    assert text[1].startswith("  all: ") and "stream no" in text[1]
    assert text[2:4] == [
        "  1. 3 kernels, at worst 1.040: float32, ir_mul, 2^10 to 2^12 edges: a and 2 others",
        "     block_size 128, path_groups 1",
    ]
    assert text[-1] == "  the others, 1 of 5: 1 never tried one"
    (nearer,) = explain(made_up(), near=0.0)
    assert list(lines_of(nearer, 1))[-1] == (
        "  the others, 3 of 5: at worst 1.60 times the best where one was tried, 1 never tried one"
    )
    assert [rule["schedule"]["block_size"] for rule in as_data(found)["rules"]] == [128, 512, 256]
    with pytest.raises(ConfigError, match="--near is 1"):
        explain([], near=1.0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path, GPU, entry(CudaSchedule(), trials={"file": f"trials/{GPU.slug}/small.jsonl"}))
    trial_archive.append(trial_archive.study_path(tmp_path, GPU.slug, "small"), line(64, 10.0))

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["explain-defaults", "--results", str(tmp_path), *words])
        return int(str(end.value.code)), *capsys.readouterr()

    assert "NVIDIA Test:\nconv forward: 1 kernel, 1 schedule within 5%" in run()[1]
    (data,) = json.loads(run(GPU.slug, "--json")[1])
    assert data["device"] == GPU.slug and data["rules"][0]["studies"] == ["small"]
    code, _, error = run("nvidia-tset")
    assert code == 2 and "nvidia-test" in error
    (tmp_path / "empty").mkdir()
    code, _, error = run("nvidia-h200", "--results", str(tmp_path / "empty"))
    assert code == 2 and "has no trials of nvidia-h200. A wheel does not carry" in error and "CHECKOUT/results" in error


def test_the_real_trials_are_covered_by_far_fewer_schedules() -> None:
    slug = "nvidia-h200"
    studies, _ = studies_of(ROOT / "results", slug, read_table(ROOT / "results" / f"{slug}.json").device)
    found = explain(studies)
    assert sum(len(rules.tried) for rules in found) == len(studies)
    for rules in found:
        names = Counter(study.name for rule in rules.rules for study in rule.studies)
        assert len(names) <= len(rules.tried) <= names.total() + len(rules.tried)
        assert sum(len(rule.studies) for rule in rules.rules) == len(rules.tried), "each is covered once"
        assert all(rule.worst <= 1 + rules.near for rule in rules.rules)
        assert rules.beyond(len(rules.rules)) == ([], 0)
    schedules = {(rules.operation, rules.direction): (len(rules.rules), len(rules.tried)) for rules in found}
    assert schedules["contraction", "forward"][0] == 1
    assert all(2 * few < many for few, many in schedules.values() if many > 50)
