"""The first screen and the models of a page: made-up records enter, the sentence, bars and commands are checked."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomllib
from model_samples import all_rows, figures, model_row, write_models
from places import ROOT
from report_samples import DEVICE, SLUG, Page, page_of, suite_row, write_results, write_suite

from autotune.bench.model_rows import NOTHING_TUNED, ModelRow, model_rows
from autotune.bench.rows import SuiteRow
from autotune.report import models, write_reports
from autotune.report import page as kernels
from autotune.report.devices import DeviceRows, load_device
from autotune.report.kernels import BenchedRow
from autotune.report.kernels import kernels as kernels_section
from autotune.report.page import config_lines, kernel_command, shipped
from autotune.report.picker import Choice
from autotune.report.render import Page as Rendered
from autotune.report.render import environment, render
from autotune.report.sources import Sources
from autotune.text import floored_ratio
from autotune.workload.config import load_config

BENCHES = sorted((ROOT / "results" / "bench").glob("*.json"))


def plain(markup: str) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", markup))).replace("\N{NO-BREAK SPACE}", " ")


def macro(template: str, name: str, *shown: Any) -> str:
    return str(getattr(environment().get_template(template).module, name)(*shown))


def bars(choice: Choice, memory: str) -> str:
    return macro("picker.html", "bars", choice, memory)


def opened(page: Rendered) -> str:
    return page.text + " ".join(page.parts.values())


def models_section(rows: Sequence[ModelRow]) -> str:
    return opened(render("models.html", "x", {}, models=rows))


def details(row: SuiteRow) -> str:
    return macro("kernels_tables.html", "details", BenchedRow(row, ()))


def means(rows: Sequence[SuiteRow]) -> str:
    return macro("kernels_tables.html", "means", kernels_section(rows, Sources()))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = write_suite(tmp_path_factory.mktemp("results"), [suite_row("mace-mp-large", "water", "forward", 2.7)])
    return page_of(write_models(folder), tmp_path_factory.mktemp("reports"))


def test_models_come_first_and_kernels_keep_a_picker(page: Page) -> None:
    assert page.loaded == [] and page.unlabelled == 0 and page.counts["caption"] == page.counts["table"]
    assert len(page.ids) == len(set(page.ids)) and page.targets <= set(page.ids)
    first, rest = page.text.split("<main>")
    assert 'data-rows="model-rows"' in first and 'data-rows="kernel-rows"' not in first
    assert 'data-rows="kernel-rows"' in rest and '<h2 id="models">' in rest and '<h2 id="roofline">' in rest
    assert any(words.startswith("Models with a published name have its hyperparameters") for words in page.words)
    assert not {"nan", "none", "null", "inf"} & {words.strip().lower() for words in page.words}


def test_the_sentence_tells_mean_least_and_memory_of_all_rows(page: Page) -> None:
    rows = model_rows({"rows": all_rows()})
    # Seven rows at 1.5 and one at 0.9; memory and device time go with time in the made-up record.
    mean, each = (1.5**7 * 0.9) ** (1 / 8), math.floor((1.5**3 * 0.9) ** (1 / 4) * 100) / 100
    assert models.models_sentence(rows, "X") == (
        "On this X, Equitune is so many times as fast as the fastest other path: energies and forces "
        f"{each:.2f}× (mean of 4 rows, least 0.90×); training step "
        f"1.50× (mean of 4 rows, least 1.50×). It takes {1 / mean:.2f}× the memory."
    )
    assert models.joint_sentence(rows) == (
        "Equitune's convolution and cuEquivariance's other parts together, times as fast as the fastest path without "
        "Equitune: 3.00× (one row)."
    )
    assert {models.models_sentence(rows, DEVICE["name"]), models.joint_sentence(rows)} <= {*page.words}
    assert models.joint_sentence(rows[:1]) == ""
    assert "energies and forces 1.50× (one row). It" in models.models_sentence(rows[:1], "X")
    alone = [ModelRow(row.record | {"contenders": {"equitune": {"wall_ms": 3}}}) for row in rows]
    assert "No model has been timed with Equitune and without it" in models.models_sentence(alone, "X")


def test_kernels_capture_stress_and_steps_are_numbers_apart() -> None:
    plain_row = model_row("made-up-mace", "made-up-liquid", "energy_forces", 2.0)
    stress = model_row("made-up-mace", "made-up-liquid", "energy_forces_stress", 6.0)
    step = model_row("made-up-mace", "made-up-liquid", "md_step", 3.0)
    other = model_row("made-up-sevennet", "made-up-liquid", "training", 0.5)
    ours = plain_row["contenders"]["equitune"]["wall_ms"]
    alone = ModelRow(json.loads(json.dumps(plain_row)))
    plain_row["contenders"] |= {
        "equitune-captured": figures(ours / 2, 5184, device_ms=ours),
        "cuequivariance-captured": figures(ours / 2 * 1.25, 5184, device_ms=ours * 1.2),
    }
    rows = [ModelRow(row) for row in (plain_row, stress, step, other)]
    found = {what: values for what, values in models.gains(rows).items() if values}
    assert [list(values) for values in found.values()] == [["mace"]] * 6 + [["sevennet"]] + [["mace"]] * 2
    (fastest, kernels_alone, ours_captured, theirs, stressed, part, _, stock, steps) = (
        next(iter(values.values()))[0] for values in found.values()
    )
    # Each in its fastest form; the kernels' number is of the least device times, whoever's.
    assert (fastest, kernels_alone) == (pytest.approx(1.25), pytest.approx(1.2))
    assert (ours_captured, theirs) == (pytest.approx(2.0), pytest.approx(2.0 / (0.5 * 1.25)))
    assert (stressed, part) == (pytest.approx(6.0), pytest.approx(6.0 / 1.25))
    assert (stock, steps) == (pytest.approx(12.0), pytest.approx(3.0))
    section = plain(models_section(rows))
    assert "capture: the fastest other path's 3.20× 1 row, least 3.20×" in section
    assert "cuEquivariance, captured, eager 132 ms" in section and "0.50×" in section
    alone.record["contenders"]["equitune-captured"] = figures(ours / 2, 5184)
    assert alone.ratio == 2.0, "captured steps are not compared with those of who never ran so"


def test_the_first_row_is_a_usual_one_near_the_mean() -> None:
    rows = model_rows({"rows": [
        model_row("made-up-mace", "made-up-molecule", "energy_forces", 9.0),
        model_row("made-up-mace", "made-up-liquid", "training", 2.0),
        model_row("made-up-mace", "made-up-liquid", "energy_forces", 2.1),
        model_row("made-up-sevennet", "made-up-liquid", "energy_forces", 2.0, dtype="float64"),
    ]})  # fmt: skip
    first = rows[models.first_model_row(rows)]
    assert (first.text("structure"), first.text("pass"), first.ratio) == ("made-up-liquid", "energy_forces", 2.1)
    kernel_rows = [SuiteRow(suite_row("a", graph, which, ratio)) for graph, which, ratio in (
        ("molecule", "force_step", 30.0), ("carbon", "force_step", 3.0), ("carbon", "forward", 3.1),
        ("water", "force_step", 1.1))]  # fmt: skip
    assert kernels.first_kernel_row(kernel_rows) == 1


def test_four_bars_with_times_and_ratios() -> None:
    row = ModelRow(model_row("made-up-mace", "made-up-molecule", "energy_forces"))
    choice = models.model_choice(row)
    assert [(bar.name, bar.role) for bar in choice.bars] == [
        *(("Equitune", "tuned"), ("cuEquivariance", "fastest other path")),
        *(("MACE", "stock"), ("Equitune", "untuned default")),
    ]
    text = plain(bars(choice, "peak memory"))
    for words in (
        "20.0 ms",
        "30.0 ms Equitune 1.50× as fast",
        "240 ms Equitune 12× as fast",
        "25.0 ms Equitune 1.25× as fast",
        "401 MiB",
    ):
        assert words in text, words
    for fact in ("21 atoms, 306 edges", "the device works 16.0 ms of it in 594 launches",
                 "largest relative error 2.0e-6 (gradients) against stock in float64"):  # fmt: skip
        assert fact in [plain(line) for line in choice.facts]


def test_a_device_without_tuned_entries_and_with_stock_alone_is_told_as_such() -> None:
    rows = []
    for record in all_rows()[:2]:
        cells = {name: record["contenders"][name] for name in ("equitune", "stock")}
        rows.append(ModelRow(record | {"contenders": cells, "database": NOTHING_TUNED}))
    said = models.models_sentence(rows, "X")
    assert said.startswith("On this X, Equitune is so many times as fast as stock: energies and forces 12× (one row)")
    assert said.endswith("Nothing was tuned on it.")
    choice = models.model_choice(rows[0])
    assert [(bar.name, bar.role) for bar in choice.bars] == [
        ("Equitune", "not tuned on this device"),
        ("MACE", "stock"),
    ]
    assert "no path but stock was timed beside it" in choice.facts
    section = plain(models_section(rows))
    assert "stock's time over Equitune's" in section and "Speed-up over stock" in section
    assert "other path" not in section
    (device,) = [DeviceRows("x", {"name": "X"}, (), tuple(rows))]
    shown = render("devices.html", "x", {}, devices=kernels.devices((device, device), "x"))
    assert "12× over stock" in plain(shown.text)


def test_a_step_of_a_simulation_tells_its_parts() -> None:
    record = model_row("made-up-mace", "made-up-molecule", "md_step")
    ours = record["contenders"]["equitune"]
    ours |= {"wall_ms": 8.64, "parts_ms": {"neighbors": 0.5, "model": 7.0, "rest": 1.25}}
    row = ModelRow(record)
    assert plain(row.step_text("equitune")) == "10.00 ns a day: neighbors 500 µs, model 7.00 ms, rest 1.25 ms"
    assert "10.00 ns a day with steps of 1 fs" in [plain(fact) for fact in models.model_choice(row).facts]
    text = plain(models_section([row]))
    assert "step of molecular dynamics (ASE)" in text and "neighbors 500 µs, model 7.00 ms" in text
    other = plain(models_section([ModelRow(model_row("made-up-mace", "made-up-molecule", "training"))]))
    assert "Simulation" not in other and "ns a day" not in other


def test_equitune_with_cuequivariance_is_no_other_path() -> None:
    row = model_row("made-up-mace", "made-up-molecule", "energy_forces")
    row["contenders"]["equitune+cuequivariance"] = row["contenders"]["equitune"] | {"wall_ms": 8.0}
    (made,) = model_rows({"rows": [row]})
    assert (made.best_other, made.fastest) == ("cuequivariance", "cuequivariance")
    choice = models.model_choice(made)
    assert [(bar.name, bar.role) for bar in choice.bars][:3] == [
        ("Equitune", "tuned"),
        ("Equitune with cuEquivariance", models.JOINT_ROLE),
        ("cuEquivariance", "fastest other path"),
    ]
    section = plain(models_section((made,)))
    assert "With cuEquivariance" in section and "8.00 ms 0.40×" in section
    row["contenders"].pop("equitune+cuequivariance")
    assert "With cuEquivariance" not in plain(models_section((ModelRow(row),)))


def test_a_ratio_beside_a_bar_never_reads_better_than_it_is() -> None:
    row = model_row("made-up-mace", "made-up-molecule", "energy_forces", 1.0)
    row["contenders"]["cuequivariance"]["wall_ms"] = 0.9999 * row["contenders"]["equitune"]["wall_ms"]
    choice = models.model_choice(ModelRow(row))
    assert "0.99× as fast" in plain(bars(choice, "")) and 'class="times slow"' in bars(choice, "")


def test_a_captured_step_has_a_bar_of_its_own() -> None:
    record = model_row("made-up-mace", "made-up-molecule", "energy_forces")
    ours = record["contenders"]["equitune"]["wall_ms"]
    record["contenders"]["equitune-captured"] = figures(ours / 10, 21)
    row = ModelRow(record)
    choice = models.model_choice(row)
    assert [(bar.name, bar.role) for bar in choice.bars][1] == ("Equitune", "captured: one launch a step")
    assert row.best_other == "cuequivariance" and "captured, a step is 15× as fast as cuEquivariance" in choice.facts
    text = plain(bars(choice, "peak memory"))
    assert "2.00 ms 40.1 MiB cuEquivariance" in text, "captured steps are not compared with those that are not"
    section = plain(models_section([row]))
    assert "other path / captured" in section and "2.00 ms 15×" in section
    training = model_row("made-up-mace", "made-up-molecule", "training")
    training["contenders"]["equitune-captured"] = {"error": "no gradients of weights"}
    choice = models.model_choice(ModelRow(training))
    assert "captured" not in plain(bars(choice, "")) and "Captured" not in plain(models_section([ModelRow(training)]))


def test_a_row_of_several_runs_and_a_time_of_few_samples_say_so() -> None:
    record = model_row("made-up-mace", "made-up-molecule", "energy_forces")
    said = "its paths were measured in several runs"
    assert said not in models.model_choice(ModelRow(record)).facts
    assert "of several runs" not in plain(models_section([ModelRow(record)]))
    record["contenders"]["stock"]["host"] = "another"
    assert said in models.model_choice(ModelRow(record)).facts
    assert "energies and forces, cells of several runs" in plain(models_section([ModelRow(record)]))
    assert "3 samples" in plain(models_section([ModelRow(record)])), "as many as the sample has"


def test_bars_are_to_scale_and_a_far_longer_one_is_cut() -> None:
    choice = models.model_choice(ModelRow(model_row("made-up-mace", "made-up-molecule", "energy_forces", 1.5)))
    drawn = bars(choice, "")
    ours, other, stock, default = (float(share) for share in re.findall(r"width:([\d.]+)%", drawn))
    assert stock == 100 and drawn.count('class="cut"') == 1 and "The bar is cut" in drawn
    assert other / ours == pytest.approx(1.5, rel=0.01) and default / ours == pytest.approx(1.25, rel=0.01)
    row = model_row("made-up-mace", "made-up-molecule", "energy_forces", 4.0)
    near = models.model_choice(ModelRow(row))
    assert 'class="cut"' not in bars(near, ""), "12 times is no more than 4 times the 4 times of the next"
    assert re.findall(r"width:([\d.]+)%", bars(near, ""))[2] == "100.0"


def test_a_contender_without_a_figure_says_why() -> None:
    row = model_row("made-up-mace", "made-up-liquid", "training")
    row["contenders"]["stock"] = {"error": "out of memory <on this device>"}
    choice = models.model_choice(ModelRow(row))
    assert "out of memory &lt;on this device&gt;" in bars(choice, "")
    row["contenders"] = {name: found for name, found in row["contenders"].items() if "equi" not in name[1:]}
    alone = models.model_choice(ModelRow(row))
    assert [bar.role for bar in alone.bars] == [
        "tuned",
        "stock",
        "untuned default",
    ] and "no other path was timed" in alone.facts


def test_every_row_can_be_picked(page: Page) -> None:
    data = page.choices("model-rows")
    assert data["axes"] == list(models.AXES) and len(data["rows"]) == 8
    assert len({tuple(row[:-1]) for row in data["rows"]}) == 8
    shown = data["rows"][data["first"]]
    assert shown[-1] in page.text and " \N{MIDDLE DOT} ".join(shown[:-1]) in page.words
    for row in data["rows"]:
        assert "equitune bench --models" in row[-1] and row[-1].count("<li") >= 8


def test_the_table_of_models_opens_to_all_paths(page: Page) -> None:
    section = page.text.split('<h2 id="models">')[1].split("</section>")[0]
    assert section.count('<tr class="below">') == 8 and section.count('<tbody class="lost">') == 1
    text = plain(section)
    for words in ("5,184 atoms, 460,710 edges", "cuEquivariance and OpenEquivariance", "mace refuses <both> at once",
                  "forces 3.8e-7", "3.50 s", "out of memory <on this device>", "0.90×"):  # fmt: skip
        assert words in text, words


def test_devices_are_compared_where_several_have_rows(tmp_path: Path) -> None:
    folder = write_models(write_suite(tmp_path / "results", [suite_row("a", "water", "forward"),
                                                             suite_row("a", "carbon", "forward")]))  # fmt: skip
    assert "Devices with measured rows" not in page_of(folder, tmp_path / "reports").text
    other = json.loads((folder / "bench" / f"{SLUG}.json").read_text())
    other["device"] |= {"slug": "other", "name": "Other device"}
    other["rows"] = [suite_row("a", "molecule", "forward")]
    (folder / "bench" / "other.json").write_text(json.dumps(other))
    write_models(folder, all_rows()[:2], "other")
    (path,) = write_reports(folder, tmp_path / "reports", only=SLUG)
    text = plain(path.read_text())
    assert "Devices with measured rows" in text and "Models with Equitune on several devices" in text
    line = text.split("Tuned kernels: time of one edge")[1]
    # Of each device the largest graph: (edges * 0.01 + 9.5) microseconds, by edge.
    assert "10.0 ns water, 460,710 41.0 ns molecule, 306" in line


def test_the_order_of_a_graph_is_told_where_it_was_measured() -> None:
    row = suite_row("a", "water", "forward")
    for given in (0.125, {"equitune": 0.125, "openequivariance": 0.25}):
        choice = kernels.kernel_choice(SuiteRow(row | {"order_ms": given}), "cuda")
        assert "ordering a new graph takes 125\N{NO-BREAK SPACE}µs" in choice.facts
        # The first number is Equitune's alone.
        shown = plain(details(SuiteRow(row | {"order_ms": given})))
        assert "Ordering of a new graph" in shown and ("250 µs" in shown) is isinstance(given, dict)
    assert "Ordering" not in plain(details(SuiteRow(row)))
    choice = kernels.kernel_choice(SuiteRow(row), "cuda")
    assert not any("ordering" in fact for fact in choice.facts)


def test_a_column_counts_the_order_of_a_new_graph_where_it_was_measured() -> None:
    """Of every contender: a call, and what it does once for a graph."""
    row = suite_row("a", "water", "forward")
    ours, peer = SuiteRow(row).time_us, SuiteRow(row).peer_us
    given = SuiteRow(row | {"order_ms": {"equitune": ours / 1e3, SuiteRow(row).peer: 0.0}})
    assert given.new_graph_ratio == pytest.approx(peer / (2 * ours))
    others = [name for name in given.times if name not in ("equitune", "equitune-default", given.peer)]
    assert others, "what has no order time does not count"
    shown = plain(means([given]))
    assert "New graph speed-up if each call orders one" in shown and floored_ratio(given.new_graph_ratio) in shown
    assert "New graph" not in plain(means([SuiteRow(row)])) and "Normal mode" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_the_command_of_a_stored_row_measures_that_row(path: Path, tmp_path: Path) -> None:
    record = json.loads(path.read_text())
    backend = record["device"]["backend"]
    (problems, graphs), seen = shipped(), 0
    for row in map(SuiteRow, record["rows"]):
        command = kernel_command(row, backend)
        shown = f"{command.text} {command.note}"
        if row.text("label") not in problems or row.graph not in graphs:
            assert "run equitune bench with that file" in shown
            continue
        text = "\n".join(config_lines(row))
        tomllib.loads(text)
        (tmp_path / "row.toml").write_text(text)
        config = load_config(tmp_path / "row.toml", backend)
        (workload,) = config.workloads
        assert config.passes == (row.which,) and workload.problem.key == row.text("problem")
        given: dict[str, Any] = {key: row.text(key) for key in ("operation", "dtype", "layout")}
        assert {key: getattr(workload, key) for key in given} == given
        assert workload.deterministic is row.deterministic and workload.graph.name == row.graph
        assert f"equitune bench row.toml --device {'cuda:0' if backend == 'cuda' else 'cpu'} --fresh" in shown
        seen += 1
    assert seen > 40


def test_a_name_of_another_problem_than_the_shipped_one_gets_no_command() -> None:
    row = suite_row("mace-mp-large", "water", "forward")
    command = kernel_command(SuiteRow(row), "cuda")
    assert "defines 'mace-mp-large': run equitune bench with that file" in command.note and command.text == ""


def test_a_newcomers_page_of_one_tuned_workload_answers_too(tmp_path: Path) -> None:
    folder = write_results(tmp_path / "results", ("mace-made-up",), trials=5)
    (folder / "bench" / f"{SLUG}.json").unlink()
    rows = kernels.kernel_rows(load_device(folder, SLUG))
    assert [row.which for row in rows] == ["forward", "backward", "double_backward"]
    page = page_of(folder, tmp_path / "reports")
    first = plain(page.text.split("<main>")[0])
    assert "Equitune's kernels are 12× as fast as the fastest peer on the mean of 3 rows" in first
    for words in ("mace-made-up · mof · ", "cuEquivariance (naive) fastest peer", "e3nn stock", "untuned default"):
        assert words in first, words
    data = json.loads((folder / f"{SLUG}.json").read_text())
    for entry in data["entries"]:
        entry["peers"] = {}
    (folder / f"{SLUG}.json").write_text(json.dumps(data))
    first = plain(page_of(folder, tmp_path / "reports").text.split("<main>")[0])
    assert "tuned kernels are 1.41× as fast as the untuned default on the mean of 3 rows" in first
    assert first.count("1.41× as fast") == 2, "in the sentence and beside the bar"


def test_a_picker_of_one_row_and_names_that_need_care(tmp_path: Path) -> None:
    page = page_of(
        write_suite(tmp_path / "results", [suite_row("a <b> & c", "water", "forward")]), tmp_path / "reports"
    )
    assert "a &lt;b&gt; &amp; c" in page.text and "<b>" not in page.text
    assert page.choices("kernel-rows")["rows"][0][0] == "a <b> & c", "the script makes text of it, not markup"
