"""The report: made-up results files in a temporary folder enter, the pages and the terminal table are checked."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from report_samples import DEVICE, SLUG, Page, page_of, suite_row, write, write_results

from autotune.bench.rows import SuiteRow
from autotune.cli import commands
from autotune.compare.comparison import LEFT_OUT
from autotune.errors import ReportError
from autotune.report import REFRESH_S, LivePage, summary_table, write_reports
from autotune.report import page as kernels
from autotune.report.devices import load_device
from autotune.report.rows import knob_importances
from autotune.report.sources import Sources
from autotune.report.tuning import TunedRow
from autotune.text import error_text, geometric_mean, ratio_text, time_text
from kernelgen.device import device_facts


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_results(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def page(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(results, tmp_path_factory.mktemp("reports"))


def test_page_is_sound_and_self_contained(page: Page) -> None:
    assert page.text.startswith("<!DOCTYPE html>") and page.counts["html"] == page.counts["main"] == 1
    assert page.loaded == [] and "@import" not in page.text and not re.search(r"url\((?!#)", page.text)
    assert "http://" not in page.text and "https://" not in page.text
    assert len(page.ids) == len(set(page.ids)) and page.targets <= set(page.ids)
    assert page.unlabelled == 0
    assert page.counts["caption"] == page.counts["table"] >= 6
    assert not {"nan", "none", "null"} & {words.strip().lower() for words in page.words}


def test_light_and_dark(page: Page) -> None:
    assert "prefers-color-scheme: dark" in page.text and "@media print" in page.text
    drawings = "".join(re.findall(r"<svg.*?</svg>", page.text, flags=re.S))
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", page.text))
    light, dark = page.text.split("prefers-color-scheme: dark", 1)
    assert {"--fig-text", "--fig-tuned", "--fig-bad"} <= set(re.findall(r"var\((--[a-z0-9-]+)\)", drawings))
    for name in used - {"--share"}:
        assert f"{name}:" in light and f"{name}:" in dark.split("* {")[0], name
    assert not re.search(r"#[0-9a-f]{6}", drawings), "a colour that does not follow the scheme"


def test_every_row_with_its_recorded_numbers(results: Path, page: Page) -> None:
    data = load_device(results, SLUG)
    assert len(data.rows) == 8 and page.counts["svg"] == 2 + 6 + 6 * 3
    shown = {float(value) for value in page.values if re.fullmatch(r"[\d.e+-]+", value)}
    for row in data.rows:
        assert {time_us for time_us in row.times.values() if not math.isnan(time_us)} <= shown
        assert row.peer == "cuequivariance-naive" and row.ratio in shown
        worst = row.accuracy()
        assert worst is None or worst.error in shown
    assert sum(row.accuracy() is not None for row in data.rows) == 6
    text = " ".join(page.words)
    for words in (
        "mace-made-up",
        "nequip-made-up",
        "double backward",
        "forward + backward",
        "11,872",
        "9.12",
        "0123456789",
    ):
        assert words in text
    assert "e3nn compiled: no <C++> compiler was found" in text
    assert f"trials/{SLUG}/mace-made-up-forward.jsonl" in text


def test_a_tuned_row_shows_its_certificate(page: Page) -> None:
    words = " ".join(" ".join(page.words).split())
    for text in ("5.2e-7", "bit for bit", "768", "feedc0dedeadbeef", "cafe0123456789ab"):
        assert text in words, text
    assert "1.410\N{MULTIPLICATION SIGN} (1.387 to 1.432 at 95%)" in words
    assert "faster than the default by the medians; this older entry has no interval" in words


def test_a_default_that_won_is_called_confirmed_if_its_interval_says_so(results: Path) -> None:
    data = load_device(results, SLUG)
    row = next(row for row in (TunedRow(data, row, Sources()) for row in data.tuned) if not row.entry["gain"])
    default = {"gain": {}, "default": {"schedule": row.schedule}}
    for runner_up, said in (({"low": 0.9, "high": 0.97}, "default confirmed"), ({"low": 0.9, "high": 1.2}, "no clear")):
        entry = row.entry | default | {"runner_up": runner_up}
        assert TunedRow(data, SuiteRow(entry), Sources()).gain.startswith(said)


def test_the_sentence_is_about_all_rows(results: Path, page: Page) -> None:
    """Tuned entries that were compared with peers count, and the bench's rows."""
    rows = kernels.kernel_rows(load_device(results, SLUG))
    assert len(rows) == 8
    text = f"On this {DEVICE['name']}, Equitune's kernels are 12× as fast as the fastest peer on the mean of 8 rows, at least 12×."  # noqa: E501
    assert kernels.kernels_sentence(rows, DEVICE["name"]) == text and text in page.words
    assert geometric_mean([2.0, 8.0, math.nan]) == pytest.approx(4.0) and math.isnan(geometric_mean([]))


def test_failures_are_counted_by_state_and_kind_of_reason(results: Path, page: Page) -> None:
    trials = load_device(results, SLUG).trials
    text = "".join(page.words)
    illegal = int((trials["state"] == "illegal").sum())
    assert illegal > 1 and f"{illegal}× about " in text
    assert "out_w: relative error <nan> & above 1e-05" in text


