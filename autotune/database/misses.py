"""Misses: what running models asked for and found no exact entry for, kept for ``equitune tune misses``.

Modules call :func:`asked` for each operator that they build from a lookup. For a few seconds after that, and after any
kernel is prepared for its first run, the runs of such operators are noted: so only directions that a model really calls
count, on graphs of the sizes that it has. Then, in a thread of its own, requests whose lookup is not exact are added to
``misses/DEVICE.json`` in the user's data folder.

Nothing here fails or slows a model: if the folder cannot be written, the disk is full, or another process (there may be
a thousand ranks) holds the lock at that moment, the misses are not kept. ``EQUITUNE_MISSES=0`` turns all of it off.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from autotune import paths
from autotune.database.lookup import Tuning, find_schedule
from autotune.database.store import database_path, replace_file
from autotune.workload.known_kinds import problem_from_key
from autotune.workload.workload import GraphClass, Identity
from kernelgen.arithmetic.directions import fixed_order_parts
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.errors import EquituneError
from kernelgen.files import parse_json
from kernelgen.ops.base import DTYPES
from kernelgen.ops.harmonics import HarmonicsOperator
from kernelgen.ops.symmetric_contraction import ContractionOperator
from kernelgen.runtime.call import PREPARING, WATCHERS

# What a running model asks of the database: a kernel's direction on a graph of some size, as a :class:`Request`.


@dataclass(frozen=True, order=True)
class Request:
    """problem: its key. num_edges, num_nodes: of the graph; rows of a product edge by edge, of harmonics and of
    contractions are edges, and have no nodes."""

    problem: str
    operation: str
    direction: str
    dtype: str
    layout: str
    deterministic: bool
    num_edges: int
    num_nodes: int

    @property
    def graph_class(self) -> GraphClass:
        return GraphClass.of(self.operation, self.num_edges, self.num_nodes)

    @property
    def identity(self) -> Identity:
        """The identity of the database entry that answers it exactly."""
        kernel = (self.problem, self.operation, self.direction, self.dtype, self.layout)
        return (*kernel, self.graph_class.text, self.deterministic)

    def look_up(self, facts: DeviceFacts) -> Tuning:
        """What a model would load for it on a device; strict lookup does not count."""
        what = (problem_from_key(self.problem), self.operation, self.direction, self.dtype, self.layout)
        return find_schedule(*what, facts, self.graph_class, strict=False, deterministic=self.deterministic)


def requests_of(operator: Any, direction: Any, num_edges: int, num_nodes: int) -> tuple[Request, ...]:
    """The requests of one run of an operator's direction, from what a watcher is told.

    A deterministic convolution runs a direction in parts, each with a schedule of its own.
    """
    dtype = DTYPES[operator.dtype]
    if isinstance(operator, HarmonicsOperator):
        return (Request(operator.problem.key, "harmonics", direction.name, dtype, "mul_ir", False, num_edges, 0),)
    if isinstance(operator, ContractionOperator):
        kind = (dtype, operator.layout, False, num_edges, 0)
        return (Request(operator.problem.key, "contraction", direction.name, *kind),)
    fixed = operator.deterministic and operator.is_conv
    names = dict.fromkeys(part.name for part in (fixed_order_parts(direction) if fixed else (direction,)))
    kind = (dtype, operator.layout, operator.deterministic, num_edges, num_nodes if operator.is_conv else 0)
    return tuple(Request(operator.problem.key, operator.operation, name, *kind) for name in names)


FORMAT = 1
# Runs are noted for this long after the last new operator or kernel; then the file is written, so that a model that is
# killed later leaves its misses.
WATCHED_S = 10.0
# At the end of a process no lookup begins after this time.
LONGEST_S = 10.0
# A kernel on fewer rows is all launch: there is nothing to tune. Most checks on random inputs are smaller, too.
FEWEST_EDGES = 32
# A contraction does much more work for each node; accelerate compares on 16.
FEWEST_NODES = 17
# The file keeps the newest; a request with the key of a large problem takes up to a few kilobytes.
MOST_KEPT = 400
# Different runs noted at a time, where the number of edges changes at every call.
MOST_NOTED = 4096


def misses_path(slug: str) -> Path:
    """The file of a device's misses."""
    return database_path(paths.user_data_dir() / "misses", slug)


def asked(operator: Any) -> None:
    """A module built this operator from schedules that it looked up: note what it runs."""
    if os.environ.get("EQUITUNE_MISSES", "").strip().lower() not in ("0", "false", "no", "off"):
        _notes.operators[id(operator)] = operator
        _notes.watch()


def read_misses(facts: DeviceFacts) -> list[Request]:
    """Kept misses of a device without an exact entry now, oldest first; unreadable ones are skipped."""
    return [request for request in _read(misses_path(facts.slug)) if _is_miss(request, facts)]


