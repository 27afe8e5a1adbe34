"""The kinds of kernels that there are, by rank. A new one adds its line to the table."""

from __future__ import annotations

from autotune.errors import ConfigError
from autotune.workload.kinds.base import KernelKind, Problem
from autotune.workload.kinds.harmonics import HarmonicsKind, VectorsKind
from autotune.workload.kinds.radial_convolution import RadialKind
from autotune.workload.kinds.symmetric_contraction import ContractionKind
from autotune.workload.kinds.tensor_product import ProductKind

_KINDS: tuple[KernelKind, ...] = (
    ProductKind(),
    HarmonicsKind(),
    VectorsKind(),
    RadialKind(),
    ContractionKind(),
)
KINDS = tuple(sorted(_KINDS, key=lambda kind: kind.rank))
_BY_OPERATION = {operation: kind for kind in KINDS for operation in kind.operations}
OPERATIONS = tuple(_BY_OPERATION)
# Those that have nodes.
CONVOLUTIONS = tuple(operation for kind in KINDS for operation in kind.convolutions)


def kernel_kind(operation: str) -> KernelKind:
    """The kind of an operation; ConfigError for an unknown operation."""
    if operation not in _BY_OPERATION:
        raise ConfigError(f"operation is {operation!r}; expected one of {OPERATIONS}")
    return _BY_OPERATION[operation]


def operations_of(problem: Problem) -> tuple[str, ...]:
    """The operations of a problem, the usual one first."""
    return next(kind.operations for kind in KINDS if isinstance(problem, kind.problem_type))


def problem_from_key(key: str) -> Problem:
    """The problem with a key; ProblemError for a text that is none."""
    kind = next(kind for kind in reversed(KINDS) if kind.owns_key(key))
    return kind.problem_type.from_key(key)
