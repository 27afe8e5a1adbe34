"""What untuned schedules cost: the fit, the replay with problems held out, the shipped table against its records."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from places import ROOT

from autotune.cli.commands import main
from autotune.database.model_of_time import schedule_of, table_from, table_path
from autotune.database.predicted import plan_of
from autotune.database.store import load_table
from autotune.errors import ConfigError
from autotune.replay.fit import (
    ANY_TRIAL,
    Compared,
    Held,
    Settings,
    Trials,
    comparisons_path,
    facts_of,
    fit,
    fit_studies,
    key_of,
    name_of,
    spec_of,
    store_comparisons,
)
from autotune.replay.measured import read_choices
from autotune.replay.untuned import (
    Cost,
    against_peers,
    digests,
    expected_of,
    measured_line,
    read,
    served_there,
    summary,
    table_data,
    transfers,
)
from kernelgen.device import CUDA_ARCHS

RESULTS = ROOT / "results"
ARCHIVE = RESULTS / "trials" / "nvidia-h200.jsonl.gz"
# A small part of the archive: three problems on one molecule.
LABELS = ("mace-mp-medium", "nequip-water", "sevennet-0")
GRAPH = "conv-e8-d4"


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((RESULTS / "replay" / "defaults-nvidia-h200.json").read_text())


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Results with the forward kernels of three problems, their entries and their studies."""
    data = json.loads((RESULTS / "nvidia-h200.json").read_text())
    kept = [
        entry
        for entry in data["entries"]
        if entry["label"] in LABELS and entry["graph_class"] == GRAPH and entry["direction"] == "forward"
    ]
    kept = [entry for entry in kept if (entry["dtype"], entry["layout"]) == ("float32", "ir_mul")]
    (tmp_path / "nvidia-h200.json").write_text(json.dumps(data | {"entries": kept}))
    studies = {Path(entry["trials"]["file"]).stem for entry in kept}
    with gzip.open(ARCHIVE, "rt") as file:
        lines = [line for line in file if json.loads(line)["study"] in studies]
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / ARCHIVE.name).write_bytes(gzip.compress("".join(lines).encode()))
    return tmp_path


def test_the_fit_finds_the_questions_and_the_values() -> None:
    rows = np.array([[a, b, 7.0] for a in range(4) for b in range(4)], dtype=float)
    wanted = 0.3 * (rows[:, 0] > 1) + 0.1 * (rows[:, 1] > 2)
    settings = Settings(trees=60, depth=2, rate=0.5, ridge=1e-6, share=1.0)
    trees = fit(rows, wanted, np.ones(len(rows)), settings)
    assert trees.predict(rows) == pytest.approx(wanted, abs=1e-3)
    assert {tuple(sorted(asked)) for asked in trees.features[:1].tolist()} == {(0, 1)}
    assert sorted(trees.thresholds[0].tolist()) == [1.5, 2.5]
    again = fit(rows, wanted, np.ones(len(rows)), settings)
    assert again.to_dict() == trees.to_dict()


def test_weights_decide_between_rows_of_the_same_features() -> None:
    rows = np.array([[0.0], [0.0], [1.0], [1.0]])
    wanted, weights = np.array([0.0, 1.0, 2.0, 2.0]), np.array([3.0, 1.0, 1.0, 1.0])
    settings = Settings(trees=80, depth=1, rate=0.5, ridge=1e-6, share=1.0)
    assert fit(rows, wanted, weights, settings).predict([[0.0], [1.0]]) == pytest.approx([0.25, 2.0], abs=1e-3)


def test_a_summary_tells_measured_from_estimated() -> None:
    found = summary([Cost(1.0, True), Cost(1.5, False), Cost(1.2, True), Cost(1.1, False)])
    assert found == {
        **{"studies": 4, "mean": 1.2, "worst": 1.5, "beyond": 1, "measured": 0.5},
        **{"measured_mean": 1.1, "measured_worst": 1.2},
    }
    assert "measured_mean" not in summary([Cost(1.5, False)])


