"""Provenance of a tuned entry: software, driver and the hash of its kernel's source, to detect stale entries.

Source and hash need no device.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from autotune.database.lookup import find_schedule
from autotune.errors import DatabaseError
from autotune.workload.config_tables import find_problem
from autotune.workload.kinds.base import Problem
from autotune.workload.kinds.registry import kernel_kind
from kernelgen.device import DeviceFacts, cuda_facts
from kernelgen.errors import EquituneError
from kernelgen.kernels.dispatch import emit
from kernelgen.kernels.knobs import Knobs

SOFTWARE = (
    *("torch", "e3nn", "optuna", "cuequivariance", "cuequivariance-torch", "openequivariance", "mace-torch"),
    "cuda-core",
)
LENGTH = 16
# More multiprocessors, and wider vectors, than any device has.
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
    """The source that is compiled for a schedule; ScheduleError if the present generator has no such kernel."""
    kind = kernel_kind(operation)
    spec = kind.spec(problem, operation, direction, dtype, layout, facts, deterministic)
    return emit(kind.plan(kind.kernel_spec(spec, schedule), find_schedule)).text


def hash_of_text(text: str) -> str:
    """The first 16 hexadecimal digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def hash_of_entry(entry: Any, facts: DeviceFacts) -> str:
    """Hash of the source that the present generator writes for an entry's schedule."""
    kernel = (find_problem(entry.problem), entry.operation, entry.direction, entry.dtype, entry.layout)
    return hash_of_text(source_text(*kernel, entry.deterministic, entry.tuned_schedule, facts))


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
    try:
        from kernelgen.build.gpu import nvrtc_version
        from kernelgen.build.host import find_host_compiler

        versions["compiler"] = find_host_compiler().version if facts.backend == "cpu" else f"nvrtc {nvrtc_version()}"
    except EquituneError:
        pass
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
