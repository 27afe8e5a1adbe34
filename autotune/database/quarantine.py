"""Quarantine: schedules that failed on a device, which this generator version never proposes or loads again.

The list is ``results/quarantine/DEVICE.jsonl``, one fault per line, on the disk before the next trial starts. Delete a
line to release its schedule. Reading never fails: invalid lines are skipped with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from autotune.database import trial_records
from autotune.database.store import DatabaseWarning
from kernelgen.errors import cause_of
from kernelgen.kernels.knobs import Knobs
from kernelgen.version import GENERATOR_VERSION

# States of trials (:data:`autotune.measure.trial.STATES`) for which the kernel is to blame.
FAULTS = ("compile", "launch", "memory", "wrong", "timeout", "crashed")
KERNEL = ("problem", "operation", "direction", "dtype", "layout", "deterministic")
Kernel = tuple[Any, ...]

_read: dict[Path, tuple[tuple[int, ...], dict[Kernel, dict[str, str]]]] = {}


def quarantine_path(directory: Path, slug: str) -> Path:
    """The list of a device in a results directory."""
    return directory / "quarantine" / f"{slug}.jsonl"


def kernel_of(spec: Any) -> Kernel:
    """The kernel for which a schedule is quarantined, independent of the graph."""
    return (spec.problem.key, spec.operation, spec.direction.name, spec.dtype, spec.layout, spec.deterministic)


def quarantined(paths: Iterable[Path], spec: Any) -> dict[str, str]:
    """The reason for each quarantined schedule (by key) of the kernel of ``spec``, from these lists."""
    found: dict[str, str] = {}
    for path in paths:
        found |= _faults_in(path).get(kernel_of(spec), {})
    return found


def note_fault(path: Path, spec: Any, schedule: Knobs, trial: Mapping[str, Any]) -> None:
    """Quarantine a schedule; ``trial``: the record of its failure."""
    line = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "generator": GENERATOR_VERSION,
        **dict(zip(KERNEL, kernel_of(spec), strict=True)),
        "schedule": schedule.key,
        **{name: trial[name] for name in ("study", "state", "reason")},
    }
    trial_records.append(path, line)


def _faults_in(path: Path) -> dict[Kernel, dict[str, str]]:
    """Faults by kernel and schedule; a changed file is read again, with its warnings."""
    stamp: tuple[int, ...] = ()
    try:
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size)
        if path not in _read or _read[path][0] != stamp:
            _read[path] = stamp, _understood(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        if path not in _read or _read[path][0] != stamp:
            _read[path] = stamp, {}
            text = f"quarantine {path} cannot be read ({cause_of(error)}); it is ignored"
            warnings.warn(text, DatabaseWarning, stacklevel=2)
    return _read[path][1]


def _understood(path: Path) -> dict[Kernel, dict[str, str]]:
    faults: dict[Kernel, dict[str, str]] = {}
    lines = [line for line in trial_records.read(path) if line.get("generator") == GENERATOR_VERSION]
    skipped = 0
    for line in lines:
        kernel, schedule, state = tuple(line.get(name) for name in KERNEL), line.get("schedule"), line.get("state")
        if state not in FAULTS or not all(isinstance(name, str | bool) for name in (*kernel, schedule)):
            skipped += 1
            continue
        faults.setdefault(kernel, {})[str(schedule)] = f"{state}: {line.get('reason', '')}"
    if skipped:
        warnings.warn(
            f"quarantine {path}: {skipped} of {len(lines)} lines name no kernel, schedule or fault and are skipped",
            DatabaseWarning,
            stacklevel=2,
        )
    return faults