def test_studies_have_the_times_of_their_trials(small: Path) -> None:
    device, facts, entries, studies = read(small / "trials" / ARCHIVE.name, small)
    assert (device["slug"], facts.units, len(entries), len(studies)) == ("nvidia-h200", 132, 3, 3)
    with gzip.open(small / "trials" / ARCHIVE.name, "rt") as file:
        lines = [json.loads(line) for line in file]
    for study in studies:
        times = {
            line["time_us"]
            for line in lines
            if line["study"] == Path(study.entry.trials["file"]).stem and line["time_us"]
        }
        assert set(study.times_us.values()) <= times and len(study.times_us) > 50
        assert study.times_us[study.entry.tuned_schedule] >= study.tuned_us  # type: ignore[index]
        assert study.rows.shape[0] == len(study.slowdowns()) and np.isfinite(study.rows).all()


def test_drawn_problems_teach_the_model_and_join_the_pool(small: Path) -> None:
    """A problem in the folder ``drawn`` counts like one of the database, but the runtime does not load its entry."""
    data = json.loads((small / "nvidia-h200.json").read_text())
    apart, rest = data["entries"][:1], data["entries"][1:]
    drawn = small / "drawn"
    (drawn / "trials").mkdir(parents=True)
    (small / "nvidia-h200.json").write_text(json.dumps(data | {"entries": rest}))
    without = read(small / "trials" / ARCHIVE.name, small)
    (drawn / "nvidia-h200.json").write_text(json.dumps(data | {"entries": apart}))
    (drawn / "trials" / ARCHIVE.name).write_bytes((small / "trials" / ARCHIVE.name).read_bytes())
    _, _, entries, studies = read(small / "trials" / ARCHIVE.name, small)
    assert [entry.label for entry in entries] == [study.entry.label for study in studies]
    assert [entry.label for entry in entries[:2]] == [entry.label for entry in without[2]]
    assert len(studies) == 3 and studies[2].entry.label == apart[0]["label"] and len(studies[2].times_us) > 50
    assert apart[0]["label"] not in {
        entry.label for entry in load_table(small / "nvidia-h200.json").by_identity.values()
    }


@pytest.mark.slow
def test_the_command_holds_each_problem_out(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["replay", "defaults", str(small / "trials" / ARCHIVE.name), "--results", str(small)])
    text = capsys.readouterr().out
    assert not left.value.code, text
    assert all(f"without {label}" in text for label in LABELS) and "beyond" in text
    record = json.loads((small / "replay" / "defaults-nvidia-h200.json").read_text())
    choices = record["choices"]
    assert record["problems"] == record["studies"] == choices["rules"]["studies"] == 3
    assert choices["best of the pool"]["mean"] <= min(choices[name]["mean"] for name in ("rules", "nearest", "model"))
    assert choices["model, measured"]["measured"] == 1.0
    _check_rules(small, choices["rules"])
    made = table_from(json.loads(table_path(small, "nvidia-h200").read_text()))
    assert set(made.winners) == {"conv forward"} and made.trees.features.shape[1] == Settings().depth


