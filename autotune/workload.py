"""One thing to tune: a problem on a graph; of a product, its tensors and the bytes that it cannot avoid moving.

Enters a :class:`Workload` from a config, leaves :class:`Tensors` on a device. Tensors are drawn from a seeded
generator of that device, so the same seed gives the same numbers on the same kind of device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autotune.errors import ConfigError
from autotune.graphs import CONVOLUTIONS, Graph, GraphClass, GraphSpec, build_graph
from autotune.kind_registry import kernel_kind, operations_of
from autotune.kinds import KernelKind, Problem
from kernelgen.problem.edge_vectors import VectorProblem
from kernelgen.problem.irreps import blocks_of
from kernelgen.problem.spherical_harmonics import HarmonicsProblem
from kernelgen.problem.tensor_product import TensorProductProblem

DTYPES = {"float32": torch.float32, "float64": torch.float64}
LAYOUTS = ("mul_ir", "ir_mul")
# Problem, operation, direction, dtype, layout, graph class, deterministic: one entry each in a database.
Identity = tuple[str, str, str, str, str, str, bool]


@dataclass(frozen=True)
class Workload:
    """A problem on a graph, and the directions in which it is tuned; ``label`` is the problem's short name.

    operation: ``conv`` or ``plain`` of a product; ``harmonics`` of a HarmonicsProblem, with a vector for each edge;
    ``vectors``, the convolution of a VectorProblem.
    directions: by default all that its kernels have. deterministic: only kernels whose results are bitwise equal from
    run to run.
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
        """How its kernels are chosen."""
        return kernel_kind(self.operation)

    @property
    def product(self) -> TensorProductProblem:
        """The problem of a workload that is a tensor product, or has one."""
        problem = self.problem.product if isinstance(self.problem, VectorProblem) else self.problem
        assert isinstance(problem, TensorProductProblem)
        return problem

    @property
    def is_conv(self) -> bool:
        """Whether rows are gathered from nodes and summed at nodes."""
        return self.operation in CONVOLUTIONS

    @property
    def harmonics(self) -> HarmonicsProblem:
        """The problem of a workload of operation ``harmonics``."""
        assert isinstance(self.problem, HarmonicsProblem)
        return self.problem

    @property
    def num_edges(self) -> int:
        """Of its graph (which is built if it was not yet)."""
        return build_graph(self.graph).num_edges

    def graph_class(self) -> GraphClass:
        """The class of its graph (which is built if it was not yet)."""
        graph = build_graph(self.graph)
        return GraphClass.of(self.operation, graph.num_edges, graph.num_nodes)

    def identity(self, direction: str) -> Identity:
        """Of the database entry of one direction."""
        kernel = (self.problem.key, self.operation, direction, self.dtype, self.layout)
        return (*kernel, self.graph_class().text, self.deterministic)

    def compulsory_bytes(self, direction: str, num_edges: int, num_nodes: int) -> int:
        """Bytes that any kernel of a direction must move on a graph: see :meth:`KernelKind.compulsory_bytes`."""
        return self.kind.compulsory_bytes(self.problem, self.operation, direction, self.dtype, num_edges, num_nodes)


@dataclass(frozen=True, eq=False)
class Tensors:
    """Operands, cotangent ``g`` and tangents of one workload, all contiguous and on one device.

    Rows of x, tx, g and tg are nodes for ``conv`` (``num_nodes``), edges otherwise, where sender and receiver are
    None; y and ty have a row an edge, w and tw too unless the weights are shared (then they are one row, 1-d).
    Harmonics have vectors x and their tangents tx, and g; the others are empty.
    """

    x: torch.Tensor
    y: torch.Tensor
    w: torch.Tensor
    g: torch.Tensor
    tx: torch.Tensor
    ty: torch.Tensor
    tw: torch.Tensor
    tg: torch.Tensor
    sender: torch.Tensor | None
    receiver: torch.Tensor | None
    num_nodes: int

    @property
    def num_edges(self) -> int:
        return self.y.shape[0]


def make_tensors(workload: Workload, device: torch.device | str, seed: int = 0, graph: Graph | None = None) -> Tensors:
    """Random normal tensors for a workload; ``graph`` is built from the workload unless it is given."""
    graph = graph or build_graph(workload.graph)
    problem, device = workload.product, torch.device(device)
    edges, conv = graph.num_edges, workload.is_conv
    rows = graph.num_nodes if conv else edges
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=DTYPES[workload.dtype], device=device)

    weights = (problem.weight_numel,) if problem.shared_weights else (edges, problem.weight_numel)
    x, y, w, g = draw(rows, problem.dim_in1), draw(edges, problem.dim_in2), draw(*weights), draw(rows, problem.dim_out)
    tx, ty, tw = draw(rows, problem.dim_in1), draw(edges, problem.dim_in2), draw(*weights)
    tg = draw(rows, problem.dim_out)
    sender = graph.sender.to(device) if conv else None
    receiver = graph.receiver.to(device) if conv else None
    return Tensors(x, y, w, g, tx, ty, tw, tg, sender, receiver, rows)


def to_ir_mul(tensor: torch.Tensor, irreps: str) -> torch.Tensor:
    """Rows of ``mul_ir`` features (channel, then component: e3nn's) rearranged to ``ir_mul``; differentiable."""
    return _transpose(tensor, [(block.mul, block.dim) for block in blocks_of(irreps)])


def to_mul_ir(tensor: torch.Tensor, irreps: str) -> torch.Tensor:
    """Rows of ``ir_mul`` features (component, then channel) rearranged to ``mul_ir``; differentiable."""
    return _transpose(tensor, [(block.dim, block.mul) for block in blocks_of(irreps)])


def relayout(tensor: torch.Tensor, irreps: str, source: str, target: str) -> torch.Tensor:
    """Rows of features brought from one layout to another; the tensor itself where they agree."""
    if source == target:
        return tensor
    return to_ir_mul(tensor, irreps) if target == "ir_mul" else to_mul_ir(tensor, irreps)


def _transpose(tensor: torch.Tensor, shapes: list[tuple[int, int]]) -> torch.Tensor:
    rows = tensor.shape[:-1]
    parts = tensor.split([a * b for a, b in shapes], dim=-1)
    turned = [
        part.reshape(*rows, a, b).transpose(-1, -2).reshape(*rows, a * b)
        for part, (a, b) in zip(parts, shapes, strict=True)
    ]
    return torch.cat(turned, dim=-1) if turned else tensor
