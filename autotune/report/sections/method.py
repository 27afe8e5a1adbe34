"""How it was measured: prose, problems, device facts, versions and how to run every number again. DeviceData in."""

from __future__ import annotations

import math
from typing import Any

from autotune.report.data.device_data import DeviceData
from autotune.report.html.markup import Cell, Column, Content, Markup, definitions, folded, join, table, tag
from autotune.text import MISSING, bytes_text, count, direction_name, entry_note

PROBLEM_COLUMNS = ("Problem", "First input", "Second input", "Output", "Paths", "Weights")
STEPS = (
    ("Verification", "Before it is timed, every schedule runs on outputs filled with NaN and is compared with e3nn in float64: each output and each gradient, block by block, as a relative error. A schedule above the tolerance is recorded as wrong and never timed. The table gives the winner's largest error."),  # noqa: E501
    ("Cold cache", "Warm-up calls come first. Then every sample starts with a last-level cache that was just overwritten, as the layers before and after would leave it; in a search on a small graph with instruction caches full of other code too, in a comparison behind the other contenders."),  # noqa: E501
    ("Samples", "At least ten; sampling goes on until the median's 95% interval is narrow or the time is up. During the search, a schedule that its first samples show to be hopeless is given up earlier. Published are the median and the quartiles; the raw samples open below each row of the bench, those of the search stay in the trial files."),  # noqa: E501
    ("Fresh process", "The fastest of many noisy measurements is flattered. So the best three schedules of a study are measured again in a new process, in turns with the default and the peers, and only those figures are published. The times of the search itself appear in the progress and knob figures alone."),  # noqa: E501
    ("Peers", "Each runs in its fastest form for this device, warmed up until it has tuned itself, and is checked against the same reference. A peer whose own kernels did not run is shown as failed with its reason, never as a number."),  # noqa: E501
    ("Traffic floor", "The compulsory bytes, every input read once and every output written once, divided by the bandwidth that a large copy reaches on this device."),  # noqa: E501
)  # fmt: skip


def method(data: DeviceData) -> Markup:
    """Section 9."""
    clock = "CUDA events around a queued call" if _backend(data) == "cuda" else "the wall clock around a call"
    steps = [tag("li", tag("strong", f"{title}. "), text) for title, text in STEPS]
    steps.insert(3, tag("li", tag("strong", "Clock. "), f"Times are taken with {clock}, in microseconds."))
    return join(
        (
            tag("ul", *steps, class_="prose"),
            _problems(data),
            tag("div", tag("h3", "Device"), definitions(_facts(data)), class_="facts"),
            tag("div", tag("h3", "Software"), definitions(_software(data)), class_="facts"),
            _rerun(data),
        )
    )


def _backend(data: DeviceData) -> str:
    return str(data.device.get("backend") or "cpu")


def _facts(data: DeviceData) -> list[tuple[str, Content]]:
    facts: list[tuple[str, Content]] = []
    for name, value in data.device.items():
        if not isinstance(value, dict | list) and value is not None:
            facts.append((name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)))
    bandwidths = data.rows["copy_bandwidth"].dropna()
    if len(bandwidths):
        low, high = bytes_text(bandwidths.min()), bytes_text(bandwidths.max())
        facts.append(("copy bandwidth", f"{low}/s" if low == high else f"{low}/s to {high}/s"))
    return facts


def _software(data: DeviceData) -> list[tuple[str, Content]]:
    generators = sorted({str(value) for value in data.rows["generator"].dropna()})
    versions: list[tuple[str, Content]] = [("generator", ", ".join(generators) or MISSING)]
    return versions + sorted(data.software.items())


def _problems(data: DeviceData) -> Markup | None:
    """What the labels stand for."""
    rows = []
    for label, key in data.rows[["label", "problem"]].dropna().drop_duplicates().itertuples(index=False):
        parts = str(key).split("|")
        if len(parts) != 8:
            rows.append([Cell(label), Cell(str(key), kind="wrap"), *(Cell(MISSING) for _ in range(4))])
            continue
        paths = len([path for path in parts[4].split(",") if path])
        irreps = [Cell(part, kind="wrap") for part in parts[1:4]]
        rows.append([Cell(label), *irreps, Cell(count(paths)), Cell(parts[5])])
    if not rows:
        return None
    columns = [Column(name, name == "Paths") for name in PROBLEM_COLUMNS]
    return join((tag("h3", "Problems"), table("What the names stand for", columns, rows)))


def _rerun(data: DeviceData) -> Markup:
    device = "cuda:0" if _backend(data) == "cuda" else "cpu"
    commands = "\n".join(
        (
            f"equitune tune configs/CONFIG.toml --device {device} --seed SEED --sampler SAMPLER --trials TRIALS",
            f"equitune bench configs/CONFIG.toml --device {device}",
            f"equitune bench --suite --device {device}",
            f"equitune record configs/CONFIG.toml --device {device}",
            "equitune replay results/record/DEVICE/STUDY.jsonl",
            "equitune report",
        )
    )
    text = "Search and publish; compare whole passes of a config; compare all rows of the suite (a run that was stopped goes on where it was); measure every schedule of a small space and replay samplers against it, which needs no device; rebuild this page from the stored results. CONFIG.toml is the file whose workloads name the problem and graph; the other values are in the table. A finished study is resumed, not repeated: give another results folder or storage to search anew."  # noqa: E501
    shown = [tag("h3", "Run it again"), tag("p", text), tag("pre", tag("code", commands))]
    rows = [_source(entry) for entry in data.entries]
    if rows:
        columns = [Column("Problem"), Column("Direction", choice=True), Column("Sampler", choice=True)]
        columns += [Column(name, True) for name in ("Seed", "Trials", "Timed")]
        columns += [Column(name) for name in ("Raw trials, in results/", "Date", "Generator")]
        origins = table("Where each number comes from", columns, rows, sortable=True)
        summary = tag("summary", f"Where each number comes from: {count(len(rows))} searches")
        shown.append(tag("details", summary, folded(origins)))
    return join(shown)


def _source(entry: dict[str, Any]) -> list[Cell]:
    trials = entry.get("trials") if isinstance(entry.get("trials"), dict) else {}
    file = trials.get("file") if trials else None
    return [
        Cell(entry.get("label"), None, entry_note(entry)),
        Cell(direction_name(entry.get("direction"))),
        *(Cell(_shown(trials.get(name) if trials else None)) for name in ("sampler", "seed", "count", "ok")),
        Cell(tag("code", file) if file else MISSING, kind="wrap"),
        Cell(str(entry.get("date") or MISSING)[:10]),
        Cell(tag("code", entry["generator"]) if entry.get("generator") else MISSING),
    ]


def _shown(value: Any) -> str:
    return MISSING if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
