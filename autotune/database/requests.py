"""What a running model asks of the database: a kernel's direction on a graph of some size, as a :class:`Request`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.database.lookup import Tuning, find_schedule
from autotune.workload.graph_class import GraphClass
from autotune.workload.kinds.registry import problem_from_key
from autotune.workload.workload import Identity
from kernelgen.arithmetic.directions import fixed_order_parts
from kernelgen.device import DeviceFacts
from kernelgen.ops.base import DTYPES
from kernelgen.ops.harmonics import HarmonicsOperator
from kernelgen.ops.symmetric_contraction import ContractionOperator


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
