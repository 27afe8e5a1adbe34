"""A database that many machines share: files in a folder, or the same files served over HTTPS.

``index.json`` names for each device the SHA-256 of its present file, ``DEVICE.HASH.json`` (HASH: its first 16 digits).
Earlier files stay, so that a pin to one stays good. :func:`pull` reads; only :func:`push` writes, and only to a folder.
Nothing is fetched unless one of them is called. Neither takes an entry without a certificate, or one whose kernel
cannot be launched.
"""

from __future__ import annotations

import hashlib
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import filelock

from autotune.database.entry import Entry
from autotune.database.lookup import find_schedule
from autotune.database.maintenance import Merged, facts_of_record, merge_entry
from autotune.database.store import (
    Database,
    Table,
    database_path,
    is_slug,
    parse_table,
    read_table,
    replace_file,
    to_text,
)
from autotune.errors import DatabaseError
from autotune.workload.config import find_problem
from autotune.workload.kinds.registry import kernel_kind
from kernelgen.device import DeviceFacts
from kernelgen.errors import EquituneError, cause_of
from kernelgen.files import parse_json

INDEX = "index.json"
VERSION = 1
HTTPS = "https://"
TIMEOUT_S = 60.0
# Most bytes of a file; the largest database has 1 million.
MOST_BYTES = 1 << 28
_HASH = re.compile(r"[0-9a-f]{64}")


def pull(
    source: str, slug: str, results: Path, pin: str | None = None, here: DeviceFacts | None = None
) -> tuple[Path, str, list[Merged]]:
    """Merge a device's shared file into the database here; returns that, the file's SHA-256, what became of each entry.

    source: a folder, or a URL with https. pin: the SHA-256 that the file must have; None takes the index's. here: facts
    by which launches are judged, if this is the device; None: those of the file. DatabaseError changes nothing.
    """
    target = database_path(results, slug)
    digest = _checked_hash("--sha256", pin) if pin is not None else _hash_in_index(source, slug)
    name = file_name(slug, digest)
    data = _read(source, name)
    if (found := hashlib.sha256(data).hexdigest()) != digest:
        raise DatabaseError(
            f"{source}: {name} has the SHA-256 {found}; expected {digest}, so nothing was taken from it"
        )
    table = _table(data, f"{source}: {name}")
    if table.device.get("slug") != slug:
        raise DatabaseError(f"{source}: {name} is of the device {table.device.get('slug')!r}; expected {slug!r}")
    database = Database.load(target, table.device)
    merged = merge(table.by_identity.values(), database, here or facts_of_record(table.device))
    if any(item.taken for item in merged):
        database.save()
    return target, digest, merged


