"""Trial records: one JSON object per line, on the disk (flush and fsync) before the next trial starts.

A process may be killed in the middle of a line: reading skips invalid lines with a warning, and appending first ends an
incomplete last line. Records packed for git are read too.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from autotune.database.store import DatabaseWarning, FileCache, replace_file
from autotune.errors import DatabaseError
from autotune.paths import named_in_errors
from kernelgen.errors import cause_of
from kernelgen.files import parse_json
from kernelgen.kernels.knobs import Knobs
from kernelgen.version import GENERATOR_VERSION


def study_path(results_dir: Path, device_slug: str, study: str, folder: str = "trials") -> Path:
    """``results/FOLDER/DEVICE/STUDY.jsonl``, with unsuitable characters of file names replaced."""
    return Path(results_dir) / folder / device_slug / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', study)}.jsonl"


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


# Trials packed for git: one ``results/trials/DEVICE.jsonl.gz`` holds the studies that the device's entries cite.
#
# A run writes ``trials/DEVICE/STUDY.jsonl`` (:mod:`autotune.database.trials`), which git ignores. :func:`pack`
# adds these files to the archive. :func:`read_study` and :func:`read_device` read both forms together. The whole folder
# ``record`` (``equitune record``) is packed in the same way.

Lines = list[dict[str, Any]]
SUFFIX = ".jsonl.gz"
# Number of fastest trials of a study that keep their raw samples; all trials keep their quartiles.
WITH_SAMPLES = 10
# Most bytes of an archive's text and of a line in it, some thirty and three hundred times what the largest has: a few
# kilobytes of a stranger's archive can unpack to any number.
MOST_BYTES, MOST_LINE = 1 << 29, 1 << 20
# Key of a record that says more of an earlier trial of the same identity; the trial is not another one.
AMENDS = "amends"
# Start of a packed line, by which lines of other studies are skipped without parsing.
_PLAIN_STUDY = re.compile(rb'\{"study": "([A-Za-z0-9_.-]+)"')


def archive_of(folder: Path) -> Path:
    """The archive of a device's folder of studies."""
    return folder.with_name(folder.name + SUFFIX)


def studies_in(path: Path) -> list[Path]:
    """The trial files of all studies in an archive or a folder, sorted; for the path of one study, that path."""
    folder = path.with_name(path.name.removesuffix(SUFFIX)) if path.name.endswith(SUFFIX) else path
    if folder == path and not path.is_dir():
        return [path]
    return [folder / f"{study}.jsonl" for study in read_device(folder)[0]]


def read_study(path: Path) -> Lines:
    """Every record of the study with trial file ``path``: records found only in the archive, then the file's."""
    return _joined(_packed(path.parent, path.stem).get(path.stem, []), read(path))


def packed_only(path: Path, known: Iterable[tuple[str, str]]) -> Lines:
    """Packed records of a study without those of ``known`` identity, see :func:`identity`."""
    seen = set(known)
    return [line for line in _packed(path.parent, path.stem).get(path.stem, []) if identity(line) not in seen]


def read_device(folder: Path) -> tuple[dict[str, Lines], int]:
    """All studies of a device by file stem, and the number of invalid lines in its trial files.

    folder: ``results/trials/DEVICE``. A killed run leaves at most its last line incomplete.
    """
    found, unreadable = _packed(folder), 0
    for path in sorted(folder.glob("*.jsonl")):
        lines = read(path)
        unreadable += sum(map(bool, map(bytes.strip, path.read_bytes().splitlines()))) - len(lines)
        found[path.stem] = _joined(found.get(path.stem, []), lines)
    return dict(sorted(found.items())), unreadable


def _joined(packed: Lines, working: Lines) -> Lines:
    """Records found only in the archive, then the file's; one that amends an earlier one stands in its place."""
    amended = {identity(line): {k: v for k, v in line.items() if k != AMENDS} for line in working if line.get(AMENDS)}
    working = [line for line in working if not line.get(AMENDS)] if amended else working
    seen = {identity(line) for line in working}
    lines = [line for line in packed if identity(line) not in seen] + working
    return [amended.get(identity(line), line) for line in lines] if amended else lines


