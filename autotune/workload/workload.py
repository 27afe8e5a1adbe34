"""A workload: a problem on a graph, in the directions, dtype and layout that a model uses."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autotune.errors import ConfigError, check_known
from autotune.workload.graphs import GraphSpec, build_graph
from autotune.workload.kind import KernelKind, Problem
from autotune.workload.known_kinds import CONVOLUTIONS, KINDS, OPERATIONS, kernel_kind, operations_of
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import DeviceFacts
from kernelgen.kernels.product.plan import SMALL_GRAPH_EDGES, small_graph_edges
from kernelgen.kernels.product.schedule import SCHEDULES, Schedule
from kernelgen.problem.irreps import blocks_of
from kernelgen.problem.other_kinds import HarmonicsProblem, VectorProblem
from kernelgen.problem.product import RadialProblem, TensorProductProblem, size_class

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
        self.kind.check(self)

    @property
    def kind(self) -> KernelKind:
        return kernel_kind(self.operation)

    @property
    def product(self) -> TensorProductProblem:
        problem = self.problem.product if isinstance(self.problem, VectorProblem | RadialProblem) else self.problem
        assert isinstance(problem, TensorProductProblem)
        return problem

    @property
    def is_conv(self) -> bool:
        """Whether rows are gathered from nodes and summed at nodes (a convolution)."""
        return self.operation in CONVOLUTIONS

    @property
    def harmonics(self) -> HarmonicsProblem:
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

    def facts(self, direction: str) -> dict[str, Any]:
        """What records say of a direction: its names, kernel and graph, which is built on first use."""
        graph = build_graph(self.graph)
        return {
            "label": self.label,
            "problem": self.problem.key,
            "operation": self.operation,
            "direction": direction,
            "dtype": self.dtype,
            "layout": self.layout,
            "deterministic": self.deterministic,
            "graph": {"name": graph.name, "edges": graph.num_edges, "nodes": graph.num_nodes},
            "graph_class": self.graph_class().text,
        }

    def compulsory_bytes(self, direction: str, num_edges: int, num_nodes: int) -> int:
        """Bytes that any kernel of a direction must move on a graph, see :meth:`KernelKind.compulsory_bytes`."""
        return self.kind.compulsory_bytes(self, direction, num_edges, num_nodes)


@functools.lru_cache(maxsize=256)
def _class_of(spec: GraphSpec, operation: str, is_conv: bool) -> GraphClass:
    """Counting the edges of a large graph's nodes takes 0.1 s, and a bench asks for each class tens of times."""
    graph = build_graph(spec)
    if not is_conv:
        return GraphClass.of(operation, graph.num_edges, graph.num_nodes)
    return GraphClass.of_graph(operation, graph.receiver, graph.num_nodes)


# The passes of a model that comparisons time, and the fewest bytes that each must move.
#
# A pass is timed as a model runs it; it consists of the kernels of its directions (``KernelKind.passes``).

# Of all kinds.
PASSES = tuple(dict.fromkeys(name for kind in KINDS for name in kind.passes))


def moved_bytes(workload: Workload, which: str) -> int:
    """Compulsory traffic of a pass: the fewest bytes that its kernels read and write."""
    graph = build_graph(workload.graph)
    size = (graph.num_edges, graph.num_nodes)
    return sum(workload.compulsory_bytes(direction, *size) for direction in workload.kind.passes[which])


# A part of the search space, small enough to measure completely: the ``[record.BACKEND]`` tables of a config.
#
#     [record.cuda]
#     path_groups = [1, 2, 3]
#     block_size = [64, 128]
#     [record.cuda.forward]        # replaces or adds choices in this direction
#     path_groups = [2, 4]
#
# They become checked :class:`Restriction` values. Knobs that are not named keep all their values.

Choices = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Restriction:
    """``common`` choices by knob, and by direction those that replace them."""

    common: Choices
    by_direction: Mapping[str, Choices] = field(default_factory=dict)

    def choices(self, direction: str) -> dict[str, tuple[Any, ...]]:
        return {**self.common, **self.by_direction.get(direction, {})}


