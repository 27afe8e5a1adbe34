"""The data of one device that a page shows, and the rows of all devices of a results folder."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from autotune.bench.model_rows import ModelRow, model_rows
from autotune.bench.rows import SuiteRow, mapping, number, sample_times
from autotune.database.trials import SUFFIX, read_device
from autotune.errors import ReportError
from autotune.report.rows import entry_row
from kernelgen.errors import cause_of
from kernelgen.files import parse_json

# Read results files as frozen data: DEVICE.json, bench/DEVICE.json, models/DEVICE.json, trials (packed or not) and
# replay/*.json. A file may be missing and a field None or NaN; a file that is not JSON is a ReportError.

PASSES = (
    *("forward", "backward", "edge_backward", "feature_backward", "double_backward", "joint_backward"),
    *("forward+backward", "force_step"),
)
# Most panels of one kind on a page: a suite has hundreds of rows and studies, which tables show completely.
PANELS = 36
TRIAL_COLUMNS = (
    *("study", "file", "number", "state", "reason", "schedule", "time_us", "compile_s", "generator", "time"),
    "samples_us",
)


@dataclass(frozen=True)
class DeviceRows:
    """The measured rows of one device. suite: the bench rows. models: whole models. largest: the largest crystals."""

    slug: str
    device: dict[str, Any]
    suite: tuple[SuiteRow, ...]
    models: tuple[ModelRow, ...]
    largest: tuple[ModelRow, ...] = ()

    @property
    def name(self) -> str:
        return str(self.device["name"])

    @property
    def ratios(self) -> list[float]:
        """The speed-ups of kernels over their fastest peers."""
        return [row.ratio for row in self.suite if not row.deterministic and not math.isnan(row.ratio)]

    @property
    def copy_rate(self) -> float:
        """Bytes a second of a large copy; 0 if unknown."""
        rates = (1e6 * row.bytes / row.floor_us for row in self.suite if not row.deterministic)
        return max((rate for rate in rates if rate > 0), default=0.0)


@dataclass(frozen=True)
class DeviceData(DeviceRows):
    """Everything that one page shows. tuned: a row per published entry. trials: one per trial, time in microseconds.

    replays: by name of file.
    """

    tuned: tuple[SuiteRow, ...] = ()
    trials: pd.DataFrame = field(default_factory=pd.DataFrame)
    unreadable_lines: int = 0
    replays: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        return str(self.device.get("backend") or "cpu")

    @property
    def rows(self) -> tuple[SuiteRow, ...]:
        """Of kernels: the tuned ones and those of the bench."""
        return (*self.tuned, *self.suite)

    @property
    def software(self) -> dict[str, str]:
        """Version by name, of the newest row that tells."""
        versions: dict[str, str] = {}
        for row in sorted(self.rows, key=lambda row: str(row.record.get("date"))):
            versions |= {str(name): str(version) for name, version in mapping(row.record.get("software")).items()}
        return versions


def device_slugs(results_dir: Path) -> list[str]:
    """Slugs of devices with a database, rows of kernels or models, or trials."""
    files = [path for folder in (".", "bench", "models") for path in (results_dir / folder).glob("*.json")]
    slugs = {path.stem for path in files if "." not in path.stem}  # not NAME.corrupt-TIME.json, a corrupt copy
    slugs |= {path.parent.name for path in (results_dir / "trials").glob("*/*.jsonl")}
    slugs |= {path.name.removesuffix(SUFFIX) for path in (results_dir / "trials").glob(f"*{SUFFIX}")}
    return sorted(slugs)


def all_rows(results_dir: Path) -> tuple[DeviceRows, ...]:
    """Every device with rows of kernels or models, by slug."""
    every = (_rows(results_dir, slug) for slug in device_slugs(results_dir))
    return tuple(rows for rows in every if rows.suite or rows.models)


def _rows(results_dir: Path, slug: str) -> DeviceRows:
    bench, models = (read_record(results_dir / folder / f"{slug}.json") for folder in ("bench", "models"))
    device = {"slug": slug, "name": slug} | mapping(models.get("device")) | mapping(bench.get("device"))
    suite = tuple(map(SuiteRow, _in_order(bench.get("rows"))))
    return DeviceRows(slug, device, suite, model_rows(models), model_rows(models, largest=True))


def load_device(results_dir: Path, slug: str) -> DeviceData:
    """All results of one device."""
    rows, database = _rows(results_dir, slug), read_record(results_dir / f"{slug}.json")
    trials, unreadable = _trials(results_dir / "trials" / slug)
    replays = {path.stem: read_record(path) for path in sorted((results_dir / "replay").glob("*.json"))}
    return DeviceData(
        slug,
        rows.device | mapping(database.get("device")),
        rows.suite,
        rows.models,
        rows.largest,
        tuned=tuple(map(entry_row, _in_order(database.get("entries")))),
        trials=trials,
        unreadable_lines=unreadable,
        # A replay without a device belongs to all.
        replays={name: data for name, data in replays.items() if data.get("device") in (None, slug)},
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


def _in_order(records: Any) -> list[dict[str, Any]]:
    """Records of kernels by problem, graph and pass."""

    def place(record: dict[str, Any]) -> tuple[Any, ...]:
        name, graph = str(record.get("pass") or record.get("direction")), mapping(record.get("graph"))
        which = PASSES.index(name) if name in PASSES else len(PASSES)
        rest = tuple(str(record.get(key)) for key in ("dtype", "layout", "operation", "graph_class"))
        first = (str(record.get("label")), number(graph.get("edges")), str(graph.get("name")), which, *rest)
        return (*first, record.get("deterministic") is True)  # a deterministic row follows the normal one of its kernel

    return sorted((record for record in records or () if isinstance(record, dict)), key=place)


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