def _packed(folder: Path, only: str | None = None) -> dict[str, Lines]:
    """Packed studies by file stem, or only one of them."""
    found: dict[str, Lines] = {}
    for line in _lines(archive_of(folder)):
        plain = _PLAIN_STUDY.match(line)
        if only is not None and plain and plain[1] != only.encode():
            continue
        if (record := _record(line)) is not None and only in (None, stem := _stem(record)):
            found.setdefault(stem, []).append(record)
    return found


def _stem(record: dict[str, Any]) -> str:
    return study_path(Path(), "", str(record.get("study"))).stem


def _lines(archive: Path) -> Iterator[bytes]:
    left = MOST_BYTES
    try:
        with gzip.open(archive) as file:
            while line := file.readline(MOST_LINE):
                left -= len(line)
                if left < 0 or len(line) == MOST_LINE:
                    raise ValueError("it unpacks to more than trials need")
                yield line
    except FileNotFoundError:
        return
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DatabaseError(
            f"{archive} cannot be read ({cause_of(error)}); expected what `equitune db pack` wrote: "
            "restore it, or move it away"
        ) from error


@dataclass(frozen=True)
class Packed:
    """Result of :func:`pack`. missing: requested studies without a record in either form."""

    path: Path
    studies: int
    lines: int
    missing: tuple[str, ...]


def pack(folder: Path, cited: Mapping[str, Lines] | None = None) -> Packed:
    """Write the archive of a device's folder from its trial files and the present archive; equal input, equal bytes.

    cited: schedules that entries cite, by study. Other studies are left out; these schedules keep their samples. None:
    every study is packed.
    """
    found, _ = read_device(folder)
    wanted = sorted(found) if cited is None else sorted(cited)
    kept = {study: found[study] for study in wanted if found.get(study)}
    text = "".join(
        json.dumps(line if _stem(line) == study else {**line, "study": study}) + "\n"
        for study, lines in kept.items()
        for line in _thinned(lines, (cited or {}).get(study, []))
    )
    archive = archive_of(folder)
    if kept:
        replace_file(archive, gzip.compress(text.encode(), 9, mtime=0))
    missing = tuple(study for study in wanted if study not in kept)
    return Packed(archive, len(kept), text.count("\n"), missing)


def _thinned(lines: Lines, schedules: Lines) -> Lines:
    """Drop raw samples except those of the fastest trials and of ``schedules``."""
    timed = [line for line in lines if line.get("state") == "ok" and isinstance(line.get("time_us"), int | float)]
    timed.sort(key=lambda line: line["time_us"])
    keep = {id(line) for line in timed[:WITH_SAMPLES]}
    return [
        line
        if id(line) in keep or line.get("schedule") in schedules or not line.get("samples_us")
        else {**line, "samples_us": []}
        for line in lines
    ]


# Quarantine: schedules that failed on a device, which this generator version never proposes or loads again.
#
# The list is ``results/quarantine/DEVICE.jsonl``, one fault per line, on the disk before the next trial starts. Delete
# a line to release its schedule. Reading never fails: invalid lines are skipped with a warning.

# States of trials (:data:`autotune.measure.trial.STATES`) for which the kernel is to blame.
FAULTS = ("compile", "launch", "memory", "wrong", "timeout", "crashed")
KERNEL = ("problem", "operation", "direction", "dtype", "layout", "deterministic")
Kernel = tuple[Any, ...]


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
    append(path, line)


def _read_faults(path: Path) -> dict[Kernel, dict[str, str]]:
    """Faults by kernel and schedule."""
    faults: dict[Kernel, dict[str, str]] = {}
    lines = [line for line in read(path) if line.get("generator") == GENERATOR_VERSION]
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


def _no_faults(path: Path, error: OSError) -> dict[Kernel, dict[str, str]]:
    text = f"quarantine {path} cannot be read ({cause_of(error)}); it is ignored"
    warnings.warn(text, DatabaseWarning, stacklevel=2)
    return {}


_faults_in: FileCache[dict[Kernel, dict[str, str]]] = FileCache(_read_faults, {}, _no_faults)
