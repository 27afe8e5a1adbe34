"""Stored rows of comparisons: ``results/bench/DEVICE.json``, one row per workload and pass.

Rows are plain data. A newer row replaces the one with its identity, and the file is replaced whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import filelock

from autotune.database.maintenance import driver_version
from autotune.database.store import device_record, replace_file, text_of_lines
from autotune.workload.config import find_problem
from autotune.workload.kinds.registry import kernel_kind
from kernelgen.device import DeviceFacts
from kernelgen.errors import EquituneError
from kernelgen.files import parse_json

SCHEMA = 1
OURS, DEFAULT = "equitune", "equitune-default"
# Fields whose figures vary by more than their fourth digit from run to run.
ROUNDED, DIGITS = ("errors", "certificates", "order_ms"), 4
IDENTITY = ("problem", "operation", "dtype", "layout", "graph_class", "pass")
Row = dict[str, Any]


def identity_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key of a row. Rows older than the deterministic mode lack that field."""
    return (*(row[name] for name in IDENTITY), row.get("deterministic", False))


def less_accurate(row: Mapping[str, Any]) -> frozenset[str]:
    """Contenders whose errors are larger than our kernels of the problem may have, such as TF32 products for ``ieee``.

    They are timed, but no speed-up is over them. None for a problem that is not known here.
    """
    operation, problem, dtype = (str(row.get(name)) for name in ("operation", "problem", "dtype"))
    limit, errors = _largest_allowed(operation, problem, dtype), row.get("errors")
    given = errors if isinstance(errors, dict) else {}
    return frozenset(name for name, found in given.items() if largest_error(found) > limit)


@functools.lru_cache(maxsize=4096)
def _largest_allowed(operation: str, problem: str, dtype: str) -> float:
    try:
        return kernel_kind(operation).tolerance(find_problem(problem), dtype)
    except (EquituneError, KeyError):
        return math.inf


def largest_error(found: Any) -> float:
    """The largest number among the errors of a contender, by direction, output and perhaps block; 0 without any."""
    if isinstance(found, dict | list):
        return max(map(largest_error, found.values() if isinstance(found, dict) else found), default=0.0)
    return float(found) if isinstance(found, float) and math.isfinite(found) else 0.0


def lost_peers(stored: Row | None, row: Row) -> dict[str, str]:
    """Peers that failed, with the reason, which have a time in the stored row of the same kernels and software.

    What failed is then this machine, not the peer: a library that it lacks, or a compiler that was disturbed.
    """
    if stored is None or any(stored.get(name) != row.get(name) for name in ("sources", "schedules", "software")):
        return {}
    failed = {name: str(result["error"]) for name, result in row["times"].items() if "error" in result}
    timed = {name for name, result in stored["times"].items() if "error" not in result} - {OURS, DEFAULT}
    return {name: reason for name, reason in failed.items() if name in timed}


def bench_path(folder: Path, facts: DeviceFacts) -> Path:
    return folder / "bench" / f"{facts.slug}.json"


def stored_rows(folder: Path, facts: DeviceFacts) -> list[Row]:
    """The device's rows; none if the file is missing or invalid."""
    return _read(bench_path(folder, facts)) or []


def _read(path: Path) -> list[Row] | None:
    """Rows of a file; None if it is invalid."""
    if not path.exists():
        return []
    try:
        rows = parse_json(path.read_bytes())["rows"]
        for row in rows:
            _ = identity_of(row), row["times"].keys()
        return rows
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def store_rows(folder: Path, facts: DeviceFacts, rows: Sequence[Row]) -> list[Row]:
    """Merge rows into the device's file atomically, and return what it has of them; an invalid file is moved aside.

    In the place of a row with :func:`lost_peers` the stored one stays, with the date of this try.
    """
    path = bench_path(folder, facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = folder / "studies" / f"{facts.slug}-bench.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(lock, timeout=60):
        before = _read(path)
        if before is None:
            path.rename(path.with_name(f"{path.stem}.corrupt-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}.json"))
        merged = {identity_of(row): row for row in before or []}
        kept = [_kept(merged.get(identity_of(row)), row) for row in rows]
        merged |= {identity_of(row): row for row in kept}
        replace_file(path, record_text(facts, [merged[identity] for identity in sorted(merged)]))
    return kept


def _kept(stored: Row | None, row: Row) -> Row:
    return stored | {"tried": row["date"]} if stored is not None and lost_peers(stored, row) else row


def record_text(facts: DeviceFacts, rows: Sequence[Row]) -> str:
    """A bench record as JSON with a line for each row, which ``equitune report --compare`` reads."""
    head = {"schema": SCHEMA, "device": device_record(facts, driver_version(facts))}
    return text_of_lines(head, "rows", map(without_noise, rows))


def without_noise(row: Row) -> Row:
    """The row with as many digits of its errors, certificates and ordering times as mean something."""
    return {name: _rounded(value) if name in ROUNDED else value for name, value in row.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