def test_importances_name_the_knob_that_matters(results: Path) -> None:
    trials = load_device(results, SLUG).trials
    study = trials[trials["file"] == "mace-made-up-forward"]
    importances = knob_importances(study)
    assert set(importances.index) == {"fuse", "accumulate", "path_groups", "edges_per_chunk", "channel_block"}
    assert importances["importance"].sum() == pytest.approx(1.0)
    assert importances["explained"].idxmax() == importances.index[0] == "fuse"
    assert knob_importances(study.head(5)).empty


@pytest.mark.parametrize("command", ["quick", "models"])
def test_a_bench_that_is_watched_shows_its_lines_and_each_new_row(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bench rows stand on the page as soon as they are stored, below the last lines."""
    slug, seen, refresh = device_facts("cpu").slug, list[str](), 'http-equiv="refresh"'
    page, rows = tmp_path / "results" / "reports" / f"{slug}.html", [suite_row("made-up", "carbon", "forward")]

    record = tmp_path / "results" / "bench" / f"{slug}.json"
    record.parent.mkdir(parents=True)

    def run(say: Any) -> list[Any]:
        for label in ("first", "second"):
            say(f"{label} <begins>")
            seen.append(page.read_text())
            write(record, {"device": DEVICE, "rows": rows})
            os.utime(record, ns=(0, len(seen)))
            rows.append(suite_row("twice-made", "carbon", "forward"))
        say("end")
        seen.append(page.read_text())
        return []

    monkeypatch.setattr("autotune.bench.kernels.bench", lambda *_, watch, **__: run(watch))
    monkeypatch.setattr("autotune.bench.whole_models.bench_models", lambda request, folder, say: run(say))
    monkeypatch.setattr("webbrowser.open", lambda uri: True)
    options = ["--device", "cpu", "--watch", "--results", str(tmp_path / "results")]
    with pytest.raises(SystemExit) as ended:
        commands.main(["bench", command, *options])
    assert ended.value.code == 0
    assert ["made-up" in text for text in seen] == [False, True, True]
    assert ["twice-made" in text for text in seen] == [False, False, True]
    assert "first &lt;begins&gt;\nsecond &lt;begins&gt;" in seen[1] and all(refresh in text for text in seen)
    assert refresh not in page.read_text() and "twice-made" in page.read_text()


def test_a_page_that_is_watched_loads_itself_until_the_end(results: Path, tmp_path: Path) -> None:
    for folder in (results, tmp_path / "empty"):
        slug = next((path.stem for path in folder.glob("*.json")), "none")
        with LivePage(folder, tmp_path, slug) as live:
            live.show(["mace forward: 3 trials", "<comparing>"], False)
            text = live.path.read_text()
            refresh = f'\n<meta http-equiv="refresh" content="{REFRESH_S}">'
            running = "<pre>mace forward: 3 trials\n&lt;comparing&gt;</pre>"
            assert text.count(refresh) == text.count(running) == 1 and "Content-Security-Policy" in text
            assert ("Nothing is published yet" in text) == (folder != results)
        assert live.path.exists() == (folder == results)
        if folder == results:
            assert live.path.read_text() == text.replace(refresh, "").replace(running, ""), "the plain page is left"


def test_equal_results_give_equal_bytes(tmp_path: Path) -> None:
    results = write_results(tmp_path / "results", ("mace-made-up",), trials=20)
    first = write_reports(results, tmp_path / "a")[0].read_bytes()
    assert write_reports(results, tmp_path / "b")[0].read_bytes() == first
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        f"{SLUG}.{end}" for end in ("html", "details.js", "sources")
    }
    for path in (path for path in (tmp_path / "a").rglob("*") if path.is_file()):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
    assert write_reports(results, tmp_path / "c", only="another-device") == []
    assert [path.stem for path in write_reports(results, tmp_path / "c", only=SLUG)] == [SLUG]


@pytest.mark.parametrize("missing", ["database", "bench", "trials", "peers", "all but trials"])
def test_missing_parts_leave_a_page(tmp_path: Path, missing: str) -> None:
    results = write_results(tmp_path / "results", ("mace-made-up",), trials=20)
    if missing in ("database", "all but trials"):
        (results / f"{SLUG}.json").unlink()
    if missing in ("bench", "all but trials"):
        (results / "bench" / f"{SLUG}.json").unlink()
    if missing == "trials":
        for path in (results / "trials" / SLUG).iterdir():
            path.unlink()
    if missing == "peers":
        data = json.loads((results / f"{SLUG}.json").read_text())
        for record in data["entries"]:
            record["peers"] = {}
        write(results / f"{SLUG}.json", data)
    page = page_of(results, tmp_path / "reports")
    assert page.counts["section"] == (4 if missing in ("bench", "all but trials") else 5), "a roofline needs a bench"
    summary_table(results)


def test_nothing_stored(tmp_path: Path) -> None:
    assert write_reports(tmp_path / "absent", tmp_path / "reports") == []
    assert summary_table(tmp_path / "absent") == "no tuned entry yet"


def test_holes_in_the_records(tmp_path: Path) -> None:
    results = write_results(tmp_path / "results", ("mace-made-up",), trials=20)
    data = json.loads((results / f"{SLUG}.json").read_text())
    first, second, third = data["entries"]
    first |= {"floor_us": None, "q1_us": None, "errors": {"g": math.nan}, "date": None}
    first["peers"] = {"e3nn": {"time_us": None}}
    second |= {"time_us": math.nan, "resources": None, "default": None, "graph": None, "trials": None}
    third.update({key: None for key in third if key not in ("label", "direction")})
    write(results / f"{SLUG}.json", data)
    with open(results / "trials" / SLUG / "mace-made-up-forward.jsonl", "a") as file:
        file.write('{"study": "s", "number": 20, "state": "ok", "time_us": NaN, "schedule": null}\n{"study": "s", ')
    page = page_of(results, tmp_path / "reports")
    text = " ".join(page.words)
    assert "not a number" in text and "no time was recorded" in text and "1 unreadable lines" in text
    assert "failed" in summary_table(results)


def test_a_peer_that_was_left_out_did_not_fail(tmp_path: Path) -> None:
    results = write_results(tmp_path / "results", ("mace-made-up",), trials=0)
    data = json.loads((results / f"{SLUG}.json").read_text())
    for entry in data["entries"]:
        entry["peers"]["e3nn-compiled"] = {"error": LEFT_OUT.format("it takes up to 120 s to compile")}
    write(results / f"{SLUG}.json", data)
    assert "left out" in summary_table(results)
    text = " ".join(page_of(results, tmp_path / "reports").words)
    assert "left out" in text and "a longer --budget, or --peers, includes it" in text


def test_the_table_says_why_a_peer_failed_and_what_few_samples_mean(tmp_path: Path) -> None:
    results = write_results(tmp_path / "results", ("mace-made-up",), trials=0)
    data = json.loads((results / f"{SLUG}.json").read_text())
    for entry in data["entries"]:
        entry["peers"] = {
            "e3nn": {"time_us": 9.0, "q1_us": 9.0, "q3_us": 9.0, "samples": 3},
            "e3nn-compiled": {"error": "the compiler\n   crashed"},
        }
    write(results / f"{SLUG}.json", data)
    table = summary_table(results)
    assert "(3 samples): so few give no interval" in table
    assert table.endswith("e3nn compiled failed: the compiler crashed")


def test_unreadable_results_keep_the_old_page(tmp_path: Path) -> None:
    path = tmp_path / "reports" / f"{SLUG}.html"
    path.parent.mkdir()
    path.write_text("old")
    broken = write_results(tmp_path / "results", ("mace-made-up",), trials=0)
    (broken / f"{SLUG}.json").write_text('{"schema": 1, "entr')
    with pytest.raises(ReportError, match="not readable as JSON"):
        write_reports(broken, tmp_path / "reports")
    assert path.read_text() == "old" and len(list(path.parent.iterdir())) == 1


def test_terminal_table(results: Path) -> None:
    lines = summary_table(results).splitlines()
    assert lines[0].strip() == DEVICE["name"]
    (line,) = [line for line in lines if "nequip-made-up" in line and " forward " in line]
    for words in ("9.12", "34×", "12×", "1.41×", "failed", "47%", "3.1e-7"):
        assert words in line
    assert "\x1b" not in "".join(lines)


def test_the_terminal_table_gives_each_ratio_its_interval(tmp_path: Path) -> None:
    def change(entry: dict[str, Any]) -> None:
        entry["gain"] = {"ratio": 1.41, "low": 1.375, "high": 1.43, "level": 0.95}
        entry["peers"]["e3nn"] |= {"low": 33.0, "high": 35.5}
        entry["peers"]["cuequivariance-naive"] |= {"samples": 3}

    results = write_results(tmp_path / "results", ("nequip-made-up",), trials=0)
    path = results / f"{SLUG}.json"
    data = json.loads(path.read_text())
    for entry in data["entries"]:
        change(entry)
    path.write_text(json.dumps(data))
    table = summary_table(results)
    assert "1.41× (1.38–1.43)" in table and "34× (33.0–35.5)" in table and "12× (3 samples)" in table
    for entry in data["entries"]:
        entry["default"]["schedule"] = entry["schedule"]
    path.write_text(json.dumps(data))
    assert "1.41×" not in summary_table(results), "the default is no gain over itself"


def test_words() -> None:
    times = (7.04, 67.31, 999.0, 9123.4, 812345.0, 2.5e6)
    assert [time_text(value).replace("\N{NO-BREAK SPACE}", " ") for value in times] == [
        "7.04 µs",
        "67.3 µs",
        "999 µs",
        "9.12 ms",
        "812 ms",
        "2.50 s",
    ]
    assert [ratio_text(value) for value in (0.8, 1.414, 34.2, 123.4)] == ["0.80×", "1.41×", "34×", "123×"]
    assert [error_text(value) for value in (3.12e-7, 1e-5, 0.0)] == ["3.1e-7", "1.0e-5", "0"]
