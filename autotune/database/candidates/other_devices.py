"""Databases of other devices that may serve this one, the nearest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.database.entry import Entry
from autotune.database.store import Table, device_files, load_table, tuned_dirs
from kernelgen.device import DeviceFacts


def kindred_tables(facts: DeviceFacts) -> Iterator[Table]:
    """Databases of other devices that may serve this one: of its architecture, for a GPU then of others.

    Nearest number of multiprocessors or cores first.
    """
    files: dict[str, list[Path]] = {}
    for directory in tuned_dirs():
        for path in device_files(directory):
            files.setdefault(path.stem, []).append(path)
    tables = [(slug, load_table(*paths)) for slug, paths in sorted(files.items()) if slug != facts.slug]
    kindred = [(slug, table) for slug, table in tables if _may_serve(table.device, facts)]
    yield from (
        table for _, table in sorted(kindred, key=lambda item: (device_distance(item[1].device, facts), item[0]))
    )


def is_of_architecture(entry: Entry, facts: DeviceFacts) -> bool:
    """Whether another device's entry was measured on this one's architecture."""
    kindred = (table for table in kindred_tables(facts) if _is_kindred(table.device, facts))
    found = (table.by_identity.get(entry.identity) for table in kindred)
    return any(one is not None and (one.time_us, one.date) == (entry.time_us, entry.date) for one in found)


def device_distance(device: Mapping[str, Any], facts: DeviceFacts) -> tuple[bool, bool, float]:
    """Sort key for the distance between a database's device and this one: backend, then architecture, then size."""
    backend, kindred = device.get("backend") == facts.backend, _is_kindred(device, facts)
    units = device.get("units")
    if not isinstance(units, int | float) or units <= 0:
        return not backend, not kindred, math.inf
    return not backend, not kindred, abs(math.log2(units / max(1, facts.units)))


def _may_serve(device: Mapping[str, Any], facts: DeviceFacts) -> bool:
    """CUDA text compiles for every compute capability; a host's schedules depend on the width of its vectors."""
    return _is_kindred(device, facts) or device.get("backend") == facts.backend == "cuda"


def _is_kindred(device: Mapping[str, Any], facts: DeviceFacts) -> bool:
    same = device.get("backend") == facts.backend and device.get("arch") == facts.arch
    return same and (facts.backend != "cpu" or device.get("vector_bytes") == facts.vector_bytes)
