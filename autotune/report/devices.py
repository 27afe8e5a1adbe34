"""The data of one device that a page shows, and the rows of all devices of a results folder."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from autotune.database.trials import SUFFIX, read_device
from autotune.errors import ReportError
from autotune.report.rows import ModelRow, SuiteRow, largest_rows, mapping, model_rows, number, sample_times
from autotune.text import DEFAULT, TUNED
from kernelgen.errors import cause_of
from kernelgen.files import parse_json

# The rows of all devices in a results folder, for pages that compare devices.


@dataclass(frozen=True)
class DeviceRows:
    """The measured rows of one device."""

    slug: str
    device: dict[str, Any]
    suite: tuple[SuiteRow, ...]
    models: tuple[ModelRow, ...]

    @property
    def name(self) -> str:
        return str(self.device.get("name") or self.slug)


def all_rows(results_dir: Path) -> tuple[DeviceRows, ...]:
    """Every device with rows of kernels or models, by slug."""
    found = (_rows(results_dir, slug) for slug in device_slugs(results_dir))
    return tuple(rows for rows in found if rows.suite or rows.models)


def _rows(results_dir: Path, slug: str) -> DeviceRows:
    bench, models = (read_record(results_dir / folder / f"{slug}.json") for folder in ("bench", "models"))
    device = mapping(models.get("device")) | mapping(bench.get("device"))
    suite = tuple(SuiteRow(row) for row in bench.get("rows") or () if isinstance(row, dict))
    return DeviceRows(slug, device, suite, model_rows(models))


# Read a device's results files into pandas frames, as one frozen DeviceData.
#
# The files are results/DEVICE.json, bench/DEVICE.json, models/DEVICE.json, trials (packed or not) and replay/*.json. A
# file may be missing and a field None or NaN; a file that is not JSON is a ReportError.

PASSES = (
    *("forward", "backward", "edge_backward", "feature_backward", "double_backward", "joint_backward"),
    *("forward+backward", "force_step"),
)
# Most panels of one kind on a page: a suite has hundreds of rows and studies, which tables show completely.
PANELS = 36
IDENTITY = ("label", "problem", "operation", "direction", "dtype", "layout", "graph_class")
ROW_COLUMNS = (
    *("source", *IDENTITY, "deterministic", "graph", "edges", "nodes", "floor_us", "bytes", "copy_bandwidth"),
    *("error", "error_slot", "tolerance", "generator", "date", "study", "study_file"),
)
TIME_COLUMNS = ("row", "contender", "time_us", "q1_us", "q3_us", "error")
TRIAL_COLUMNS = (
    *("study", "file", "number", "state", "reason", "schedule", "time_us", "compile_s", "generator", "time"),
    "samples_us",
)


@dataclass(frozen=True)
class DeviceData:
    """Everything that one page shows. The index of ``rows`` is the ``row`` of ``times``.

    rows: one per tuned entry (``source`` tuned) or bench row (``source`` bench). times: one per row and contender, in
    microseconds; if a contender failed, ``error`` has the reason. trials: one per trial, time in microseconds.
    suite: the bench rows, which hold more than the frames. models: rows of whole models. replays: file name -> results
    of samplers on a record. largest: rows of the largest crystals.
    """

    slug: str
    device: dict[str, Any]
    entries: tuple[dict[str, Any], ...]
    rows: pd.DataFrame
    times: pd.DataFrame
    trials: pd.DataFrame
    software: dict[str, str] = field(default_factory=dict)
    unreadable_lines: int = 0
    suite: tuple[SuiteRow, ...] = ()
    models: tuple[ModelRow, ...] = ()
    replays: dict[str, dict[str, Any]] = field(default_factory=dict)
    largest: tuple[ModelRow, ...] = ()

    def time(self, row: int, contender: str) -> pd.Series | None:
        """The record of one contender on one row, or None."""
        found = self.times[(self.times["row"] == row) & (self.times["contender"] == contender)]
        return None if found.empty else found.iloc[0]

    def contenders(self, source: str) -> list[str]:
        """Tuned, default, then the peers of this source, by name."""
        used = self.times[self.times["row"].isin(self.rows.index[self.rows["source"] == source])]["contender"]
        peers = sorted(set(used) - {TUNED, DEFAULT})
        return [name for name in (TUNED, DEFAULT) if name in set(used)] + peers


def device_slugs(results_dir: Path) -> list[str]:
    """Slugs of devices with a database, rows of kernels or models, or trials."""
    files = [path for folder in (".", "bench", "models") for path in (results_dir / folder).glob("*.json")]
    found = {path.stem for path in files if "." not in path.stem}  # not NAME.corrupt-TIME.json, a corrupt copy
    found |= {path.parent.name for path in (results_dir / "trials").glob("*/*.jsonl")}
    found |= {path.name.removesuffix(SUFFIX) for path in (results_dir / "trials").glob(f"*{SUFFIX}")}
    return sorted(found)


def load_device(results_dir: Path, slug: str) -> DeviceData:
    """All results of one device."""
    database, bench, models = (
        read_record(results_dir / folder / f"{slug}.json") for folder in (".", "bench", "models")
    )
    device = {"slug": slug, "name": slug}
    for record in (models, bench, database):
        device |= mapping(record.get("device"))
    entries = tuple(entry for entry in database.get("entries") or () if isinstance(entry, dict))
    benched = [row for row in bench.get("rows") or () if isinstance(row, dict)]
    rows: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    for record in sorted(entries, key=_order):
        times += _times(len(rows), {TUNED: record, DEFAULT: record.get("default"), **mapping(record.get("peers"))})
        rows.append(_row(record, "tuned"))
    for record in sorted(benched, key=_order):
        times += _times(len(rows), mapping(record.get("times")))
        rows.append(_row(record, "bench"))
    trials, unreadable = _trials(results_dir / "trials" / slug)
    software: dict[str, str] = {}
    for record in sorted([*entries, *benched], key=lambda r: str(r.get("date"))):
        software |= {str(name): str(version) for name, version in mapping(record.get("software")).items()}
    return DeviceData(
        slug,
        device,
        tuple(sorted(entries, key=_order)),
        pd.DataFrame(rows, columns=list(ROW_COLUMNS)),
        pd.DataFrame(times, columns=list(TIME_COLUMNS)),
        trials,
        software,
        unreadable,
        tuple(SuiteRow(record) for record in sorted(benched, key=_order)),
        model_rows(models),
        _replays(results_dir, slug),
        largest_rows(models),
    )


def read_record(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ReportError(
            f"{path}: not readable as JSON ({cause_of(error)}); restore it or move it away, then report again"
        ) from error
    if not isinstance(data, dict):
        raise ReportError(f"{path}: holds a {type(data).__name__}; expected an object with 'device' and its records")
    return data


def _order(record: dict[str, Any]) -> tuple:
    name = str(record.get("pass") or record.get("direction"))
    place = PASSES.index(name) if name in PASSES else len(PASSES)
    graph = mapping(record.get("graph"))
    rest = tuple(str(record.get(key)) for key in ("dtype", "layout", "operation", "graph_class"))
    first = (str(record.get("label")), number(graph.get("edges")), str(graph.get("name")), place, *rest)
    return (*first, record.get("deterministic") is True)  # a deterministic row follows the normal one of its kernel


def _row(record: dict[str, Any], source: str) -> dict[str, Any]:
    graph, trials = mapping(record.get("graph")), mapping(record.get("trials"))
    if source == "tuned":
        errors = {slot: number(value) for slot, value in mapping(record.get("errors")).items()}
    else:
        worst = SuiteRow(record).accuracy(TUNED)
        errors = {worst.place: worst.error} if worst else {}
    # An error that is not a number (NaN, null, infinity) counts as the worst, and is not skipped.
    slot = max(errors, key=lambda s: math.inf if math.isnan(errors[s]) else errors[s], default="")
    row = {key: record.get(key) for key in IDENTITY}
    row |= {
        "source": source,
        "deterministic": record.get("deterministic") is True,
        "direction": str(record.get("pass") or record.get("direction")),
        "graph": graph.get("name"),
        "error": errors.get(slot, math.nan),
        "error_slot": slot,
        "generator": record.get("generator"),
        "date": record.get("date"),
        "study_file": trials.get("file"),
        "study": Path(str(trials["file"])).stem if trials.get("file") else None,
    }
    for key in ("floor_us", "bytes", "copy_bandwidth", "tolerance"):
        row[key] = number(record.get(key))
    return row | {key: number(graph.get(key)) for key in ("edges", "nodes")}


def _times(row: int, contenders: dict[str, Any]) -> list[dict[str, Any]]:
    records = []
    for name, given in contenders.items():
        if not isinstance(given, dict):
            continue
        time = number(given.get("time_us"))
        time = time if time > 0 else math.nan
        error = given.get("error")
        if math.isnan(time) and not error:
            error = "no time was recorded"
        quartiles = {key: number(given.get(key)) for key in ("q1_us", "q3_us")}
        records.append({"row": row, "contender": name, "time_us": time, **quartiles, "error": error})
    return records


def _replays(results_dir: Path, slug: str) -> dict[str, dict[str, Any]]:
    """Replays of one device by file name; a replay without a device belongs to all."""
    found = {path.stem: read_record(path) for path in sorted((results_dir / "replay").glob("*.json"))}
    return {name: data for name, data in found.items() if data.get("device") in (None, slug)}


def _trials(folder: Path) -> tuple[pd.DataFrame, int]:
    """Every trial of every study, and the number of invalid lines (a killed run leaves at most its last)."""
    studies, unreadable = read_device(folder)
    records = []
    for study, lines in studies.items():
        for data in lines:
            record = {key: data.get(key) for key in TRIAL_COLUMNS}
            record |= {"file": study, "state": str(data.get("state")), "schedule": mapping(data.get("schedule"))}
            record |= {key: number(data.get(key)) for key in ("number", "time_us", "compile_s")}
            record["samples_us"] = sample_times(data.get("samples_us"))
            records.append(record)
    frame = pd.DataFrame(records, columns=list(TRIAL_COLUMNS))
    return frame.sort_values(["file", "number"], kind="stable", ignore_index=True), unreadable
