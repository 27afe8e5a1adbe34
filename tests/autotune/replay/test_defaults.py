"""What untuned schedules cost: the fit, the replay with problems held out, the shipped table against its records."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import ROOT

from autotune.cli.commands import main
from autotune.database.prediction.table import table_from, table_path
from autotune.database.store import load_table
from autotune.errors import ConfigError
from autotune.replay.defaults.evaluate import Cost, summary
from autotune.replay.defaults.fit import Settings, fit, fit_studies
from autotune.replay.defaults.run import digest, read, table_data

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
        assert study.rows().shape[0] == len(study.slowdowns()) and np.isfinite(study.rows()).all()


def test_the_command_holds_each_problem_out(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["replay", "--defaults", str(small / "trials" / ARCHIVE.name), "--results", str(small)])
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
    assert record["archive"] == digest(ARCHIVE), "run: equitune replay --defaults results/trials/nvidia-h200.jsonl.gz"
    table = table_from(json.loads(table_path(RESULTS, "nvidia-h200").read_text()))
    by_size = record["choices"][record["chosen"]]["by size"]
    assert table.expected == {
        size: {key: found[key] for key in ("mean", "worst", "measured")} for size, found in by_size.items()
    }
    assert (table.trials, table.problems) == (record["trials"], record["problems"])
    entries = load_table(RESULTS / "nvidia-h200.json").by_identity.values()
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


def test_the_readme_has_the_records_figures(record: dict[str, Any]) -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(r"held out in turn, (.*?) \(`results/replay/defaults-nvidia-h200.json`\)", text)
    assert found
    rules, model = record["choices"]["rules"], record["choices"][record["chosen"]]
    assert found[1] == (
        f"predicted schedules take {model['mean']:.2f} times the tuned time on the mean and {model['worst']:.2f} at "
        f"worst, the rules' {rules['mean']:.2f} and {rules['worst']:.2f}; {model['measured']:.0%} of the predicted "
        f"ones were measured ({model['measured_mean']:.2f} on the mean), the others are estimates"
    )


@pytest.mark.slow
def test_the_table_comes_from_the_records(record: dict[str, Any]) -> None:
    device, _, entries, studies = read(ARCHIVE, RESULTS)
    by_size = record["choices"][record["chosen"]]["by size"]
    made = table_data(device, entries, studies, fit_studies(studies), by_size)
    assert made == json.loads(table_path(RESULTS, "nvidia-h200").read_text())
