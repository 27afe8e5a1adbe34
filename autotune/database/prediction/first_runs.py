"""What first runs chose, kept in the cache, so that a later process takes the fastest schedule at once.

In: choices of :mod:`kernelgen.ops.first_run`. Out: times of a shortlist, by a digest of it, the kernel, the size of the
graph and the device. ``first-runs/DEVICE.json`` in the cache holds the newest. Nothing here fails or slows a model: if
the file cannot be read or written, or another process writes at that moment, the next process chooses again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import filelock

from autotune.database.store import database_path, replace_file
from autotune.workload.graph_class import GraphClass
from kernelgen.build.cache import cache_dir
from kernelgen.device import DeviceFacts, device_facts
from kernelgen.errors import EquituneError
from kernelgen.files import parse_json
from kernelgen.kernels.knobs import Knobs
from kernelgen.ops.base import DTYPES
from kernelgen.ops.first_run import LISTENERS, Choice, best_of
from kernelgen.problem.sizes import size_class
from kernelgen.version import GENERATOR_VERSION

FORMAT = 1
# Schedules that a first run tries, its own included, unless $EQUITUNE_TRY says how many. By the replay of the H200's
# trials, six bring the mean from 1.07 to 1.04 times the tuned time and the worst from 1.60 to 1.24; two more, nothing.
TRIED = 6
MOST_KEPT = 1000

# Problem, operation, direction, dtype and layout.
Kernel = tuple[str, str, str, str, str]


def tries() -> int:
    """How many schedules a first run tries: ``$EQUITUNE_TRY``, at least 1, or :data:`TRIED`."""
    given = os.environ.get("EQUITUNE_TRY", "").strip()
    return max(1, int(given)) if given.isdecimal() else TRIED


def first_runs_path(slug: str) -> Path:
    """The file of a device's choices."""
    return database_path(cache_dir() / "first-runs", slug)


def chosen_before(
    kernel: Kernel, graph_class: GraphClass, facts: DeviceFacts, schedules: Sequence[Knobs]
) -> tuple[int, tuple[float, ...]] | None:
    """The place of the schedule that a first run on this device chose, and all times in us; None if none is known."""
    size, known = (graph_class.log2_edges, graph_class.log2_degree), _read(first_runs_path(facts.slug))
    found = known.get(_digest(kernel, size, facts, schedules)) if known else None
    if not isinstance(found, dict):
        return None
    times = found.get("times_us")
    if not isinstance(times, list) or len(times) != len(schedules):
        return None
    if not all(time is None or (isinstance(time, float) and time > 0) for time in times) or not any(times):
        return None
    times_us = tuple(time or math.inf for time in times)
    return best_of(times_us), times_us


def keep_choice(choice: Choice) -> None:
    """Add a choice to its device's file; a listener of first runs."""
    operator = choice.operator
    with contextlib.suppress(OSError, filelock.Timeout, EquituneError):
        facts = device_facts(operator.device)
        kernel = (operator.problem.key, operator.operation, choice.direction.name, DTYPES[operator.dtype])
        size = size_class(choice.num_edges, choice.num_out if operator.is_conv else choice.num_edges)
        key = _digest((*kernel, operator.layout), size, facts, choice.schedules)
        times = [round(time_us, 3) if math.isfinite(time_us) else None for time_us in choice.times_us]
        path = first_runs_path(facts.slug)
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=1.0):
            kept = {name: found for name, found in _load(path).items() if name != key}
            kept[key] = {"kernel": " ".join(kernel[1:]), "edges": choice.num_edges, "times_us": times}
            newest = dict(list(kept.items())[-MOST_KEPT:])
            replace_file(path, json.dumps({"format": FORMAT, "choices": newest}, indent=1) + "\n")


def _digest(kernel: Kernel, size: Sequence[int], facts: DeviceFacts, schedules: Sequence[Knobs]) -> str:
    said = (GENERATOR_VERSION, facts.slug, *kernel, *size, *(schedule.key for schedule in schedules))
    return hashlib.sha256("\n".join(map(str, said)).encode()).hexdigest()[:24]


def _read(path: Path) -> dict[str, Any]:
    try:
        return _read_once(path, path.stat().st_mtime_ns)
    except OSError:
        return {}


@functools.lru_cache(maxsize=8)
def _read_once(path: Path, _: int) -> dict[str, Any]:
    return _load(path)


def _load(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(path.read_bytes())
        choices = data["choices"] if data.get("format") == FORMAT else {}
        return choices if isinstance(choices, dict) else {}
    except (OSError, ValueError, KeyError, AttributeError, EquituneError):
        return {}


LISTENERS.append(keep_choice)
