"""The convolution of tensor products: gather by sender, product, sum by receiver.

An operator is built at the first call with a device, dtype and size class of graphs, and kept: later calls do no
lookup. Nothing is searched here. Conventions are those of :mod:`autotune.modules.product`; first and second
derivatives work in every input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch

from autotune.database.lookup import Tuning
from autotune.database.misses import asked
from autotune.errors import TuningMissError
from autotune.modules import base
from autotune.workload.kinds.base import Problem
from autotune.workload.kinds.registry import problem_from_key
from autotune.workload.workload import GraphClass
from kernelgen.compat import constant_result
from kernelgen.errors import ProblemError
from kernelgen.ops.base import OPERATORS
from kernelgen.ops.harmonics import build_harmonics
from kernelgen.ops.product import Operator
from kernelgen.ops.symmetric_contraction import build_contraction
from kernelgen.problem.irreps import Irreps
from kernelgen.problem.product import TensorProductProblem, size_class
from kernelgen.runtime.graph import EdgeOrder, assert_indices, check_ascending, check_indices, row_count


class TensorProductConv(base.TunedModule):
    """The convolution of MACE, NequIP and SevenNet: gather by sender, product, sum by receiver.

    It is one kernel if all paths are weighted, of mode ``uvu`` and with one copy of the second input. Otherwise the
    product's kernel runs between torch's gather and sum.

    irreps_in1: node features. irreps_in2: edge attributes (spherical harmonics).
    filter_irreps_out: keep every path whose output irrep is in it, one output block per path, sorted (as MACE does);
        or irreps_out and instructions ``(in1, in2, out, mode, has_weight[, path_weight])`` as in e3nn.
    shared_weights: one row of weights for all edges instead of one per edge.
    graph_class: load the schedules of this class, such as ``conv-e14-d5`` (about 2**14 edges, 2**5 per node, see
        ``autotune.GraphClass``), in every call. None takes those of each call's graph: by its number of edges and of
        edges a node, rounded to powers of two; and by the skew of the first graph of each such size, outside of
        compiled, exported and captured code. Ask for skew there by a class such as ``conv-e17-d5-s4``.
    check_indices: False checks sender and receiver once, when a graph is first used: an index out of range raises
        InputError on a CPU and fails a device-side assertion on a GPU, without waiting (not for GPU memory imported
        from elsewhere, such as through DLPack). True checks at every call, waits for the device, and stays as
        assertions in compiled and exported graphs.
    layout, schedule, strict, deterministic, tolerance, device, dtype, irrep_normalization, path_normalization: as in
        :class:`autotune.TensorProduct`.

    Raises ProblemError for irreps or instructions that are not well-defined.
    """

    operation = "conv"

    def __init__(
        self,
        irreps_in1: Irreps,
        irreps_in2: Irreps,
        irreps_out: Irreps | None = None,
        instructions: Iterable[Sequence] | None = None,
        *,
        filter_irreps_out: Irreps | None = None,
        shared_weights: bool = False,
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        layout: str = "mul_ir",
        graph_class: GraphClass | str | None = None,
        schedule: base.Schedules | None = None,
        strict: bool | None = None,
        deterministic: bool = False,
        tolerance: float | None = None,
        check_indices: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        explicit = irreps_out is not None and instructions is not None
        if explicit == (filter_irreps_out is not None) or (irreps_out is None) != (instructions is None):
            raise ProblemError("give either filter_irreps_out, or irreps_out together with instructions")
        if irreps_out is None or instructions is None:
            found = TensorProductProblem.channelwise(irreps_in1, irreps_in2, filter_irreps_out or "")
            irreps_out = found.irreps_out
            instructions = found.e3nn_instructions
        problem = TensorProductProblem.from_instructions(
            *(irreps_in1, irreps_in2, irreps_out, instructions),
            shared_weights=shared_weights,
            irrep_normalization=irrep_normalization,
            path_normalization=path_normalization,
        )
        super().__init__(
            problem,
            layout=layout,
            graph_class=graph_class,
            schedule=schedule,
            strict=strict,
            deterministic=deterministic,
            tolerance=tolerance,
            device=device,
            dtype=dtype,
        )
        self.check_indices = check_indices

    def forward(
        self,
        node_feats: torch.Tensor,
        edge_attrs: torch.Tensor,
        weights: torch.Tensor,
        sender: torch.Tensor,
        receiver: torch.Tensor,
        *,
        num_nodes: int | None = None,
        order: EdgeOrder | None = None,
        edges_sorted: bool = False,
    ) -> torch.Tensor:
        """Messages summed at their receivers, ``[num_nodes, irreps_out.dim]``; nodes without edges get zeros.

        node_feats ``[nodes, irreps_in1.dim]``, edge_attrs ``[edges, irreps_in2.dim]``, weights
        ``[edges, weight_numel]`` (``[weight_numel]`` where shared), sender and receiver ``[edges]`` int32 or int64.
        num_nodes: rows of the result, by default as many as node_feats has.
        edges_sorted: receiver is ascending; checked together with the indices.
        order: from ``kernelgen.runtime.graph.edge_order``, if you keep the graph's order yourself. Otherwise a graph is
        ordered once. On a CPU it is recognised by its contents; on a GPU by its memory, also through new views such as
        ``edge_index[1]``, and by torch's counter of in-place writes. That counter misses writes through ``.data``,
        ``untyped_storage()``, ``set_`` or a DLPack export, of replayed CUDA graphs and of other libraries' kernels:
        after those pass new tensors or your own order.

        Under ``torch.autocast`` half precision tensors are converted to float32, and the result is float32.

        Raises InputError if shapes, dtypes or devices disagree, and for indices out of range on a CPU or with
        check_indices. An index tensor written between forward and backward raises torch's "modified by an inplace
        operation".
        """
        num_out = node_feats.shape[0] if num_nodes is None else row_count("num_nodes", num_nodes)
        if self.check_indices and torch.compiler.is_compiling():
            assert_indices(sender, receiver, node_feats.shape[0], num_out, edges_sorted)
        elif self.check_indices:
            check_indices(sender, receiver, node_feats.shape[0], num_out)
            if edges_sorted:
                check_ascending(receiver)
        node_feats, edge_attrs, weights = base.autocast(node_feats, edge_attrs, weights)
        num_edges = edge_attrs.shape[0] if edge_attrs.dim() else 0
        operator = self._operator_of(node_feats, num_edges, num_out, receiver)
        graph = {"num_out": num_out, "order": order, "is_sorted": edges_sorted}
        return self._run(operator, node_feats, edge_attrs, weights, sender, receiver, **graph)

    def _run(
        self, operator: Operator, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, *edges: torch.Tensor, **graph: Any
    ) -> torch.Tensor:
        return operator(x, y, w, *edges, **graph)


# Base of modules whose rows do not depend on each other: harmonics of vectors, contractions of nodes.
#
# Schedules are looked up and an operator is built at the first call with a device, dtype and number of rows (rounded to
# a power of two). Later calls cost a few comparisons of integers.

# What determines a module's operators, with its operation and layout: the problem's key, the graph class ("" for any),
# strict.
Key: TypeAlias = tuple[str, str, bool | None]
_BUILDERS: dict[str, Callable[..., Any]] = {
    "harmonics": lambda problem, schedules, layout, **options: build_harmonics(problem, schedules, **options),
    "contraction": lambda problem, schedules, layout, **options: build_contraction(
        problem, schedules, layout=layout, **options
    ),
}


class _Built(NamedTuple):
    """What was built for a device, dtype and rounded logarithm of the number of rows (None: the module's own)."""

    size: int | None
    operator: Any
    tuning: dict[str, Tuning]


class TunedRows(base.NoTorchScript):
    """A module that takes the schedules tuned for its device, dtype and number of rows.

    operation: as the kind of kernel names it.
    """

    operation: ClassVar[str]
    layout: str = "mul_ir"
    problem: Any

    def _set_problem(self, problem: Problem, num_rows: int | None, strict: bool | None, name: str) -> None:
        """num_rows: take the schedules for about this number in every call; ``name``: of that argument."""
        if num_rows is not None and (type(num_rows) is not int or num_rows < 1):
            raise ProblemError(f"{name} is {num_rows!r}; expected a positive integer, or None for many")
        self.problem = problem
        graph_class = GraphClass.of(self.operation, num_rows, 1).text if num_rows else ""
        # torch.compile compares it before it reuses one module's code for another.
        self._key: Key = (problem.key, graph_class, strict)
        self._forget_operators()

    @property
    def tuning(self) -> dict[str, Tuning]:
        """By direction: schedule, origin, database entry and reason, for the operator used last.

        Before the first call: what would be loaded on torch's default device and dtype, for many rows unless their
        number was given.
        """
        return dict(self._met[3].tuning) if self._met else self.tuning_for(self._key[1] or None)

    def tuning_for(self, graph_class: GraphClass | str | None) -> dict[str, Tuning]:
        """The same for as many rows as in a class such as ``harmonics-e14``, on the device and dtype used last."""
        parsed = GraphClass.parse(graph_class) if isinstance(graph_class, str) else graph_class
        if parsed is not None and parsed.operation != self.operation:
            raise ProblemError(f"graph_class is {parsed.text!r}; expected one of {self.operation}")
        device, dtype = self._met[:2] if self._met else base.or_default(None, None)
        return _lookup(self.operation, self.layout, self._key, device, dtype).find(parsed).tuning

    def operator_for(self, device: torch.device, dtype: torch.dtype, num_rows: int | None) -> Any:
        """The operator for about this number of rows, None for many; built if needed."""
        size = None if self._has_one_size or num_rows is None else _size(num_rows)
        return self._use(device, dtype, size).operator

    def _operator_of(self, device: torch.device, dtype: torch.dtype, rows: int) -> Any:
        """What runs a call on this number of rows, also where torch traces it."""
        if torch.compiler.is_compiling() or type(rows) is not int:
            return OPERATORS[operator_text(self.operation, self.layout, self._key, device, dtype)]
        met, size = self._met, None
        if met is not None and met[1] is dtype and met[0] == device:
            if met[2] == rows or self._has_one_size:
                return met[3].operator
            size = _size(rows)
            if size == met[3].size:
                return met[3].operator
        elif not self._has_one_size:
            size = _size(rows)
        return self._use(device, dtype, size, rows).operator

    def _use(self, device: torch.device, dtype: torch.dtype, size: int | None, rows: int = -1) -> _Built:
        """What a size class uses, built if needed; the next call on as many rows finds it at once.

        size: None for the number of rows that the module was told, or many.
        """
        built = self._operators.get((device, dtype, size))
        if built is None:
            graph_class = GraphClass.parse(self._key[1]) if self._key[1] else None
            with base.outside_of_traces():
                lookup = _lookup(self.operation, self.layout, self._key, device, dtype)
                found = lookup.find(graph_class if size is None else GraphClass(self.operation, size))
                operator = _build(self.operation, self.layout, self._key, device, dtype, found)
                built = _Built(size, operator, found.tuning)
            self._operators[device, dtype, size] = built
        # Without the search for parameters and modules that torch does for each attribute that is set.
        self.__dict__["_met"] = (device, dtype, rows, built)
        return built

    @property
    def _operator(self) -> Any:
        return self._met[3].operator if self._met else None

    def _forget_operators(self) -> None:
        self._operators: dict[tuple[torch.device, torch.dtype, int | None], _Built] = {}
        # Device, dtype and rows of a call, and what it used: one attribute, so that threads never mix two calls.
        self._met: tuple[torch.device, torch.dtype, int, _Built] | None = None
        self._has_one_size = self._key[1] != ""

    def __getstate__(self) -> dict[str, Any]:
        # Loaded kernels belong to this process. A copy builds its own from the compile cache at its first call.
        return {name: value for name, value in self.__dict__.items() if name not in ("_operators", "_met")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_operators()


@constant_result
def operator_text(operation: str, layout: str, key: Key, device: torch.device, dtype: torch.dtype) -> str:
    """The name under which the operator is registered: of a family, if schedules depend on the number of rows.

    Lookup and build happen here, untraced.
    """
    lookup, what = _lookup(operation, layout, key, device, dtype), (operation, layout, key, device, dtype)
    with base.outside_of_traces():
        if key[1]:
            return _build(*what, lookup.find(GraphClass.parse(key[1]))).text
        return lookup.family(lambda found: _build(*what, found)).text


def _size(rows: int) -> int:
    return size_class(rows, rows)[0]


def _lookup(operation: str, layout: str, key: Key, device: torch.device, dtype: torch.dtype) -> base.Lookup:
    base.check_dtype("x is", dtype)
    return base.Lookup(problem_from_key(key[0]), operation, layout, device, dtype, key[2])


def _build(operation: str, layout: str, key: Key, device: torch.device, dtype: torch.dtype, found: base.Found) -> Any:
    for miss in found.refused.values():
        raise TuningMissError(miss)
    made = _BUILDERS[operation](problem_from_key(key[0]), found.schedules, layout, dtype=dtype, device=device)
    asked(made)
    return made
