"""The kinds of kernels by operation."""

from __future__ import annotations

from autotune.errors import ConfigError
from autotune.workload.kinds.base import KernelKind, Problem
from autotune.workload.kinds.edge_vectors import VectorsKind
from autotune.workload.kinds.spherical_harmonics import HarmonicsKind
from autotune.workload.kinds.tensor_product import ProductKind

KINDS: tuple[KernelKind, ...] = (ProductKind(), HarmonicsKind(), VectorsKind())
_BY_OPERATION = {operation: kind for kind in KINDS for operation in kind.operations}


def kernel_kind(operation: str) -> KernelKind:
    """The kind of an operation; ConfigError for an unknown operation."""
    if operation not in _BY_OPERATION:
        raise ConfigError(f"operation is {operation!r}; expected one of {tuple(_BY_OPERATION)}")
    return _BY_OPERATION[operation]


def operations_of(problem: Problem) -> tuple[str, ...]:
    """The operations of a problem, the usual one first."""
    return next(kind.operations for kind in KINDS if isinstance(problem, kind.problem_type))
