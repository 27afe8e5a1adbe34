"""A workload: a problem on a graph, in the directions, dtype and layout that a model uses."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from autotune.errors import ConfigError
from autotune.workload.graph_class import GraphClass
from autotune.workload.graphs import GraphSpec, build_graph
from autotune.workload.kinds.base import KernelKind, Problem
from autotune.workload.kinds.registry import CONVOLUTIONS, kernel_kind, operations_of
from kernelgen.device import DeviceFacts
from kernelgen.problem.harmonics import HarmonicsProblem, VectorProblem
from kernelgen.problem.product import RadialProblem, TensorProductProblem

DTYPES = {"float32": torch.float32, "float64": torch.float64}
LAYOUTS = ("mul_ir", "ir_mul")
# Problem, operation, direction, dtype, layout, graph class, deterministic: the key of a database entry.
Identity = tuple[str, str, str, str, str, str, bool]


@dataclass(frozen=True)
class Workload:
    """A problem on a graph, and the directions in which it is tuned; ``label`` is the problem's short name.

    operation: ``conv`` or ``plain`` for a product; ``harmonics`` for a HarmonicsProblem, with one vector per edge;
    ``vectors`` for the convolution of a VectorProblem; ``radial`` for that of a RadialProblem.
    directions: by default all of its kernels. deterministic: only kernels whose results are bitwise equal from run to
    run.
    """

    label: str
    problem: Problem
    operation: str
    graph: GraphSpec
    dtype: str = "float32"
    layout: str = "mul_ir"
    directions: tuple[str, ...] = ()
    deterministic: bool = False

    def __post_init__(self) -> None:
        operations = operations_of(self.problem)
        for name, allowed in (("operation", operations), ("dtype", tuple(DTYPES)), ("layout", LAYOUTS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected one of {allowed}")
        known = tuple(self.kind.directions)
        if not self.directions:
            object.__setattr__(self, "directions", known)
        unknown = [direction for direction in self.directions if direction not in known]
        if unknown or len(set(self.directions)) < len(self.directions):
            raise ConfigError(f"directions are {self.directions}; expected some of {known}, each once")
        if not isinstance(self.deterministic, bool):
            raise ConfigError(f"deterministic is {self.deterministic!r}; expected true or false")
        self.kind.check(self.label, self.problem, self.operation, self.layout, self.graph, self.deterministic)

    @property
    def kind(self) -> KernelKind:
        """The kind of its kernels."""
        return kernel_kind(self.operation)

    @property
    def product(self) -> TensorProductProblem:
        """The tensor product of this workload."""
        problem = self.problem.product if isinstance(self.problem, VectorProblem | RadialProblem) else self.problem
        assert isinstance(problem, TensorProductProblem)
        return problem

    @property
    def is_conv(self) -> bool:
        """Whether rows are gathered from nodes and summed at nodes (a convolution)."""
        return self.operation in CONVOLUTIONS

    @property
    def harmonics(self) -> HarmonicsProblem:
        """The problem of a workload of operation ``harmonics``."""
        assert isinstance(self.problem, HarmonicsProblem)
        return self.problem

    @property
    def num_edges(self) -> int:
        """Number of edges of its graph, which is built on first use."""
        return build_graph(self.graph).num_edges

    @property
    def tolerance(self) -> float:
        """Largest relative error of an output's block that its kernels may have."""
        return self.kind.tolerance(self.problem, self.dtype)

    def graph_class(self) -> GraphClass:
        """The class of its graph, which is built on first use."""
        return _class_of(self.graph, self.operation, self.is_conv)

    def spec(self, direction: str, facts: DeviceFacts) -> Any:
        """The spec of a direction's kernel on a device, with an empty schedule."""
        kernel = (self.problem, self.operation, direction, self.dtype, self.layout)
        return self.kind.spec(*kernel, facts, self.deterministic)

    def identity(self, direction: str) -> Identity:
        """Identity of the database entry of one direction."""
        kernel = (self.problem.key, self.operation, direction, self.dtype, self.layout)
        return (*kernel, self.graph_class().text, self.deterministic)

    def compulsory_bytes(self, direction: str, num_edges: int, num_nodes: int) -> int:
        """Bytes that any kernel of a direction must move on a graph, see :meth:`KernelKind.compulsory_bytes`."""
        return self.kind.compulsory_bytes(self.problem, self.operation, direction, self.dtype, num_edges, num_nodes)


@functools.lru_cache(maxsize=256)
def _class_of(spec: GraphSpec, operation: str, is_conv: bool) -> GraphClass:
    """Counting the edges of a large graph's nodes takes 0.1 s, and a bench asks for each class tens of times."""
    graph = build_graph(spec)
    if not is_conv:
        return GraphClass.of(operation, graph.num_edges, graph.num_nodes)
    return GraphClass.of_graph(operation, graph.receiver, graph.num_nodes)
