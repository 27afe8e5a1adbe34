"""Manage tuned databases: list stale entries, merge, export, pack trials, share with other machines.

Only :func:`merge_file` changes a database here, and only after it has read and checked the whole file.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import filelock

from autotune.database import trials as trial_archive
from autotune.database.entry import Entry
from autotune.database.lookup import plan_for
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
from autotune.text import time_text
from kernelgen.compile.gpu import nvrtc_version
from kernelgen.compile.host import find_host_compiler
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.errors import EquituneError, cause_of
from kernelgen.files import parse_json
from kernelgen.kernels.dispatch import emit
from kernelgen.kernels.knobs import Knobs
from kernelgen.version import GENERATOR_VERSION

# The entry of ``software`` whose change gives another binary from the same source.
COMPILER = "compiler"
# An entry with this many times the finished trials wins over a newer one.
MORE_TRIALS = 2


@dataclass(frozen=True)
class Stale:
    """An entry whose figures may no longer hold, with the reasons as sentences without a full stop."""

    entry: Entry
    reasons: tuple[str, ...]


def stale_entries(
    table: Table, software: Mapping[str, str], driver: str | None = None, generator: str = GENERATOR_VERSION
) -> list[Stale]:
    """Entries whose source, compiler or driver has changed, by identity.

    software: as :func:`software_versions` gives it. driver: version of the NVIDIA driver, None without one.
    """
    noted = table.device.get("driver")
    moved = (f"the driver was {noted} and is {driver}",) if driver and noted and noted != driver else ()
    found = []
    for identity in sorted(table.by_identity):
        entry = table.by_identity[identity]
        reasons = [*_changed_source(entry, table.device, generator), *moved]
        before, now = entry.software.get(COMPILER), software.get(COMPILER)
        if before and now and before != now:
            reasons.append(f"the compiler was {before} and is {now}")
        if reasons:
            found.append(Stale(entry, tuple(reasons)))
    return found


def _changed_source(entry: Entry, device: Mapping[str, Any], generator: str) -> list[str]:
    """Compare the hash of the kernel's source if the entry has one, else the generator's version.

    A new generator version need not change this kernel.
    """
    if entry.generator == generator:
        return []
    if not entry.source:
        return [f"the generator was {entry.generator} and is {generator}"]
    try:
        now = hash_of_entry(entry, facts_of_record(device))
    except EquituneError as error:
        return [f"its kernel can no longer be generated ({error})"]
    return [] if now == entry.source else [f"its source was {entry.source} and is {now}"]


@dataclass(frozen=True)
class Merged:
    """One entry of a merged file: whether it was ``taken``, and why."""

    entry: Entry
    taken: bool
    reason: str


def merge_file(path: Path, results_dir: Path, generator: str = GENERATOR_VERSION) -> tuple[Path, list[Merged]]:
    """Merge a database file into the local file of its device; returns that file and the outcome for each entry.

    New entries are taken; of two with one identity, the better measured (see :func:`preferred`). Raw trials beside the
    file are copied. Raises DatabaseError and changes nothing if any part of the file is invalid.
    """
    if not path.is_file():
        raise DatabaseError(f"{path} is not a file; expected a database such as results/nvidia-h200.json")
    theirs = read_table(path)
    if theirs.flaws:
        raise DatabaseError(f"{path} was not merged: {theirs.first_flaw}; merge what the same version wrote")
    target = database_path(results_dir, str(theirs.device.get("slug", "")))
    database = Database.load(target, theirs.device)
    merged = [merge_entry(entry, database, generator) for _, entry in sorted(theirs.by_identity.items())]
    if any(item.taken for item in merged):
        for item in merged:
            if item.taken:
                _copy_trials(item.entry, path.parent, target)
        database.save()
    return target, merged


def merge_entry(entry: Entry, database: Database, generator: str = GENERATOR_VERSION) -> Merged:
    """Put one entry into a database, without saving it, if it is new or better measured than the one there."""
    if entry.wrong_record and not entry.failed_check:
        return Merged(entry, False, f"its {entry.wrong_record}")
    ours = database.get(entry.identity)
    if ours is None:
        database.put(entry)
        return Merged(entry, True, "new here")
    if ours == entry:
        return Merged(entry, False, "the same as here")
    taken, reason = preferred(ours, entry, generator)
    if taken:
        database.put(entry)
    return Merged(entry, taken, reason)


def preferred(ours: Entry, theirs: Entry, generator: str = GENERATOR_VERSION) -> tuple[bool, str]:
    """Whether ``theirs`` replaces ``ours``, and why.

    An entry of the present generator wins; then one with at least twice the finished trials; then one that is faster on
    a graph of the same size, beyond the middle halves of both entries' samples; then the newer one. Where they were
    tuned by different objectives, ours stays.
    """
    if ours.objective != theirs.objective:
        return False, f"ours was tuned by {ours.objective}, theirs by {theirs.objective}"
    present = ours.generator == generator, theirs.generator == generator
    if present[0] != present[1]:
        return present[1], f"{'theirs' if present[1] else 'ours'} has the current generator"
    trials = [int(entry.trials.get("ok", 0)) for entry in (ours, theirs)]
    if max(trials) >= MORE_TRIALS * max(1, min(trials)):
        taken = trials[1] > trials[0]
        return taken, f"{'theirs' if taken else 'ours'} has more finished trials ({max(trials)}, not {min(trials)})"
    taken = _is_faster(theirs, ours)
    if taken or _is_faster(ours, theirs):
        fast, slow = (time_text(entry.time_us) for entry in ((theirs, ours) if taken else (ours, theirs)))
        return taken, f"{'theirs' if taken else 'ours'} is faster ({fast}, not {slow})"
    taken = theirs.date > ours.date
    return taken, f"{'theirs' if taken else 'ours'} is newer ({max(ours.date, theirs.date)})"


def _is_faster(one: Entry, other: Entry) -> bool:
    sizes = [[entry.graph[name] for name in ("edges", "nodes")] for entry in (one, other)]
    return sizes[0] == sizes[1] and one.q3_us < other.q1_us


def _copy_trials(entry: Entry, source: Path, database: Path) -> None:
    """Copy the raw trials of an entry beside its database, if there are any: the entry is valid without them.

    Trials of another device stay as they are.
    """
    name, target = entry.trials.get("file", ""), database.parent
    if Path(name).parent.name != database.stem or (source / name).resolve() == (target / name).resolve():
        return
    if lines := trial_archive.read_study(source / name):
        replace_file(target / name, "".join(json.dumps(line) + "\n" for line in lines))


def pack_trials(results_dir: Path, slug: str) -> list[trial_archive.Packed]:
    """Pack the trials of a device that git keeps: the studies that its entries cite, and all records."""
    folder, cited = results_dir / "trials" / slug, dict[str, list[dict[str, Any]]]()
    for _, entry in sorted(read_table(database_path(results_dir, slug)).by_identity.items()):
        file = results_dir / entry.trials.get("file", "")
        if file.parent == folder:
            cited.setdefault(file.stem, []).append(dict(entry.schedule))
    return [trial_archive.pack(folder, cited), trial_archive.pack(results_dir / "record" / slug)]


def export_file(table: Table, path: Path, labels: Iterable[str] = ()) -> int:
    """Write the entries (with these labels, or all) to a new database file; returns their number.

    DatabaseError if there are none or the path exists.
    """
    wanted = set(labels)
    entries = [entry for _, entry in sorted(table.by_identity.items()) if not wanted or entry.label in wanted]
    if not entries:
        known = sorted({entry.label for entry in table.by_identity.values()})
        raise DatabaseError(f"no entry matches {sorted(wanted) or 'this device'}; the database has entries of {known}")
    if path.exists():
        raise DatabaseError(f"{path} exists; name a file that does not")
    path.write_text(to_text(table.device, entries), encoding="utf-8")
    return len(entries)


def counts(merged: Iterable[Merged]) -> dict[str, int]:
    """Numbers of entries taken, rejected and identical."""
    total: dict[str, Any] = {"taken": 0, "kept out": 0, "the same": 0}
    for item in merged:
        name = "taken" if item.taken else "the same" if item.reason == "the same as here" else "kept out"
        total[name] += 1
    return total


# Provenance of a tuned entry: software, driver and the hash of its kernel's source, to detect stale entries.
#
# Source and hash need no device.

SOFTWARE = (
    *("torch", "e3nn", "optuna", "cuequivariance", "cuequivariance-torch", "openequivariance", "mace-torch"),
    "cuda-core",
)
LENGTH = 16
# More multiprocessors, and wider vectors, than any device has.
MOST = 1 << 20


def source_text(spec: Any, schedule: Knobs) -> str:
    """The source that is compiled for a schedule; ScheduleError if the present generator has no such kernel."""
    return emit(plan_for(spec, schedule)).text


def hash_of_text(text: str) -> str:
    """The first 16 hexadecimal digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def statements_of(source: str) -> str:
    """What a Python file says, without the texts that stand alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def hash_of_entry(entry: Entry, facts: DeviceFacts) -> str:
    """Hash of the source that the present generator writes for an entry's schedule."""
    return hash_of_text(source_text(entry.spec(facts), entry.tuned_schedule))


