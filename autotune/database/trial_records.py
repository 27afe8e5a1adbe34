"""Trial records: one JSON object per line, on the disk (flush and fsync) before the next trial starts.

A process may be killed in the middle of a line: reading skips invalid lines with a warning, and appending first ends an
incomplete last line. :mod:`autotune.database.trial_archive` also reads the records packed for git.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.paths import named_in_errors
from kernelgen.files import parse_json


def study_path(results_dir: Path, device_slug: str, study: str, folder: str = "trials") -> Path:
    """``results/FOLDER/DEVICE/STUDY.jsonl``, with unsuitable characters of file names replaced."""
    return Path(results_dir) / folder / device_slug / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', study)}.jsonl"


def lock_path(path: Path) -> Path:
    """The lock file of a trial file, kept with the Optuna storage and not among the results."""
    return path.parents[2] / "studies" / f"{path.parent.name}-{path.stem}.lock"


def append(path: Path, record: dict[str, Any]) -> None:
    """Append one line; returns once it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, allow_nan=False).encode() + b"\n"
    with named_in_errors(path), open(path, "a+b", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        while line:  # a nearly full disk writes a part, and fails only at the next write
            line = line[file.write(line) :]
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """Every complete record of a file, oldest first; none if the file does not exist."""
    return read_from(path, 0)[0]


def read_from(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The records after a byte offset of a file, and the offset from which to continue later.

    A last line without a line end counts if it is a valid record; otherwise it may be incomplete and is read again.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return [], offset
    found, skipped = [], 0
    for line in lines:
        record = _record(line)
        if record is not None:
            found.append(record)
        elif not line.endswith(b"\n"):
            break
        else:
            skipped += bool(line.strip())
        offset += len(line)
    if skipped:
        warnings.warn(f"{path}: {skipped} of {len(lines)} lines are no records and are skipped", stacklevel=2)
    return found, offset


def readable(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The records among these lines."""
    return [record for line in lines if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def is_trial(record: dict[str, Any]) -> bool:
    """Whether a study can use the record: it has a schedule, a state and, if the trial succeeded, a time."""
    time_us = record.get("time_us")
    timed = isinstance(time_us, int | float) and math.isfinite(time_us) and time_us > 0
    resources = record.get("resources", {})
    known = isinstance(record.get("schedule"), dict) and isinstance(resources, dict)
    known = known and all(isinstance(value, int | float) for value in resources.values())
    return known and isinstance(record.get("state"), str) and (timed or record["state"] != "ok")


def from_storage(data: Any) -> dict[str, Any] | None:
    """A record read from a storage, validated because others may write there; None if it is no trial record."""
    try:
        record = _record(json.dumps(data, allow_nan=False).encode())
        if record is None or not is_trial(record):
            return None
        json.dumps(record, allow_nan=False)  # fails for numbers too large for a float, which became infinite
        return record
    except (TypeError, ValueError, RecursionError):
        return None


def identity(record: dict[str, Any]) -> tuple[str, str]:
    """Generator version and schedule, unique in a trial file."""
    return str(record.get("generator")), json.dumps(record.get("schedule"), sort_keys=True)
