"""Finds what runs the kernels of an operation: every file of this folder that has ``RUNS``."""

from __future__ import annotations

from autotune.measure.runs.base import Runs
from kernelgen.folder import collected

_BY_OPERATION: dict[str, Runs] = {
    operation: runs for runs in collected("autotune.measure.runs", "RUNS") for operation in runs.operations
}


def runs_of(operation: str) -> Runs:
    """The :class:`Runs` of an operation."""
    return _BY_OPERATION[operation]
