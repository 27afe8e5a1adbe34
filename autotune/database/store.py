"""The tuned database: one JSON file per device, in the shipped ``results/``, overridden by the user's own files.

Files are sorted and diffable. Many processes may write at once: each save reads the file again and replaces it whole,
under a lock, so no entries are lost and readers see either the old file or the new one. An invalid file is never lost:
readers ignore it with one warning, writers keep a copy beside it as ``NAME.corrupt-TIMESTAMP.json``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Generic, TypeVar

import filelock

from autotune import paths
from autotune.database.entry import Entry, check_json
from autotune.errors import DatabaseError
from autotune.workload.workload import Identity
from kernelgen.device import DeviceFacts
from kernelgen.errors import cause_of
from kernelgen.files import parse_json
from kernelgen.problem.product import shape_of

SCHEMA = 1
LOCK_TIMEOUT_S = 60.0
KernelKey = tuple[str, str, str, str]
T = TypeVar("T")


class DatabaseWarning(UserWarning):
    """A database file or a part of it is ignored; the message gives the file and the reason."""


@dataclass(frozen=True)
class Table:
    """The entries of one file, or of several where later ones override, indexed for lookup.

    by_kernel: entries of one (shape, operation, direction, dtype), of any layout and graph class; see ``shape_of``.
    flaws: invalid parts; empty for a valid file.
    """

    device: Mapping[str, Any] = field(default_factory=dict)
    by_identity: Mapping[Identity, Entry] = field(default_factory=dict)
    by_kernel: Mapping[KernelKey, tuple[Entry, ...]] = field(default_factory=dict)
    flaws: tuple[str, ...] = ()

    @classmethod
    def of(cls, device: Mapping[str, Any], entries: Iterable[Entry], flaws: tuple[str, ...] = ()) -> Table:
        """Later entries replace earlier ones of the same identity."""
        by_identity = {entry.identity: entry for entry in entries}
        by_kernel: dict[KernelKey, list[Entry]] = {}
        for entry in by_identity.values():
            by_kernel.setdefault((shape_of(entry.problem), *entry.identity[1:4]), []).append(entry)
        return cls(device, by_identity, {key: tuple(value) for key, value in by_kernel.items()}, flaws)

    @property
    def first_flaw(self) -> str:
        """The first flaw, and how many more there are; empty for a valid file."""
        more = f" (and {len(self.flaws) - 1} more)" if len(self.flaws) > 1 else ""
        return f"{self.flaws[0]}{more}" if self.flaws else ""


def device_record(facts: DeviceFacts, driver: str | None = None) -> dict[str, Any]:
    """The ``device`` object of a database file, from which a lookup on another device computes the distance."""
    names = ("name", "slug", "backend", "arch", "units", "vector_bytes")
    record: dict[str, Any] = {name: getattr(facts, name) for name in names}
    return record | ({"driver": driver} if driver else {})


def database_dirs() -> tuple[Path, ...]:
    """Directories of databases, the shipped one first; later ones override earlier ones."""
    return tuple(dict.fromkeys((paths.results_dir(), paths.user_data_dir())))


def tuned_dirs() -> tuple[Path, ...]:
    """Directories in which schedules are looked up: none if ``$EQUITUNE_UNTUNED`` asks for default schedules."""
    return () if os.environ.get("EQUITUNE_UNTUNED", "").strip() == "1" else database_dirs()


def writable_results_dir() -> Path:
    """Where ``equitune tune`` writes: ``results/`` of a checkout, or the user's directory if installed."""
    return paths.results_dir() if paths.checkout_dir() else paths.user_data_dir()


def device_files(directory: Path) -> list[Path]:
    """The database files of a folder, sorted; none if it cannot be read.

    A slug has no dot; corrupt copies (NAME.corrupt-TIMESTAMP.json) and temporary files do.
    """
    try:
        return sorted(path for path in directory.glob("*.json") if "." not in path.stem)
    except OSError:
        return []