def restrictions_from(tables: Any) -> dict[str, Restriction]:
    """The restrictions by backend, from the config's ``record`` table; ConfigError if it is invalid."""
    if not isinstance(tables, Mapping):
        raise ConfigError(f"record is {tables!r}; expected tables [record.BACKEND]")
    found = {}
    for backend, table in tables.items():
        check_known("backend", backend, SCHEDULES, "record: ")
        what, kind = f"record.{backend}", SCHEDULES[backend]
        if not isinstance(table, Mapping):
            raise ConfigError(f"{what} is {table!r}; expected a table of knobs and their choices")
        by_direction = {key: value for key, value in table.items() if isinstance(value, Mapping)}
        for direction in by_direction:
            check_known("direction", direction, DIRECTIONS, f"{what}: ")
        found[backend] = Restriction(
            _choices(what, kind, {knob: value for knob, value in table.items() if knob not in by_direction}),
            {name: _choices(f"{what}.{name}", kind, value) for name, value in by_direction.items()},
        )
    return found


def _choices(what: str, kind: type[Schedule], table: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    known = [knob for knob in kind.choices if knob != "fuse"]
    for knob, values in table.items():
        check_known("knob", knob, known, f"{what}: ")
        allowed = kind.choices[knob]
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{what}.{knob} is {values!r}; expected a list of values")
        for value in values:
            if not any(value == a and type(value) is type(a) for a in allowed):
                raise ConfigError(f"{what}.{knob} has {value!r}; expected values of {allowed[:12]}")
    return {knob: tuple(values) for knob, values in table.items()}


# The tensors of a workload (operands, cotangent and tangents on a device), and conversions between layouts.
#
# They are drawn from a seeded generator of the device: the same seed gives the same numbers on the same kind of device.


@dataclass(frozen=True, eq=False)
class Tensors:
    """Operands, cotangent ``g`` and tangents of one workload, all contiguous and on one device.

    Rows of x, tx, g and tg are nodes for ``conv`` (``num_nodes``), else edges; then sender and receiver are None.
    y and ty have a row per edge, and so have w and tw unless the weights are shared (then they are one row, 1-d).
    Harmonics have vectors x, their tangents tx, and g; the others are empty. Contractions have no y: rows of x and g
    are nodes, w is [elements, weights, channels], and sender has the element of each node.
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


def normal_numbers(workload: Workload, device: torch.device | str, seed: int) -> functools.partial[torch.Tensor]:
    """A function that draws tensors of given shapes, in the workload's dtype; its ``keywords`` serve ``torch.rand``."""
    device = torch.device(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    return functools.partial(torch.randn, generator=generator, dtype=DTYPES[workload.dtype], device=device)


def make_tensors(workload: Workload, device: torch.device | str, seed: int = 0) -> Tensors:
    """Random normal tensors for a workload."""
    graph = build_graph(workload.graph)
    problem, device = workload.product, torch.device(device)
    edges, conv = graph.num_edges, workload.is_conv
    rows = graph.num_nodes if conv else edges
    draw = normal_numbers(workload, device, seed)
    weights = (problem.weight_numel,) if problem.shared_weights else (edges, problem.weight_numel)
    x, y, w, g = draw(rows, problem.dim_in1), draw(edges, problem.dim_in2), draw(*weights), draw(rows, problem.dim_out)
    tx, ty, tw = draw(rows, problem.dim_in1), draw(edges, problem.dim_in2), draw(*weights)
    tg = draw(rows, problem.dim_out)
    sender = graph.sender.to(device) if conv else None
    receiver = graph.receiver.to(device) if conv else None
    return Tensors(x, y, w, g, tx, ty, tw, tg, sender, receiver, rows)


def relayout(tensor: torch.Tensor, irreps: str, source: str, target: str) -> torch.Tensor:
    """Convert rows of features between layouts, differentiably; the tensor itself if they agree.

    ``mul_ir``: a block's channels, each with its components, as e3nn has them; ``ir_mul``: components, with channels.
    """
    if source == target:
        return tensor
    to_ir_mul, rows = target == "ir_mul", tensor.shape[:-1]
    shapes = [(block.mul, block.dim) if to_ir_mul else (block.dim, block.mul) for block in blocks_of(irreps)]
    parts = tensor.split([a * b for a, b in shapes], dim=-1)
    turned = [
        part.reshape(*rows, a, b).transpose(-1, -2).reshape(*rows, a * b)
        for part, (a, b) in zip(parts, shapes, strict=True)
    ]
    return torch.cat(turned, dim=-1) if turned else tensor


# Classify graphs by size and mean degree, in powers of two, and by skew; tuned entries are looked up by the class.

# A node is long from this many times the edges of a mean node, as a power of two.
LONG_NODE = 3
# Warps that a multiprocessor holds of a convolution's kernel, at least: 255 registers a lane leave room for eight.
WARPS_HELD = 8
# A GPU waits for a node with so many times the edges of a warp's share.
LONG_SHARE = 2


@dataclass(frozen=True)
class GraphClass:
    """Size and mean degree of a graph in powers of two; convolutions alone have a degree.

    log2_skew: how many times the edges of a mean node the longest has, rounded down; 0 if that is less than 8.
    """

    operation: str
    log2_edges: int
    log2_degree: int = 0
    log2_skew: int = 0

    @classmethod
    def of(cls, operation: str, num_edges: int, num_nodes: int) -> GraphClass:
        """The class of a graph; ``num_nodes`` counts the destinations."""
        if operation not in OPERATIONS:
            raise ConfigError(f"operation is {operation!r}; expected one of {OPERATIONS}")
        log2_edges, log2_degree = size_class(num_edges, num_nodes)
        return cls(operation, log2_edges, log2_degree if operation in CONVOLUTIONS else 0)

    @classmethod
    def of_graph(cls, operation: str, receiver: torch.Tensor, num_nodes: int) -> GraphClass:
        """The class of a graph with its skew. receiver: [num_edges]; a GPU is waited for. Small graphs have no skew."""
        found = cls.of(operation, len(receiver), num_nodes)
        if operation not in CONVOLUTIONS or 2**found.log2_edges <= SMALL_GRAPH_EDGES:
            return found
        counts = receiver.unique(return_counts=True)[1]
        skew = int(counts.max() * len(counts) // len(receiver)).bit_length() - 1
        return replace(found, log2_skew=skew) if skew >= LONG_NODE else found

    @property
    def text(self) -> str:
        """For example ``conv-e14-d5``, ``conv-e17-d5-s4`` with skew, ``plain-e16`` or ``harmonics-e20``."""
        degree = f"-d{self.log2_degree}" if self.operation in CONVOLUTIONS else ""
        return f"{self.operation}-e{self.log2_edges}{degree}" + (f"-s{self.log2_skew}" if self.log2_skew else "")

    @classmethod
    def parse(cls, text: str) -> GraphClass:
        """Inverse of :attr:`text`."""
        match = re.fullmatch(r"([a-z_]+)-e(\d{1,3})(?:-d(\d{1,3})(?:-s(\d{1,3}))?)?", text)
        # Those of convolutions have a degree, others have none.
        if not match or match[1] not in OPERATIONS or (match[1] in CONVOLUTIONS) != (match[3] is not None):
            raise ConfigError(f"{text!r} is not a graph class; expected for example 'conv-e14-d5' or 'plain-e16'")
        return cls(match[1], int(match[2]), int(match[3] or 0), int(match[4] or 0))

    def is_small(self, facts: DeviceFacts) -> bool:
        """Whether launches and latencies dominate on this device, not bandwidth."""
        return 2**self.log2_edges <= small_graph_edges(facts)

    def waits_for_longest(self, facts: DeviceFacts) -> bool:
        """Whether a GPU would wait for the node with most edges, if one worker took all edges of a node.

        The warps of all multiprocessors share the edges. One that takes twice its share ends last: it is alone then,
        but an edge takes it a latency of memory (0.7 us), about as long as with all others at work. On a graph of even
        degrees that is so where nodes are fewer than warps; nothing is gained there, so skew is needed too.
        """
        longest, share = 2.0 ** (self.log2_degree + self.log2_skew), 2.0**self.log2_edges / (facts.units * WARPS_HELD)
        return facts.backend == "cuda" and bool(self.log2_skew) and longest >= LONG_SHARE * share

    def distance(self, other: GraphClass) -> float:
        """How far apart two classes are, in factors of two; infinite between different operations."""
        if self.operation != other.operation:
            return math.inf
        skew = abs(self.log2_skew - other.log2_skew)
        return abs(self.log2_edges - other.log2_edges) + abs(self.log2_degree - other.log2_degree) + skew
