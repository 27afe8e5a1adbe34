"""Sections on the method (text, problems) and the provenance (device facts, versions, commands) of every number."""

from __future__ import annotations

import math
from typing import Any

from autotune.report.data.device_data import DeviceData
from autotune.report.html.markup import Cell, Column, Content, Markup, definitions, folded, join, table, tag
from autotune.text import MISSING, bytes_text, count, direction_name, entry_note

PROBLEM_COLUMNS = ("Problem", "First input", "Second input", "Output", "Paths", "Weights")
STEPS = (
    ("Verification", "Every schedule is checked before it is timed. It writes to outputs filled with NaN, and each block of each output and gradient is compared with e3nn in float64. A schedule whose relative error exceeds the tolerance is recorded as wrong and never timed. The table gives the winner's largest error."),  # noqa: E501
    ("Cold cache", "After warm-up calls, each sample starts with an overwritten last-level cache, as other layers of a model would leave it. In a comparison, other contenders run between two samples. In a search on a small graph, the instruction caches are also filled with other code."),  # noqa: E501
    ("Samples", "At least ten. Sampling ends when the 95% interval of the median is narrow, or when time is up. A search stops early on schedules whose first samples are far too slow. Tables show the median and the quartiles. The raw samples are below each row of the bench; those of a search's ten fastest schedules are in the packed trials."),  # noqa: E501
    ("Fresh process", "The fastest of many noisy measurements looks faster than it is. So the best three schedules of a study are measured again in a new process, in turns with the default and the peers. Only those times are published. Times of the search appear only in the progress and knob figures."),  # noqa: E501
    ("Peers", "Each peer runs in its fastest form for this device, after its own autotuning, and is checked against the same reference. If a peer's own kernels did not run, it is shown as failed, with the reason."),  # noqa: E501
    ("Traffic floor", "The compulsory bytes (every input read once, every output written once) divided by the bandwidth of a large copy on this device."),  # noqa: E501
)  # fmt: skip


def method(data: DeviceData) -> Markup:
    """How the numbers were made."""
    clock = "CUDA events around a queued call" if _backend(data) == "cuda" else "the wall clock around a call"
    steps = [tag("li", tag("strong", f"{title}. "), text) for title, text in STEPS]
    steps.insert(3, tag("li", tag("strong", "Clock. "), f"Times are taken with {clock}, in microseconds."))
    return join((tag("ul", *steps, class_="prose"), _problems(data)))


def provenance(data: DeviceData) -> Markup:
    """Where the numbers come from: device, versions and commands."""
    device = tag("div", tag("h3", "Device"), definitions(_facts(data)), class_="facts")
    return join((device, tag("div", tag("h3", "Software"), definitions(_software(data)), class_="facts"), _rerun(data)))


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
    """What the labels mean."""
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
    return join((tag("h3", "Problems"), table("Irreps of each problem", columns, rows)))


def _rerun(data: DeviceData) -> Markup:
    device = "cuda:0" if _backend(data) == "cuda" else "cpu"
    commands = "\n".join(
        (
            f"equitune tune configs/CONFIG.toml --device {device} --seed SEED --sampler SAMPLER --trials TRIALS",
            f"equitune bench configs/CONFIG.toml --device {device}",
            f"equitune bench --suite --device {device}",
            f"equitune record configs/CONFIG.toml --device {device}",
            "equitune replay results/record/DEVICE.jsonl.gz",
            "equitune report",
        )
    )
    text = "In this order: tune and publish; compare whole passes of a config; compare all rows of the suite (an interrupted run continues); time every schedule of a small space; replay samplers on these times, without a device; rebuild this page from stored results. CONFIG.toml is the file whose workloads name the problem and graph. The other values are in the table. A finished study is resumed, not repeated: to search again, name another results folder or storage."  # noqa: E501
    shown = [tag("h3", "Run it again"), tag("p", text), tag("pre", tag("code", commands))]
    rows = [_source(entry) for entry in data.entries]
    if rows:
        columns = [Column("Problem"), Column("Direction", choice=True), Column("Sampler", choice=True)]
        columns += [Column(name, True) for name in ("Seed", "Trials", "Timed")]
        columns += [Column(name) for name in ("Raw trials, in results/", "Date", "Generator")]
        origins = table("Search behind each entry", columns, rows, sortable=True)
        summary = tag("summary", f"Search behind each entry: {count(len(rows))} searches")
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