def is_slug(text: Any) -> bool:
    """Whether it is a device's slug: letters, digits and ``-`` only, so that it cannot point to another folder."""
    return isinstance(text, str) and re.fullmatch(r"[^\W_]([^\W_]|-){0,99}", text) is not None


def database_path(directory: Path, slug: str) -> Path:
    """The file of a device; DatabaseError if the slug is not a plain name (it must not leave the directory)."""
    if not is_slug(slug):
        raise DatabaseError(f"device slug {slug!r} is not a plain name; expected letters, digits and '-'")
    return directory / f"{slug}.json"


def read_table(path: Path) -> Table:
    """Parse one file without caching or warning; invalid parts are listed in ``flaws``.

    A missing file is an empty table. OSError if the file exists but cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Table()
    return parse_table(data)


def parse_table(text: bytes) -> Table:
    """As :func:`read_table`, of a file's bytes."""
    try:
        data = parse_json(text)
    except ValueError as error:
        return Table(flaws=(f"it is not valid JSON ({error})",))
    if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
        return Table(flaws=("it is not an object with schema, device and entries",))
    if data.get("schema") != SCHEMA:
        return Table(flaws=(f"its schema is {data.get('schema')!r}, and this version reads {SCHEMA}",))
    entries, flaws = [], []
    for index, item in enumerate(data["entries"]):
        try:
            entries.append(Entry.from_dict(item))
        except DatabaseError as error:
            flaws.append(f"entry {index}: {error}")
    device = data.get("device")
    if not isinstance(device, dict):
        device, flaws = {}, [f"device is {device!r}; expected an object", *flaws]
    try:
        check_json("device", device)
    except DatabaseError as error:
        device, flaws = {}, [str(error), *flaws]
    return Table.of(device, entries, tuple(flaws))


class FileCache(Generic[T]):
    """What ``read`` makes of a file, once for each version of it.

    missing: of a file that is not there. unreadable: of one that the system does not let read.
    """

    def __init__(self, read: Callable[[Path], T], missing: T, unreadable: Callable[[Path, OSError], T]) -> None:
        self._read, self._missing, self._unreadable = read, missing, unreadable
        self.known: dict[Path, tuple[tuple[int, ...], T]] = {}

    def __call__(self, path: Path) -> T:
        stamp: tuple[int, ...] = ()
        try:
            status = path.stat()
            # The inode too: a save replaces the file, and two saves may get the same time stamp.
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if path not in self.known or self.known[path][0] != stamp:
                self.known[path] = stamp, self._read(path)
        except (FileNotFoundError, NotADirectoryError):
            self.known.pop(path, None)
            return self._missing
        except OSError as error:
            if path not in self.known or self.known[path][0] != stamp:
                self.known[path] = stamp, self._unreadable(path, error)
        return self.known[path][1]


_overlays: dict[tuple[Path, ...], tuple[tuple[Table, ...], Table]] = {}


def load_table(*files: Path) -> Table:
    """The combined table of these files (later files win); each version of a file is parsed once.

    Never fails: an unreadable file is ignored with one DatabaseWarning; invalid entries of a file are skipped.
    """
    tables = tuple(_cached_table(path) for path in files)
    if len(tables) == 1:
        return tables[0]
    known = _overlays.get(files)
    if known and all(old is new for old, new in zip(known[0], tables, strict=True)):
        return known[1]
    device: dict[str, Any] = {}
    for table in tables:
        device |= table.device
    merged = Table.of(device, (entry for table in tables for entry in table.by_identity.values()))
    _overlays[files] = (tables, merged)
    return merged


def _with_warning(path: Path, table: Table) -> Table:
    if table.flaws:
        used = f"{len(table.by_identity)} other entries are used" if table.by_identity else "it is ignored"
        warnings.warn(f"tuned database {path}: {table.first_flaw}; {used}", DatabaseWarning, stacklevel=2)
    return table


_cached_table = FileCache(
    lambda path: _with_warning(path, read_table(path)),
    Table(),
    lambda path, error: _with_warning(path, Table(flaws=(f"it cannot be read ({cause_of(error)})",))),
)