def keep_misses(facts: DeviceFacts, found: Iterable[Request] = (), lock_s: float = 0.0) -> bool:
    """Add misses to a device's file, and remove those that have been tuned; whether the file holds what it should.

    lock_s: how long to wait for other writers.
    """
    path = misses_path(facts.slug)
    try:
        known = _read(path)
        kept = _merged(known, found, facts)
        if kept == known:
            return True
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=lock_s):
            kept = _merged(_read(path), found, facts)
            rows = [dataclasses.asdict(request) for request in kept]
            replace_file(path, json.dumps({"format": FORMAT, "device": facts.slug, "misses": rows}, indent=1) + "\n")
    except (OSError, filelock.Timeout, EquituneError):
        return False
    return True


def _merged(known: list[Request], found: Iterable[Request], facts: DeviceFacts) -> list[Request]:
    """One request for each missing entry, the newest last, those that have been tuned left out."""
    by_identity = {request.identity: request for request in known}
    for request in found:
        by_identity.setdefault(request.identity, request)
    return [request for request in by_identity.values() if _is_miss(request, facts)][-MOST_KEPT:]


class _Ended(Exception):
    """The process ends: what its thread was about to keep is not kept."""


def _is_miss(request: Request, facts: DeviceFacts) -> bool:
    if time.monotonic() > _notes.end:
        raise _Ended
    try:
        return request.look_up(facts).origin != "exact"
    except EquituneError:
        return False  # a problem of another version, or one without any schedule here


def _read(path: Path) -> list[Request]:
    kinds = {field.name: field.type for field in dataclasses.fields(Request)}
    try:
        data = parse_json(path.read_bytes())
        rows = data["misses"] if data.get("format") == FORMAT else []
        rows = [row for row in rows if isinstance(row, dict)]  # a file may hold anything
        sound = [row for row in rows if {name: type(value).__name__ for name, value in row.items()} == kinds]
        return [Request(**row) for row in sound if min(row["num_edges"], row["num_nodes"]) >= 0]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


class _Notes:
    """What is noted now; one for the process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start afresh, as a forked process must: threads do not survive a fork, and a lock may be held for ever."""
        self.lock = threading.Lock()
        # By id, which also keeps it from being used again.
        self.operators: dict[int, Any] = {}
        self.runs: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self.timer: threading.Timer | None = None
        # Those that wait or write; a slow one may still write when the next is started.
        self.threads: list[threading.Timer] = []
        # No lookup begins after this time.
        self.end = math.inf

    def watch(self) -> None:
        """Note runs from now on, for a while."""
        if not self.operators or self.timer is not None:
            return
        with self.lock:
            if self.timer is not None or self.end < math.inf:
                return
            self.timer = threading.Timer(WATCHED_S, self.write)
            self.timer.daemon = True  # else Python would wait for it before it calls finish
            self.timer.start()
            self.threads = [*(thread for thread in self.threads if thread.is_alive()), self.timer]
        if self.note not in WATCHERS:
            WATCHERS.append(self.note)

    def note(self, operator: Any, direction: Any, num_edges: int, num_nodes: int, *_: Any) -> None:
        """A watcher: see :mod:`kernelgen.runtime.call`."""
        fewest = FEWEST_NODES if isinstance(operator, ContractionOperator) else FEWEST_EDGES
        if num_edges >= fewest and id(operator) in self.operators and len(self.runs) < MOST_NOTED:
            self.runs[id(operator), direction, num_edges, num_nodes] = (operator, direction)

    def write(self) -> None:
        """Stop noting, and keep the misses among what was noted."""
        with self.lock:
            timer, self.timer = self.timer, None
            runs, self.runs = self.runs, {}
            if timer is None:
                return
        with contextlib.suppress(ValueError):
            WATCHERS.remove(self.note)
        with contextlib.suppress(Exception):  # a model must never fail for this
            _keep(runs)

    def finish(self) -> None:
        """Keep what was noted, at the end of the process; a thread that is at it stops after its present lookup.

        However long that takes, it is waited for: a thread that wants to go on after Python's end is ended by
        ``pthread_exit``, whose unwinding aborts the process if it meets C++ such as torch's.
        """
        self.end = time.monotonic() + LONGEST_S
        self.write()
        self.end = 0.0
        for thread in self.threads:
            thread.cancel()
            thread.join()


def _keep(runs: dict[tuple[Any, ...], tuple[Any, Any]]) -> None:
    found: dict[str, dict[Any, Request]] = {}
    for (_, _, num_edges, num_nodes), (operator, direction) in runs.items():
        of_device = found.setdefault(str(operator.device), {})
        for request in requests_of(operator, direction, num_edges, num_nodes):
            of_device.setdefault(request.identity, request)
    for device, requests in found.items():
        facts = device_facts(device)
        missing = [request for request in requests.values() if _is_miss(request, facts)]
        if missing:
            keep_misses(facts, missing)


_notes = _Notes()
PREPARING.append(_notes.watch)
atexit.register(_notes.finish)
os.register_at_fork(after_in_child=_notes.forget)