def push(results: Path, slug: str, folder: str, labels: Collection[str] = ()) -> tuple[Path, str, list[Merged]]:
    """Merge entries of a device (of these problems, or all) into a shared folder; returns as :func:`pull`."""
    if "://" in folder:
        raise DatabaseError(f"{folder} is not written to; expected a folder, which a web server may serve")
    ours = read_table(database_path(results, slug))
    entries = [entry for entry in ours.by_identity.values() if not labels or entry.label in labels]
    if ours.flaws or not entries:
        why = ours.flaws[0] if ours.flaws else f"it has no entries{f' of {sorted(labels)}' if labels else ''}"
        raise DatabaseError(f"{database_path(results, slug)} cannot be pushed: {why}")
    home = Path(folder)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(home / f".{INDEX}.lock", timeout=TIMEOUT_S):
            index = _index(home.joinpath(INDEX).read_bytes(), folder) if (home / INDEX).is_file() else {}
            shared = Table()
            if slug in index:
                name = file_name(slug, index[slug])
                shared = _table(home.joinpath(name).read_bytes(), f"{folder}: {name}")
            database = Database(home, shared, ours.device)
            merged = merge(entries, database, facts_of_record(ours.device))
            text = to_text(ours.device, database.entries).encode()
            digest = hashlib.sha256(text).hexdigest()
            replace_file(home / file_name(slug, digest), text)
            files = {name: {"sha256": known} for name, known in sorted({**index, slug: digest}.items())}
            replace_file(home / INDEX, json.dumps({"equitune": VERSION, "files": files}, indent=1) + "\n")
    except filelock.Timeout as error:
        raise DatabaseError(f"{folder} stayed locked by another push for {TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise DatabaseError(f"{folder} cannot be written ({cause_of(error)}); expected a folder of your own") from error
    return home / file_name(slug, digest), digest, merged


def merge(entries: Iterable[Entry], database: Database, facts: DeviceFacts) -> list[Merged]:
    """Put entries into a database, without saving it, but those that are refused; the better of two stays."""
    in_order = sorted(entries, key=lambda entry: entry.identity)
    refused = {entry.identity: refusal(entry, facts) for entry in in_order}
    return [
        Merged(entry, False, reason) if (reason := refused[entry.identity]) else merge_entry(entry, database)
        for entry in in_order
    ]


def refusal(entry: Entry, facts: DeviceFacts) -> str:
    """Why a stranger's entry is not taken; empty if it is."""
    if entry.failed_check:
        return f"it failed its last check ({entry.failed_check})"
    if entry.wrong_record:
        return f"it has a {entry.wrong_record}"
    if "equivariance" not in entry.certificate:
        return "it has no certificate; `equitune db verify --uncertified` makes one where it was tuned"
    kind = kernel_kind(entry.operation)
    kernel = (entry.operation, entry.direction, entry.dtype, entry.layout)
    try:
        spec = kind.spec(find_problem(entry.problem), *kernel, facts, entry.deterministic)
        kind.plan(kind.kernel_spec(spec, entry.tuned_schedule), find_schedule)
    except EquituneError as error:
        return f"its kernel cannot be launched on {facts.name} ({error})"
    return ""


def file_name(slug: str, digest: str) -> str:
    return f"{slug}.{digest[:16]}.json"


def _hash_in_index(source: str, slug: str) -> str:
    index = _index(_read(source, INDEX), source)
    if slug not in index:
        raise DatabaseError(f"{source} has nothing of {slug}; expected one of {', '.join(index) or 'no device at all'}")
    return index[slug]


def _index(data: bytes, source: str) -> dict[str, str]:
    """SHA-256 by device."""
    try:
        found = parse_json(data)
        if found["equitune"] != VERSION:
            raise ValueError(f"its version is {found['equitune']!r}, and this package reads {VERSION}")
        index = {slug: _checked_hash(slug, file["sha256"]) for slug, file in found["files"].items()}
        if strange := [slug for slug in index if not is_slug(slug)]:
            raise ValueError(f"{strange[0]!r} is no device")
        return index
    except (ValueError, KeyError, TypeError, AttributeError, DatabaseError) as error:
        raise DatabaseError(
            f"{source}: {INDEX} is not that of a shared database ({cause_of(error)}); expected what `equitune db push` "
            "wrote"
        ) from error


def _checked_hash(name: str, digest: Any) -> str:
    if not (isinstance(digest, str) and _HASH.fullmatch(digest)):
        raise DatabaseError(f"{name} is {digest!r:.100}; expected a SHA-256, 64 hexadecimal digits")
    return digest


def _table(data: bytes, where: str) -> Table:
    table = parse_table(data)
    if table.flaws:
        more = f" (and {len(table.flaws) - 1} more)" if len(table.flaws) > 1 else ""
        raise DatabaseError(f"{where}: {table.flaws[0]}{more}; share what the same version wrote")
    return table


def _read(source: str, name: str) -> bytes:
    """A file of a folder or of a URL, whole."""
    if "://" not in source:
        try:
            return (Path(source) / name).read_bytes()
        except OSError as error:
            raise DatabaseError(f"{source} has no {name} ({cause_of(error)}); expected a shared database") from error
    if not source.startswith(HTTPS):
        raise DatabaseError(f"{source} is not fetched; expected a URL that begins with {HTTPS}, or a folder")
    try:
        opener = urllib.request.build_opener(
            _OnlyHttps, urllib.request.HTTPSHandler(context=ssl.create_default_context())
        )
        with opener.open(f"{source.rstrip('/')}/{name}", timeout=TIMEOUT_S) as answer:
            data = answer.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # urllib's and ssl's errors are OSErrors
        raise DatabaseError(f"{source}/{name} cannot be fetched ({cause_of(error)})") from error
    if len(data) > MOST_BYTES:
        raise DatabaseError(f"{source}/{name} has more than {MOST_BYTES} bytes, which no database has")
    return data


class _OnlyHttps(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not newurl.startswith(HTTPS):
            raise urllib.error.URLError(f"it redirects to {newurl}, which is not {HTTPS}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
