"""The convolution of tensor products: gather by sender, product, sum by receiver.

An operator is built at the first call with a device, dtype and size class of graphs, and kept: later calls do no
lookup. Nothing is searched here. Conventions are those of :mod:`autotune.modules.tensor_product`; first and second
derivatives work in every input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autotune.modules.base import Schedules, TunedModule, autocast
from autotune.workload.graph_class import GraphClass
from kernelgen.errors import ProblemError
from kernelgen.ops.product import Operator
from kernelgen.problem.irreps import Irreps
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime.graph import EdgeOrder, assert_indices, check_ascending, check_indices, row_count


class TensorProductConv(TunedModule):
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
        schedule: Schedules | None = None,
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
        if self.check_indices:
            self._check_indices(sender, receiver, node_feats.shape[0], num_out, edges_sorted)
        node_feats, edge_attrs, weights = autocast(node_feats, edge_attrs, weights)
        num_edges = edge_attrs.shape[0] if edge_attrs.dim() else 0
        operator = self._operator_of(node_feats, num_edges, num_out, receiver)
        graph = {"num_out": num_out, "order": order, "is_sorted": edges_sorted}
        return self._run(operator, node_feats, edge_attrs, weights, sender, receiver, **graph)

    def _check_indices(
        self, sender: torch.Tensor, receiver: torch.Tensor, num_in: int, num_out: int, edges_sorted: bool
    ) -> None:
        if torch.compiler.is_compiling():
            assert_indices(sender, receiver, num_in, num_out, edges_sorted)
            return
        check_indices(sender, receiver, num_in, num_out)
        if edges_sorted:
            check_ascending(receiver)

    def _run(
        self, operator: Operator, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, *edges: torch.Tensor, **graph: Any
    ) -> torch.Tensor:
        return operator(x, y, w, *edges, **graph)