def facts_of_record(device: Mapping[str, Any]) -> DeviceFacts:
    """The facts of a database's device that source depends on; DatabaseError for another kind of record."""
    kinds: dict[str, type] = {"backend": str, "name": str, "arch": str, "units": int, "vector_bytes": int}
    for name, kind in kinds.items():
        if type(device.get(name)) is not kind or (kind is int and not 0 <= device[name] < MOST):
            raise DatabaseError(f"device field {name} is {device.get(name)!r}; expected {kind.__name__}")
    if device["backend"] == "cuda":
        return cuda_facts(device["arch"], device["name"], device["units"])
    if device["backend"] != "cpu":
        raise DatabaseError(f"device field backend is {device['backend']!r}; expected 'cuda' or 'cpu'")
    return DeviceFacts(**{name: device[name] for name in kinds})


def now_text() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def software_versions(facts: DeviceFacts, also: Iterable[str] = ()) -> dict[str, str]:
    """Versions that a figure depends on, of what is installed. ``also``: more distributions."""
    versions = {"python": platform.python_version()}
    for name in (*SOFTWARE, *also):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    with contextlib.suppress(EquituneError):
        versions["compiler"] = find_host_compiler().version if facts.backend == "cpu" else f"nvrtc {nvrtc_version()}"
    return versions


