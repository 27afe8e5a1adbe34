"""The report: made-up results files in a temporary folder enter, the pages and the terminal table are checked."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from autotune.report import ReportError, summary_table, write_reports
from autotune.report.data import load_device
from autotune.report.importance import knob_importances
from autotune.report.overview import best_peer, sentence
from autotune.report.words import error_text, geometric_mean, ratio_text, time_text

SLUG = "made-up-cpu-2-cores"
DEVICE = {"name": "Made-up CPU 2 cores", "slug": SLUG, "backend": "cpu", "arch": "x86_64", "units": 2}
KEY = "uvu|8x0e+8x1o|1x0e+1x1o|8x0e+8x1o+8x1o|0.0.0,0.1.1,1.0.2|per-edge|component|element"
VOID = {"meta", "br", "col", "hr", "wbr"}
SCALE = {"forward": 1.0, "backward": 2.3, "double_backward": 4.1, "forward+backward": 3.2}


def timed(time_us: float, **more: Any) -> dict[str, Any]:
    return {"time_us": time_us, "q1_us": round(time_us * 0.985, 2), "q3_us": round(time_us * 1.02, 2), **more}


def schedule(generator: random.Random) -> dict[str, Any]:
    return {
        "backend": "cpu",
        "fuse": generator.random() < 0.7,
        "accumulate": generator.choice(["registers", "atomics"]),
        "path_groups": generator.choice([1, 2, 3, 5]),
        "edges_per_chunk": generator.choice([8, 16, 32, 64, 128]),
        "channel_block": generator.choice([8, 16, 32]),
        "threads": 0,
    }


def trial(number: int, study: str, scale: float, generator: random.Random) -> dict[str, Any]:
    knobs = schedule(generator)
    record: dict[str, Any] = {"study": study, "number": number, "schedule": knobs, "reason": None, "time_us": None}
    chance = generator.random()
    if chance < 0.12:
        reason = f"about {generator.randrange(300, 900)} registers a thread, 2.1 times the 255 there are"
        return record | {"state": "illegal", "reason": reason}
    if chance < 0.17:
        return record | {"state": "timeout", "reason": "no answer within 20 s"}
    if chance < 0.2:
        return record | {"state": "wrong", "reason": "out_w: relative error <nan> & above 1e-05"}
    slow = (1 if knobs["fuse"] else 3.5) * (1 if knobs["accumulate"] == "registers" else 1.6)
    slow *= 1 + abs(math.log2(knobs["channel_block"] / 16)) * 0.3
    return record | {"state": "ok", **timed(round(9000 * scale * slow * generator.uniform(1, 1.1), 3))}


def entry(label: str, direction: str, graph: dict[str, Any]) -> dict[str, Any]:
    generator, scale = random.Random(label + direction), SCALE[direction] * graph["edges"] / 11872
    tuned = round(9123.456 * scale, 3)
    return {
        "label": label, "problem": KEY, "operation": "conv", "direction": direction, "dtype": "float32",
        "layout": "mul_ir", "graph_class": "conv-e14-d5", "graph": graph,
        "schedule": schedule(generator) | {"channel_block": 32}, **timed(tuned),
        "default": {"schedule": schedule(generator) | {"channel_block": 16}, **timed(tuned * 1.41)},
        "peers": {
            "e3nn": timed(tuned * 34.2), "e3nn-compiled": {"error": "no <C++> compiler was found"},
            "cuequivariance-naive": timed(tuned * 12.3),
        },
        "errors": {"g": 3.1e-7} if direction == "forward" else {"x": 2e-7, "y": 4.4e-7, "w": 1e-7},
        "tolerance": 1e-5, "bytes": 52_000_000, "copy_bandwidth": 1.2e10, "floor_us": round(tuned / 2.11, 3),
        "resources": {"code_bytes": 18432, "vector_bytes": 64}, "generator": "0.1.0+0123456789",
        "software": {"python": "3.11.2", "torch": "2.13.0", "e3nn": "0.6.0"}, "date": "2001-02-03T04:05:06+00:00",
        "trials": {"file": f"trials/{SLUG}/{label}-{direction}.jsonl", "count": 60, "ok": 48, "sampler": "tpe"},
    }  # fmt: skip


def write_results(folder: Path, labels: tuple[str, ...] = ("mace-made-up", "nequip-made-up"), trials: int = 60) -> Path:
    """A results folder of one device with entries, a bench and trials."""
    graph = {"name": "mof", "edges": 11872, "nodes": 424}
    entries = [entry(label, name, graph) for label in labels for name in ("forward", "backward", "double_backward")]
    rows = []
    for label in labels:
        record = entry(label, "forward+backward", graph)
        times = {"equitune": timed(record["time_us"]), "equitune-default": timed(record["default"]["time_us"])}
        kept = {key: record[key] for key in ("label", "problem", "operation", "graph", "graph_class", "dtype", "layout",
                                             "bytes", "floor_us", "date", "software", "generator")}  # fmt: skip
        rows.append({**kept, "pass": "forward+backward", "times": {**times, **record["peers"]}})
    (folder / "bench").mkdir(parents=True)
    (folder / "trials" / SLUG).mkdir(parents=True)
    write(folder / f"{SLUG}.json", {"schema": 1, "device": DEVICE, "entries": entries})
    write(folder / "bench" / f"{SLUG}.json", {"schema": 1, "device": DEVICE, "rows": rows})
    for record in entries:
        generator = random.Random(record["label"])
        lines = [json.dumps(trial(n, "s", SCALE[record["direction"]], generator)) for n in range(trials)]
        (folder / record["trials"]["file"]).write_text("\n".join(lines) + "\n")
    return folder


def write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))


class Page(HTMLParser):
    """Balance, ids, references, loaded addresses and the records' numbers of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.open, self.words = text, [], []  # type: ignore[var-annotated]
        self.counts: Counter[str] = Counter()
        self.ids: list[str] = []
        self.targets: set[str] = set(re.findall(r"url\(#([^)]+)\)", text))
        self.loaded: list[str] = []
        self.values: list[str] = []
        self.unlabelled = 0
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(name, attributes)
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.counts[name] += 1
        self.ids += [given["id"] or ""] if "id" in given else []
        self.values += [given["data-value"] or ""] if "data-value" in given else []
        for key in ("src", "href", "data", "srcset", "action"):
            address = given.get(key) or ""
            if address.startswith("#"):
                self.targets.add(address[1:])
            elif address:
                self.loaded.append(address)
        self.unlabelled += name == "svg" and not given.get("aria-label")
        self.unlabelled += name == "th" and given.get("scope") not in ("row", "col")

    def handle_endtag(self, name: str) -> None:
        assert self.open and self.open[-1] == name, f"</{name}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(results: Path, reports: Path) -> Page:
    (path,) = write_reports(results, reports)
    return Page(path.read_text(encoding="utf-8"))


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
    assert len(data.rows) == 8 and page.counts["svg"] == 8 + 6 + 6 * 3
    shown = {float(value) for value in page.values if re.fullmatch(r"[\d.e+-]+", value)}
    for time_us in data.times["time_us"].dropna():
        assert time_us in shown
    for row, record in data.rows.iterrows():
        found = best_peer(data, row)
        assert found is not None and found[0] == "cuequivariance-naive" and found[1] in shown
        assert math.isnan(record["error"]) or record["error"] in shown
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


def test_sentence_and_means(results: Path, page: Page) -> None:
    text = sentence(load_device(results, SLUG)).replace("\N{NO-BREAK SPACE}", " ")
    assert text == (
        "On this device, for mace-made-up on mof (11,872 edges), the tuned forward takes 9.12 ms: 12× as fast as "
        "cuEquivariance (naive), 34× as fast as e3nn, 1.41× as fast as the untuned default, at 2.11× the traffic "
        "floor; its largest relative error is 3.1e-7."
    )
    assert geometric_mean([2.0, 8.0, math.nan]) == pytest.approx(4.0) and math.isnan(geometric_mean([]))
    assert any(abs(float(value) - 34.2) < 1e-3 for value in page.values if re.fullmatch(r"[\d.]+", value))


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


def test_equal_results_give_equal_bytes(tmp_path: Path) -> None:
    results = write_results(tmp_path / "results", ("mace-made-up",), trials=20)
    first = write_reports(results, tmp_path / "a")[0].read_bytes()
    assert write_reports(results, tmp_path / "b")[0].read_bytes() == first
    assert [path.name for path in (tmp_path / "a").iterdir()] == [f"{SLUG}.html"]


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
    assert page.counts["section"] == 8
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