class Database:
    """One device's file: loaded once, then saved with the entries put here and those that others saved meanwhile.

    ``device`` (see :func:`device_record`) is needed to save a file that does not exist yet.
    """

    def __init__(self, path: Path, table: Table, device: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.device = dict(device or table.device)
        self._entries = dict(table.by_identity)
        self._pending: dict[Identity, Entry] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: Mapping[str, Any] | None = None) -> Database:
        """Read ``path``; a missing file is an empty database, an invalid one is ignored with a DatabaseWarning."""
        path = Path(path)
        return cls(path, _cached_table(path), device)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries loaded or put since, sorted by identity."""
        return tuple(self._entries[identity] for identity in sorted(self._entries))

    def get(self, identity: Identity) -> Entry | None:
        return self._entries.get(identity)

    def put(self, entry: Entry) -> None:
        """Add an entry, or replace the one with its identity; :meth:`save` writes it.

        Raises DatabaseError for an entry whose own record says that its kernel is wrong, unless its last check does.
        """
        if entry.wrong_record and not entry.failed_check:
            raise DatabaseError(
                f"the entry of {entry.label} {entry.operation} {entry.direction} {entry.dtype} {entry.graph_class} has "
                f"a {entry.wrong_record}; such a kernel is not published: measure it again, or leave the entry out"
            )
        self._entries[entry.identity] = self._pending[entry.identity] = entry

    def save(self) -> None:
        """Write the entries put into the present file; atomic, and safe with any number of other writers.

        Raises DatabaseError if the directory or the file cannot be written; the entries stay pending.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=LOCK_TIMEOUT_S):
                self._merge_and_replace()
        except filelock.Timeout as error:
            raise DatabaseError(f"{self.path} stayed locked by another process for {LOCK_TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise DatabaseError(
                f"cannot write the tuned database {self.path} ({cause_of(error)}); "
                "set EQUITUNE_DATABASE to a writable directory for your own entries"
            ) from error
        self._pending.clear()

    def _merge_and_replace(self) -> None:
        table = read_table(self.path)
        device = self.device or dict(table.device)
        if not device:
            raise DatabaseError(f"{self.path} is new and its device is unknown; give load() a device record")
        entries = {**table.by_identity, **self._pending}
        text = to_text(device, (entries[identity] for identity in sorted(entries)))
        if table.flaws:
            kept = _keep_aside(self.path)
            why = f"tuned database {self.path}: {table.flaws[0]}; the old file is kept as {kept.name}"
            warnings.warn(why, DatabaseWarning, stacklevel=3)
        replace_file(self.path, text)
        self.device, self._entries = device, entries


def to_text(device: Mapping[str, Any], entries: Iterable[Entry]) -> str:
    """A database file's text, with a line for each entry."""
    head = {"schema": SCHEMA, "device": dict(device)}
    return text_of_lines(head, "entries", (entry.to_dict() for entry in entries))


def text_of_lines(head: Mapping[str, Any], name: str, records: Iterable[Mapping[str, Any]]) -> str:
    """A JSON object of the head's fields and, under ``name``, a list with a line for each record."""
    lines = ",\n".join(map(_on_one_line, records))
    return f'{_on_one_line(head)[:-1]},"{name}":[\n{lines}\n]}}\n'


def _on_one_line(data: Mapping[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _keep_aside(path: Path) -> Path:
    """Copy, not rename: readers must not lose the valid entries of a partly invalid file meanwhile."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    for count in itertools.count(1):
        aside = path.with_name(f"{path.stem}.corrupt-{stamp}{f'-{count}' if count > 1 else ''}.json")
        with contextlib.suppress(FileExistsError), aside.open("xb") as target, path.open("rb") as source:
            shutil.copyfileobj(source, target)
            return aside
    raise AssertionError("unreachable: there is always another name")


def replace_file(path: Path, text: str | bytes) -> None:
    """Write a temporary file to disk, rename it: a crash leaves the old file or the new one. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with paths.named_in_errors(path), os.fdopen(descriptor, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
