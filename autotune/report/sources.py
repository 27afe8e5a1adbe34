"""The kernels' sources, which stand in files beside a page.

The present generator writes them from the problem, the schedule and the stored device facts, without compiling or a
device. If the source has changed since the row was measured, the page says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelgen.errors import EquituneError
from kernelgen.version import GENERATOR_VERSION

KERNEL = ("problem", "operation", "dtype", "layout")


@dataclass(frozen=True)
class KernelSource:
    """One kernel's source. hash: as in database entries."""

    hash: str
    text: str


# What a row shows of one direction: its name, its source or why there is none, and by which other generator it was
# measured; empty if by this one.
SourceLine = tuple[str, KernelSource | str, str]


@dataclass(frozen=True)
class Sources:
    """The source of each kernel by key, or why there is none."""

    by_kernel: Mapping[str, KernelSource | str] = field(default_factory=dict)

    def of(self, record: Mapping[str, Any], schedules: Mapping[str, Any]) -> list[SourceLine]:
        """A line for each direction of a row; ``schedules``: direction to knobs."""
        generator = record.get("generator")
        measured = "" if generator == GENERATOR_VERSION else str(generator or "unknown")
        known = (
            (direction, self.by_kernel.get(_key(record, direction, knobs))) for direction, knobs in schedules.items()
        )
        return [(direction, source, measured) for direction, source in known if source is not None]

    @property
    def texts(self) -> dict[str, str]:
        """Text by hash."""
        return {source.hash: source.text for source in self.by_kernel.values() if isinstance(source, KernelSource)}


def write_sources(kernels: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], device: Mapping[str, Any]) -> Sources:
    """Sources of every (row, its schedules by direction); ``device``: record of the device that measured them."""
    by_kernel: dict[str, KernelSource | str] = {}
    for record, schedules in kernels:
        for direction, knobs in schedules.items():
            key = _key(record, direction, knobs)
            if key not in by_kernel:
                by_kernel[key] = _write(record, direction, knobs, device)
    return Sources(by_kernel)


def _key(record: Mapping[str, Any], direction: str, knobs: Any) -> str:
    kernel = (*(record.get(name) for name in KERNEL), record.get("deterministic") is True, direction, knobs)
    return json.dumps(kernel, sort_keys=True, default=str)


def _write(record: Mapping[str, Any], direction: str, knobs: Any, device: Mapping[str, Any]) -> KernelSource | str:
    from autotune.database.maintenance import facts_of_record, hash_of_text, source_text
    from autotune.workload.config import find_problem
    from autotune.workload.known_kinds import kernel_kind

    names = [record.get(name) for name in KERNEL]
    if not all(isinstance(name, str) for name in names) or not isinstance(knobs, dict):
        return f"the row describes its kernel by {names} and the knobs {knobs}, which is not complete"
    problem, operation, dtype, layout = (str(name) for name in names)
    try:
        kind = kernel_kind(operation)
        if direction not in kind.directions:
            return f"direction {direction!r} is not among {tuple(kind.directions)}"
        kernel = (find_problem(problem), operation, direction, dtype, layout, facts_of_record(device))
        text = source_text(kind.spec(*kernel, record.get("deterministic") is True), kind.read(knobs))
    except EquituneError as error:
        return str(error)
    return KernelSource(hash_of_text(text), text)