@pytest.mark.slow
def test_a_compared_choice_counts_with_its_ratio_in_the_next_replay(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def replayed() -> tuple[dict[str, Any], str]:
        with pytest.raises(SystemExit):
            main(["replay", "defaults", str(small / "trials" / ARCHIVE.name), "--results", str(small)])
        return json.loads((small / "replay" / "defaults-nvidia-h200.json").read_text()), capsys.readouterr().out

    before, text = replayed()
    row = next(row for row in before["rows"] if not row[8])
    assert before["compared"] == 0 and "of 3 choices are measured, 0 of them beside" in text
    _, _, entries, _ = read(small / "trials" / ARCHIVE.name, small)
    (entry,) = (entry for entry in entries if list(name_of(entry)) == row[:6])
    compared = Compared(*key_of(entry, schedule_of(row[9])), 25.0, 10.0)
    store_comparisons(comparisons_path(small, "nvidia-h200"), "nvidia-h200", {"date": "2026"}, [compared])
    after, text = replayed()
    assert after["compared"] == 1 and "choices are measured, 1 of them beside the tuned schedule" in text
    assert [*row[:7], 2.5, True, row[9]] in [found[:10] for found in after["rows"]]
    # Models of the other problems learn from one trial more: only what they choose may change.
    others = [[each[:7] for each in record["rows"] if each[:6] != row[:6]] for record in (before, after)]
    assert others[0] == others[1] and len(others[0]) == 2
    assert after["trials"] == before["trials"] + 1
    assert after["choices"]["model"]["worst"] == 2.5 == after["choices"]["model"]["measured_worst"]


def _check_rules(small: Path, found: dict[str, Any]) -> None:
    """The rules' cost by hand: the default's trial over the fastest."""
    _, _, _, studies = read(small / "trials" / ARCHIVE.name, small)
    by_hand = [study.times_us[study.spec.schedule] / study.tuned_us for study in studies]  # type: ignore[index]
    assert found["measured"] == 1.0
    assert found["mean"] == pytest.approx(sum(by_hand) / 3, abs=1e-3) and math.isclose(
        found["worst"], max(by_hand), abs_tol=1e-3
    )


def test_trials_without_a_database_are_an_error(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no entries"):
        read(small / "trials" / ARCHIVE.name, tmp_path / "elsewhere")


def test_the_shipped_table_is_of_the_shipped_records(record: dict[str, Any]) -> None:
    assert (record["archive"], record["drawn"]) == digests(ARCHIVE, RESULTS), (
        "run: equitune replay defaults results/trials/nvidia-h200.jsonl.gz"
    )
    table = table_from(json.loads(table_path(RESULTS, "nvidia-h200").read_text()))
    assert table.expected == expected_of(record["choices"])
    by_size = record["choices"][record["chosen"]]["by size"]
    assert all(table.expected[size]["mean"] == found["mean"] for size, found in by_size.items())
    assert (table.trials, table.problems) == (record["trials"], record["problems"])
    tables = load_table(RESULTS / "nvidia-h200.json"), load_table(RESULTS / "drawn" / "nvidia-h200.json")
    entries = [entry for each in tables for entry in each.by_identity.values()]
    shipped = {entry.tuned_schedule for entry in entries if entry.operation in ("conv", "plain")}
    assert {winner.schedule for winners in table.winners.values() for winner in winners} <= shipped


def test_the_model_is_better_than_rules_and_than_the_nearest_problem(record: dict[str, Any]) -> None:
    choices = record["choices"]
    chosen = choices[record["chosen"]]
    for other in ("rules", "nearest"):
        assert chosen["mean"] < choices[other]["mean"] and chosen["worst"] < choices[other]["worst"]
        assert chosen["beyond"] < choices[other]["beyond"]
    starts = record["starts"]
    assert all(starts["by the model"][count] <= starts["by kinship"][count] for count in ("1", "2", "4", "8"))


def page_of_schedules() -> str:
    """The page that has these figures; its tables are made of the record."""
    filled = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["filled"]
    return " ".join(filled((ROOT / "docs" / "explanation" / "schedules.md").read_text()).split())


def test_the_documentation_has_the_records_figures(record: dict[str, Any]) -> None:
    text = page_of_schedules()
    names = {"rules": "default by rules", record["chosen"]: "predicted", "first run": "what the first run keeps"}
    names[ANY_TRIAL] = "the model's choice among measured trials"
    for name, shown in names.items():
        found = record["choices"][name]
        row = f"| {shown} | {found['mean']:.2f} | {found['worst']:.2f} | {found['measured']:.0%} |"
        assert row in text


def test_the_documentation_has_the_estimates_of_other_gpus(record: dict[str, Any]) -> None:
    text, found = page_of_schedules(), record["transfer"]
    assert set(found) == set(CUDA_ARCHS) - {"sm_90"}
    for each in found.values():
        assert f" | {each['tuned']:.2f} | {each['untuned']:.2f} |" in text


def test_a_smaller_gpu_gets_what_is_legal_there(small: Path) -> None:
    _, facts, entries, studies = read(small / "trials" / ARCHIVE.name, small)
    study = max(studies, key=lambda study: plan_bytes(study, study.entry.tuned_schedule))
    tuned = study.entry.tuned_schedule
    assert served_there(study, study.spec) == tuned and plan_bytes(study, tuned) > 0
    there = dataclasses.replace(facts, arch="sm_86", shared_per_block=plan_bytes(study, tuned) - 1)
    served = served_there(study, dataclasses.replace(study.spec, facts=there))
    assert served != tuned and plan_bytes(study, served) < plan_bytes(study, tuned)

    order = list(study.times_us)
    held = Held(study, order, order, order)
    measured = SimpleNamespace(cost=lambda study, schedule: Cost(study.times_us[schedule] / study.tuned_us, True))
    found = transfers([held], measured)["sm_80"]  # type: ignore[arg-type]
    # All of its trials are legal on an A100.
    assert found["untuned"] == pytest.approx(study.times_us[order[0]] / study.tuned_us, abs=1e-4)
    assert found["tuned"] == pytest.approx(study.times_us[tuned] / study.tuned_us, abs=1e-4)  # type: ignore[index]
    assert found["changed"] == 0.0


def plan_bytes(study: Trials, schedule: Any) -> int:
    return study.plan(schedule).shared_bytes


def test_no_pass_of_the_suite_is_lost_without_tuning(record: dict[str, Any]) -> None:
    rows = json.loads((RESULTS / "bench" / "nvidia-h200.json").read_text())["rows"]
    found = record["suite"]
    assert found == against_peers(rows, record["rows"]) and found["lost"] == 0 and found["rows"] > 100
    assert found["least"] > 0.98
    assert "no single pass of the suite would be slower than the fastest peer by more than 2%" in page_of_schedules()


def test_the_documentation_has_the_figures_of_drawn_problems() -> None:
    rows = json.loads((RESULTS / "drawn" / "compared" / "2028.json").read_text())["rows"]
    assert len({row["problem"] for row in rows}) == 10 and len(rows) == 20
    text = page_of_schedules()
    names = {"untuned": "what the first run keeps", "predicted": "predicted", "rules": "default by rules"}
    for name, shown in names.items():
        found = [row[name] / row["tuned"] for row in rows]
        assert f"| {shown} | {sum(found) / 20:.2f} | {max(found):.2f} |" in text


def test_what_a_first_run_keeps_is_good_enough(record: dict[str, Any]) -> None:
    found, suite = record["choices"]["first run"], record["suite_first_run"]
    assert suite["lost"] == 0 and suite["least"] > 0.98 and found["mean"] <= 1.1 and found["worst"] <= 1.35


def test_a_choice_that_costs_more_loses_against_a_peer() -> None:
    name = ("a", "conv", "forward", "float32", "ir_mul", "conv-e17-d7")
    row = dict(zip(("label", "operation", "pass", "dtype", "layout", "graph_class"), name, strict=True))
    times = {"equitune": {"time_us": 10.0}, "equitune-default": {"time_us": 1.0}, "e3nn": {"time_us": 12.0}}
    bench = [row | {"times": times}, row | {"times": times, "label": "without a study"}]
    assert against_peers(bench, [[*name, 1.0, 1.2, True]]) == {
        **{"rows": 1, "lost": 0, "least": 1.0, "least row": list(name)}
    }
    assert against_peers(bench, [[*name, 1.0, 1.3, True]])["lost"] == 1
    assert against_peers([row | {"times": times, "deterministic": True}], [[*name, 1.0, 1.3, True]])["rows"] == 0


def test_the_shipped_record_has_legal_choices_and_counts_what_was_measured(record: dict[str, Any]) -> None:
    choices = read_choices(ARCHIVE, RESULTS)
    facts = facts_of(load_table(RESULTS / "nvidia-h200.json").device)
    assert len(choices) == record["studies"] == len({name_of(one.entry) for one in choices})
    again = "run: equitune replay defaults results/trials/nvidia-h200.jsonl.gz"
    assert sum(one.cost.compared for one in choices) == record["compared"], again
    assert [round(one.cost.ratio, 4) for one in choices] == [row[7] for row in record["rows"]], again
    for one in choices[::10]:
        plan = plan_of(spec_of(one.entry, facts), one.schedule)  # type: ignore[arg-type]
        assert plan and plan.spec.schedule == one.schedule
    found, shown = summary([one.cost for one in choices]), record["choices"][record["chosen"]]
    assert measured_line(found, record["compared"]) == measured_line(shown, record["compared"])


@pytest.mark.slow
def test_the_table_comes_from_the_records(record: dict[str, Any]) -> None:
    device, _, entries, studies = read(ARCHIVE, RESULTS)
    made = table_data(
        device, entries, studies, fit_studies(studies), expected_of(record["choices"]), record["transfer"]
    )
    assert made == json.loads(table_path(RESULTS, "nvidia-h200").read_text())
