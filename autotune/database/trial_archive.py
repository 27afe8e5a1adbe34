"""Trials packed for git: one ``results/trials/DEVICE.jsonl.gz`` holds the studies that the device's entries cite.

A run writes ``trials/DEVICE/STUDY.jsonl`` (:mod:`autotune.database.trial_records`), which git ignores. :func:`pack`
adds these files to the archive. :func:`read_study` and :func:`read_device` read both forms together. The whole folder
``record`` (``equitune record``) is packed in the same way.
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
# Number of fastest trials of a study that keep their raw samples; all trials keep their quartiles.
WITH_SAMPLES = 10
# Most bytes of an archive's text and of a line in it, some thirty and three hundred times what the largest has: a few
# kilobytes of a stranger's archive can unpack to any number.
MOST_BYTES, MOST_LINE = 1 << 29, 1 << 20
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
    return _joined(_packed(path.parent, path.stem).get(path.stem, []), trial_records.read(path))


def packed_only(path: Path, known: Iterable[tuple[str, str]]) -> Lines:
    """Packed records of a study without those of ``known`` identity, see ``trial_records.identity``."""
    seen = set(known)
    return [
        line for line in _packed(path.parent, path.stem).get(path.stem, []) if trial_records.identity(line) not in seen
    ]


def read_device(folder: Path) -> tuple[dict[str, Lines], int]:
    """All studies of a device by file stem, and the number of invalid lines in its trial files.

    folder: ``results/trials/DEVICE``. A killed run leaves at most its last line incomplete.
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
    """Packed studies by file stem, or only one of them."""
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
        archive.parent.mkdir(parents=True, exist_ok=True)
        replace_file(archive, gzip.compress(text.encode(), 9, mtime=0))
    missing = tuple(study for study in wanted if study not in kept)
    return Packed(archive, len(kept), text.count("\n"), missing)


def _thinned(lines: Lines, schedules: Lines) -> Lines:
    """Drop raw samples except those of the fastest trials and of ``schedules``."""
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
