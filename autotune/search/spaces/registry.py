"""Finds the search space of a workload: every file of this folder has ``SPACES``, by operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotune.search.space import Space
from autotune.workload.workload import Workload
from kernelgen.device import DeviceFacts
from kernelgen.folder import collected

_BY_OPERATION: Mapping[str, Callable[[Workload, str, DeviceFacts], Space]] = {
    operation: make for spaces in collected("autotune.search.spaces", "SPACES") for operation, make in spaces.items()
}


def space_of(workload: Workload, direction: str, facts: DeviceFacts) -> Space:
    """The whole search space of one direction of a workload."""
    return _BY_OPERATION[workload.operation](workload, direction, facts)