def environment_hash(facts: DeviceFacts) -> str:
    """Hash of all versions that a figure depends on: software and driver."""
    return hash_of_text(json.dumps([software_versions(facts), driver_version(facts)], sort_keys=True))


def driver_version(facts: DeviceFacts) -> str | None:
    """Version of the NVIDIA driver for a CUDA device, else None."""
    return nvidia_driver() if facts.backend == "cuda" else None


@functools.cache
def nvidia_driver() -> str | None:
    """Version of the NVIDIA driver, None without one; asked once, since each stored workload names it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return answer.stdout.splitlines()[0].strip() if answer.returncode == 0 and answer.stdout.strip() else None


# A database that many machines share: files in a folder, or the same files served over HTTPS.
#
# ``index.json`` names for each device the SHA-256 of its present file, ``DEVICE.HASH.json`` (HASH: its first 16
# digits). Earlier files stay, so that a pin to one stays good. :func:`pull` reads; only :func:`push` writes, and only
# to a folder. Nothing is fetched unless one of them is called. Neither takes an entry without a certificate, or one
# whose kernel cannot be launched.

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
    if pin is not None:
        digest = _checked_hash("--sha256", pin)
    else:
        index = _index(_read(source, INDEX), source)
        if slug not in index:
            there = ", ".join(index) or "no device at all"
            raise DatabaseError(f"{source} has nothing of {slug}; expected one of {there}")
        digest = index[slug]
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
    try:
        plan_for(entry.spec(facts), entry.tuned_schedule)
    except EquituneError as error:
        return f"its kernel cannot be launched on {facts.name} ({error})"
    return ""


def file_name(slug: str, digest: str) -> str:
    return f"{slug}.{digest[:16]}.json"


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
        raise DatabaseError(f"{where}: {table.first_flaw}; share what the same version wrote")
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
