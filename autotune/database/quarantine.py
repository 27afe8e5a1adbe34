"""Schedules that failed on a device: never proposed, and never loaded, again by the generator that made their kernels.

A kernel's spec and a schedule enter, the reason why it is out of use leaves. The list is ``results/quarantine/
DEVICE.jsonl``, one fault a line, durable before the next trial starts; a line that is taken out frees its schedule.
Reading never fails: what cannot be understood is skipped with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.database import trial_records
from autotune.database.store import DatabaseWarning
from kernelgen.errors import cause_of
from kernelgen.schedule.knobs import Knobs
from kernelgen.version import GENERATOR_VERSION

# States of trials (:data:`autotune.measure.trial.STATES`) that say something bad of the kernel itself.
FAULTS = ("compile", "launch", "memory", "wrong", "timeout", "crashed")
KERNEL = ("problem", "operation", "direction", "dtype", "layout", "deterministic")
Kernel = tuple[Any, ...]

_read: dict[Path, tuple[tuple[int, ...], dict[Kernel, dict[str, str]]]] = {}


def quarantine_path(directory: Path, slug: str) -> Path:
    """The list of a device in a results directory."""
    return directory / "quarantine" / f"{slug}.jsonl"


def kernel_of(spec: Any) -> Kernel:
    """What a schedule is out of use for: a kernel, whatever graph it failed on."""
    return (spec.problem.key, spec.operation, spec.direction.name, spec.dtype, spec.layout, spec.deterministic)


def quarantined(paths: Iterable[Path], spec: Any) -> dict[str, str]:
    """Why each schedule (by its key) is out of use for the kernel of ``spec``, by the lists there are."""
    found: dict[str, str] = {}
    for path in paths:
        found |= _faults_in(path).get(kernel_of(spec), {})
    return found


def note_fault(path: Path, spec: Any, schedule: Knobs, trial: Mapping[str, Any]) -> None:
    """Put a schedule out of use; ``trial``: the record of how it failed."""
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "generator": GENERATOR_VERSION,
        **dict(zip(KERNEL, kernel_of(spec), strict=True)),
        "schedule": schedule.key,
        **{name: trial[name] for name in ("study", "state", "reason")},
    }
    trial_records.append(path, line)


def _faults_in(path: Path) -> dict[Kernel, dict[str, str]]:
    """By kernel and schedule; a file is read again, and warned of, when it has changed."""
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
