"""What a tuned entry can be held to later: its kernel's source and that text's hash, written without a device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from autotune.errors import DatabaseError
from autotune.families import Problem, family_of
from autotune.show import find_problem
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.emit import emit
from kernelgen.schedule import Knobs

LENGTH = 16
# No device has as many multiprocessors, or as wide vectors.
MOST = 1 << 20


def source_text(
    problem: Problem,
    operation: str,
    direction: str,
    dtype: str,
    layout: str,
    deterministic: bool,
    schedule: Knobs,
    facts: DeviceFacts,
) -> str:
    """What is compiled for a schedule; ScheduleError where the present generator has no such kernel."""
    family = family_of(operation)
    spec = family.spec(problem, operation, direction, dtype, layout, facts, deterministic)
    return emit(family.plan(family.kernel_spec(spec, schedule))).text


def hash_of_text(text: str) -> str:
    """The first 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def hash_of_entry(entry: Any, facts: DeviceFacts) -> str:
    """Of the text that is compiled by now for an entry's schedule."""
    kernel = (find_problem(entry.problem), entry.operation, entry.direction, entry.dtype, entry.layout)
    return hash_of_text(source_text(*kernel, entry.deterministic, entry.tuned_schedule, facts))


def facts_of_record(device: Mapping[str, Any]) -> DeviceFacts:
    """The facts of a database's device, as far as source depends on them; DatabaseError for another kind of record."""
    kinds: dict[str, type] = {"backend": str, "name": str, "arch": str, "units": int, "vector_bytes": int}
    for name, kind in kinds.items():
        if type(device.get(name)) is not kind or (kind is int and not 0 <= device[name] < MOST):
            raise DatabaseError(f"device field {name} is {device.get(name)!r}; expected {kind.__name__}")
    if device["backend"] == "cuda":
        return cuda_facts(device["arch"], device["name"], device["units"])
    if device["backend"] != "cpu":
        raise DatabaseError(f"device field backend is {device['backend']!r}; expected 'cuda' or 'cpu'")
    return DeviceFacts(**{name: device[name] for name in kinds})
