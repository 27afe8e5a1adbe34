"""Trials packed for git: one ``results/trials/DEVICE.jsonl.gz`` holds the studies that the device's entries name.

A run writes ``trials/DEVICE/STUDY.jsonl`` (:mod:`autotune.database.trial_records`), which git ignores. :func:`pack`
joins these files with what is packed already. Everybody else reads through :func:`read_study` and :func:`read_device`,
which take both forms together. The folder ``record`` (``equitune record``) is packed in the same way, all of it.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.database import trial_records
from autotune.database.store import replace_file
from autotune.errors import DatabaseError
from kernelgen.errors import cause_of

Lines = list[dict[str, Any]]
SUFFIX = ".jsonl.gz"
# Studies keep the raw samples of so many of their fastest trials; quartiles of all stay.
WITH_SAMPLES = 10
# How a packed line begins: most are passed over by it, unparsed.
_PLAIN_STUDY = re.compile(rb'\{"study": "([A-Za-z0-9_.-]+)"')


def archive_of(folder: Path) -> Path:
    """The packed form of a device's folder of studies."""
    return folder.with_name(folder.name + SUFFIX)


def studies_in(path: Path) -> list[Path]:
    """The trial file of every study of an archive or of a folder, sorted; a path of one study is itself."""
    folder = path.with_name(path.name.removesuffix(SUFFIX)) if path.name.endswith(SUFFIX) else path
    if folder == path and not path.is_dir():
        return [path]
    return [folder / f"{study}.jsonl" for study in read_device(folder)[0]]


def read_study(path: Path) -> Lines:
    """Every record of the study whose trial file is (or was) ``path``: those only packed first, then the file's."""
    return _joined(_packed(path.parent, path.stem).get(path.stem, []), trial_records.read(path))


def packed_only(path: Path, known: Iterable[tuple[str, str]]) -> Lines:
    """Packed records of a study, but those with a known identity (:func:`autotune.database.trial_records.identity`)."""
    seen = set(known)
    return [
        line for line in _packed(path.parent, path.stem).get(path.stem, []) if trial_records.identity(line) not in seen
    ]


def read_device(folder: Path) -> tuple[dict[str, Lines], int]:
    """All studies of a device by file stem, and how many lines of its trial files are no records.

    folder: ``results/trials/DEVICE``. A killed run leaves at most its last line half written.
    """
    found, unreadable = _packed(folder), 0
    for path in sorted(folder.glob("*.jsonl")):
        lines = trial_records.read(path)
        unreadable += sum(map(bool, map(bytes.strip, path.read_bytes().splitlines()))) - len(lines)
        found[path.stem] = _joined(found.get(path.stem, []), lines)
    return dict(sorted(found.items())), unreadable


def _joined(packed: Lines, working: Lines) -> Lines:
    seen = {trial_records.identity(line) for line in working}
    return [line for line in packed if trial_records.identity(line) not in seen] + working


def _packed(folder: Path, only: str | None = None) -> dict[str, Lines]:
    """Packed studies by file stem, or that of one."""
    found: dict[str, Lines] = {}
    for line in _lines(archive_of(folder)):
        plain = _PLAIN_STUDY.match(line)
        if only is not None and plain and plain[1] != only.encode():
            continue
        for record in trial_records.readable([line]):
            if only in (None, stem := _stem(record)):
                found.setdefault(stem, []).append(record)
    return found


def _stem(record: dict[str, Any]) -> str:
    return trial_records.study_path(Path(), "", str(record.get("study"))).stem


def _lines(archive: Path) -> Iterator[bytes]:
    try:
        with gzip.open(archive) as file:
            yield from file
    except FileNotFoundError:
        return
    except (OSError, EOFError, zlib.error) as error:
        raise DatabaseError(
            f"{archive} cannot be read ({cause_of(error)}); expected what `equitune db pack` wrote: "
            "restore it, or move it away"
        ) from error


@dataclass(frozen=True)
class Packed:
    """``missing``: studies that were asked for and have no record in either form."""

    path: Path
    studies: int
    lines: int
    missing: tuple[str, ...]


def pack(folder: Path, cited: Mapping[str, Lines] | None = None) -> Packed:
    """Write the archive of a device's folder from its trial files and what is packed already; equal input, equal bytes.

    cited: schedules that entries name, by the stem of their study; other studies are left out, and the samples of these
    schedules are kept. None: every study is packed.
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
        archive.parent.mkdir(parents=True, exist_ok=True)
        replace_file(archive, gzip.compress(text.encode(), 9, mtime=0))
    missing = tuple(study for study in wanted if study not in kept)
    return Packed(archive, len(kept), text.count("\n"), missing)


def _thinned(lines: Lines, schedules: Lines) -> Lines:
    """Without the raw samples of all but the fastest trials and those of ``schedules``."""
    timed = sorted((line for line in lines if _has_time(line)), key=lambda line: line["time_us"])
    keep = {id(line) for line in timed[:WITH_SAMPLES]}
    return [
        line
        if id(line) in keep or line.get("schedule") in schedules or not line.get("samples_us")
        else {**line, "samples_us": []}
        for line in lines
    ]


def _has_time(line: dict[str, Any]) -> bool:
    return line.get("state") == "ok" and isinstance(line.get("time_us"), int | float)
