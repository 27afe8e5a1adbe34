"""Results files to pandas frames: results/DEVICE.json, bench/DEVICE.json and trials/DEVICE/*.jsonl enter, one frozen
DeviceData leaves. A file may be absent and a field None or NaN; a file that is not JSON is a ReportError.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from kernelgen.errors import EquituneError

TUNED, DEFAULT = "equitune", "equitune-default"
PASSES = ("forward", "backward", "double_backward", "forward+backward")
STATES = ("ok", "illegal", "compile", "launch", "wrong", "timeout", "crashed")
IDENTITY = ("label", "problem", "operation", "direction", "dtype", "layout", "graph_class")
ROW_COLUMNS = (
    *("source", *IDENTITY, "graph", "edges", "nodes", "floor_us", "bytes", "copy_bandwidth"),
    *("error", "error_slot", "tolerance", "generator", "date", "study", "study_file"),
)
TIME_COLUMNS = ("row", "contender", "time_us", "q1_us", "q3_us", "error")
TRIAL_COLUMNS = ("study", "file", "number", "state", "reason", "schedule", "time_us", "compile_s", "generator", "time")


class ReportError(EquituneError, ValueError):
    """A results file that the report cannot read."""


@dataclass(frozen=True)
class DeviceData:
    """All that one page shows. The index of ``rows`` is the ``row`` of ``times``.

    rows: one a tuned entry (``source`` tuned) or bench row (``source`` bench). times: one a row and contender, in
    microseconds; where a contender failed, ``error`` has the reason. trials: one a trial, time in microseconds.
    """

    slug: str
    device: dict[str, Any]
    entries: tuple[dict[str, Any], ...]
    rows: pd.DataFrame
    times: pd.DataFrame
    trials: pd.DataFrame
    software: dict[str, str] = field(default_factory=dict)
    unreadable_lines: int = 0

    def time(self, row: int, contender: str) -> pd.Series | None:
        """The record of one contender on one row, or None."""
        found = self.times[(self.times["row"] == row) & (self.times["contender"] == contender)]
        return None if found.empty else found.iloc[0]

    def contenders(self, source: str) -> list[str]:
        """Tuned, default, then the peers that this source knows, by name."""
        used = self.times[self.times["row"].isin(self.rows.index[self.rows["source"] == source])]["contender"]
        peers = sorted(set(used) - {TUNED, DEFAULT})
        return [name for name in (TUNED, DEFAULT) if name in set(used)] + peers


def number(value: Any) -> float:
    """A finite float, or NaN for None, text, infinities and what is absent."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def device_slugs(results_dir: Path) -> list[str]:
    """Devices that have a database, a bench file or trials."""
    files = [*results_dir.glob("*.json"), *(results_dir / "bench").glob("*.json")]
    found = {path.stem for path in files if "." not in path.stem}  # not NAME.corrupt-TIME.json, which was kept aside
    found |= {path.parent.name for path in (results_dir / "trials").glob("*/*.jsonl")}
    return sorted(found)


def load_device(results_dir: Path, slug: str) -> DeviceData:
    """Everything that ``results_dir`` holds on one device."""
    database, bench = _read(results_dir / f"{slug}.json"), _read(results_dir / "bench" / f"{slug}.json")
    device = {"slug": slug, "name": slug, **_dict(bench.get("device")), **_dict(database.get("device"))}
    entries = tuple(entry for entry in database.get("entries") or () if isinstance(entry, dict))
    benched = [row for row in bench.get("rows") or () if isinstance(row, dict)]
    rows: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    for record in sorted(entries, key=_order):
        times += _times(len(rows), {TUNED: record, DEFAULT: record.get("default"), **_dict(record.get("peers"))})
        rows.append(_row(record, "tuned"))
    for record in sorted(benched, key=_order):
        times += _times(len(rows), _dict(record.get("times")))
        rows.append(_row(record, "bench"))
    trials, unreadable = _trials(results_dir / "trials" / slug)
    software: dict[str, str] = {}
    for record in sorted([*entries, *benched], key=lambda r: str(r.get("date"))):
        software |= {str(name): str(version) for name, version in _dict(record.get("software")).items()}
    return DeviceData(
        slug,
        device,
        tuple(sorted(entries, key=_order)),
        pd.DataFrame(rows, columns=list(ROW_COLUMNS)),
        pd.DataFrame(times, columns=list(TIME_COLUMNS)),
        trials,
        software,
        unreadable,
    )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(
            f"{path}: not readable as JSON ({error}); restore it or move it away, then report again"
        ) from error
    if not isinstance(data, dict):
        raise ReportError(f"{path}: holds a {type(data).__name__}; expected an object with 'device' and its records")
    return data


def _order(record: dict[str, Any]) -> tuple:
    name = str(record.get("pass") or record.get("direction"))
    place = PASSES.index(name) if name in PASSES else len(PASSES)
    graph = _dict(record.get("graph"))
    rest = tuple(str(record.get(key)) for key in ("dtype", "layout", "operation", "graph_class"))
    return (str(record.get("label")), number(graph.get("edges")), str(graph.get("name")), place, *rest)


def _row(record: dict[str, Any], source: str) -> dict[str, Any]:
    graph, trials = _dict(record.get("graph")), _dict(record.get("trials"))
    errors = {slot: number(value) for slot, value in _dict(record.get("errors")).items()}
    # An error that is not a number (NaN, null, infinity) is the worst of all, not one to be skipped.
    slot = max(errors, key=lambda s: math.inf if math.isnan(errors[s]) else errors[s], default=None)
    row = {key: record.get(key) for key in IDENTITY}
    row |= {
        "source": source,
        "direction": str(record.get("pass") or record.get("direction")),
        "graph": graph.get("name"),
        "error": math.nan if slot is None else errors[slot],
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


def _trials(folder: Path) -> tuple[pd.DataFrame, int]:
    """Every trial of every study, and the number of lines that are not JSON (a killed run leaves at most its last)."""
    records, unreadable = [], 0
    for path in sorted(folder.glob("*.jsonl")):
        for line in filter(None, map(str.strip, path.read_text(encoding="utf-8", errors="replace").splitlines())):
            try:
                data = json.loads(line)
            except ValueError:
                data = None
            if not isinstance(data, dict):
                unreadable += 1
                continue
            record = {key: data.get(key) for key in TRIAL_COLUMNS}
            record |= {"file": path.stem, "state": str(data.get("state")), "schedule": _dict(data.get("schedule"))}
            record |= {key: number(data.get(key)) for key in ("number", "time_us", "compile_s")}
            records.append(record)
    frame = pd.DataFrame(records, columns=list(TRIAL_COLUMNS))
    return frame.sort_values(["file", "number"], kind="stable", ignore_index=True), unreadable
