"""Convolutions of tensor products: gather by sender, product, sum by receiver; one forms the edges' weights itself.

An operator is built at the first call with a device, dtype and size class of graphs, and kept: later calls do no
lookup. Nothing is searched here. Conventions are those of :mod:`autotune.modules.product`; first and second
derivatives work in every input.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes as outside_of_traces

from autotune.database.lookup import Tuning, find_schedule
from autotune.database.nearest import is_of_architecture
from autotune.modules import base
from autotune.modules.base import autocast
from autotune.workload.known_kinds import RADIAL, STREAMED, WHOLE, RadialKind
from autotune.workload.workload import GraphClass
from kernelgen.compat import is_eager
from kernelgen.device import device_facts
from kernelgen.errors import InputError, ProblemError
from kernelgen.ops.library import EXPORTED_SIZE
from kernelgen.ops.product import Operator
from kernelgen.ops.radial_convolution import (
    ACCURACY,
    EDGE_PRODUCTS,
    FusedRadial,
    exported_product,
    fused_of,
    radial_product,
)
from kernelgen.problem.irreps import Irreps
from kernelgen.problem.product import RadialProblem, TensorProductProblem, size_class
from kernelgen.runtime.graph import EdgeOrder, assert_indices, check_ascending, check_indices, row_count


class TensorProductConv(base.TunedProduct):
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
        instructions: Iterable[Sequence[Any]] | None = None,
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
        node_feats: Tensor,
        edge_attrs: Tensor,
        weights: Tensor,
        sender: Tensor,
        receiver: Tensor,
        *,
        num_nodes: int | None = None,
        order: EdgeOrder | None = None,
        edges_sorted: bool = False,
    ) -> Tensor:
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

    def _run(self, operator: Operator, x: Tensor, y: Tensor, w: Tensor, *edges: Tensor, **graph: Any) -> Tensor:
        return operator(x, y, w, *edges, **graph)


# The convolution with the last layer of its radial network inside.

# Bytes of the weights that exist at a time: on a CPU they stay in its caches, on a GPU its kernels need many edges.
PART_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
# A GPU is not asked about its memory for weights of fewer bytes. In the place of more of them kernels that form them in
# registers may take so many times as long: they hold a tenth of the memory. On an H200 that is MACE large on water: a
# layer takes 1.04 times as long, a step of energies and forces 12.2 ms of the device for 11.8, and 0.9 GiB for 8.2.
ASKED_FROM = 1 << 30
MORE_TIME = 1.05
# How many times the weights of a convolution a GPU must have free to take all edges at once: the weights are kept for
# the backward pass, where their gradient and the halves of both exist beside them; in training, also those of the pass
# over forces. By the peaks of MACE-MP-0 medium on an H200, 2.7 times and 5 times in two such layers.
ROOM, ROOM_IN_TRAINING = 4, 8


class RadialTensorProductConv(TensorProductConv):
    """``TensorProductConv`` of weights ``hidden @ matrix``, which never exist for all edges at once.

    Radial networks end with such a product. A row of weights is some 5 kB, one of ``hidden`` 256 bytes, and the
    backward pass keeps the latter: it forms the weights again, at the cost of one more product. The convolution and
    its derivatives are those of ``TensorProductConv(...)(node_feats, edge_attrs, hidden @ matrix, ...)`` to rounding.

    edges_at_a_time: weights exist for so many edges (for more if one receiver has more). None: for some 4 MB of weights
    on a CPU, 256 MB on a GPU. The other arguments are those of :class:`autotune.TensorProductConv`. All edges are taken
    at once under torch.compile, torch.export and torch.func. A new graph on a GPU waits for the device once.
    product: ``fp16x3`` takes three products in half precision by tensor cores, with errors of float32's class, see
    ``kernelgen.ops.tall_products``. It is for float32, thousands of edges, and GPUs from sm_80 on, outside of
    torch.compile; elsewhere, and with ``float32``, it is torch's matrix product with torch's settings.
    fused: on a GPU from sm_80 on, in float32, kernels form the weights of all edges in registers, where they are used,
    for the value and the gradients of all but the matrix. Errors are of float32's class; with product ``tf32`` of
    TF32's, in less time. The matrix's gradient and second derivatives still take ``edges_at_a_time``. Without such a
    kernel (odd numbers of channels; hidden features not a multiple of 4, or above 128) and elsewhere it has no effect.
    Raises ProblemError for weights that all edges share.
    """

    def __init__(
        self,
        irreps_in1: Irreps,
        irreps_in2: Irreps,
        *args: Any,
        edges_at_a_time: int | None = None,
        product: str = "fp16x3",
        fused: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(irreps_in1, irreps_in2, *args, **options)
        if self.shared_weights:
            raise ProblemError("shared_weights=True: a radial network gives each edge weights of its own")
        if edges_at_a_time is not None and edges_at_a_time < 1:
            raise ProblemError(f"edges_at_a_time is {edges_at_a_time}; expected at least 1, or None")
        if product not in EDGE_PRODUCTS:
            raise ProblemError(f"product is {product!r}; expected one of {', '.join(EDGE_PRODUCTS)}")
        self.edges_at_a_time, self.product, self.fused = edges_at_a_time, product, fused

    def forward(  # type: ignore[override]
        self,
        node_feats: Tensor,
        edge_attrs: Tensor,
        hidden: Tensor,
        matrix: Tensor,
        sender: Tensor,
        receiver: Tensor,
        *,
        scale: Tensor | None = None,
        num_nodes: int | None = None,
    ) -> Tensor:
        """Messages summed at their receivers, ``[num_nodes, irreps_out.dim]``.

        hidden ``[edges, width]``, matrix ``[width, weight_numel]``, scale ``[edges]`` or ``[edges, 1]``: a factor of
        each edge's weights, such as a cutoff. The rest as in :class:`autotune.TensorProductConv`. Differentiable twice
        in all of them but the indices. Raises InputError if shapes, dtypes or devices disagree.
        """
        if scale is not None:
            if scale.shape not in ((hidden.shape[0],), (hidden.shape[0], 1)):
                raise InputError(f"scale is {tuple(scale.shape)}; expected ({hidden.shape[0]},), one for each edge")
            hidden = hidden * scale.view(-1, 1)
        given = (node_feats, edge_attrs, hidden, matrix, sender, receiver)
        how: dict[str, Any] = {"edges_at_a_time": self.edges_at_a_time, "product": self.product, "fused": self.fused}
        return convolve_radial(self, *given, num_nodes=num_nodes, **how)


def convolve_radial(
    module: TensorProductConv,
    node_feats: Tensor,
    edge_attrs: Tensor,
    hidden: Tensor,
    matrix: Tensor,
    sender: Tensor,
    receiver: Tensor,
    *,
    num_nodes: int | None = None,
    edges_at_a_time: int | None = None,
    always_streamed: bool = True,
    product: str = "fp16x3",
    fused: bool | None = False,
) -> Tensor:
    """The convolution of a module with weights ``hidden @ matrix``, by parts of the edges.

    always_streamed: if False, all edges are taken at once where that is faster and fits: on a GPU that has room for
    their weights, and where the matrix needs a gradient, because the passes of a training step on values and forces are
    no longer one. fused: see the class; None: where that was measured to be the fastest form for energies and forces
    (up to ``MORE_TIME`` times as long where weights take a GiB), and the matrix needs no gradient.
    """
    x, y, hidden, matrix = autocast(node_feats, edge_attrs, hidden, matrix)
    num_out = x.shape[0] if num_nodes is None else row_count("num_nodes", num_nodes)
    edges, operator, kernels = y.shape[0], None, None
    trains = matrix.requires_grad and torch.is_grad_enabled()
    row_bytes = module.weight_numel * x.element_size()

    def takes_all() -> bool:
        """Whether all weights may be formed at once; asks a GPU about its memory."""
        is_meant = not always_streamed and (x.is_cuda or trains)
        return is_meant and (type(edges) is not int or has_room(x.device, edges * row_bytes, trains))

    at_once = not fused and takes_all()
    may_fuse = x.is_cuda and not trains if fused is None else fused
    if may_fuse and (size := EXPORTED_SIZE.get()) is not None and not is_eager(x, y, hidden, matrix):
        with outside_of_traces():
            operator = module._operator_of(x, *size)
            case = operator, hidden.shape[-1], product, size_class(*size)
            chosen = fused or is_fused_fastest(*case, beside_whole=at_once)
            kernels = tuned_fused(*case, module.strict) if chosen else None
        if kernels is not None:
            return exported_product(kernels, x, y, hidden, matrix, sender, receiver, num_out, is_sorted=True)
    if may_fuse and type(edges) is int and is_eager(x, y, hidden, matrix):
        operator = module._operator_of(x, edges, num_out, receiver)
        case = operator, hidden.shape[-1], product, size_class(edges, num_out)
        times = MORE_TIME if edges * row_bytes >= ASKED_FROM else 1.0
        if fused or is_fused_fastest(*case, beside_whole=at_once, times=times):
            kernels = tuned_fused(*case, module.strict)
    if kernels is None and (takes_all() if fused else at_once):
        edges_at_a_time = edges
    if edges_at_a_time is None:
        edges_at_a_time = max(1, PART_BYTES.get(x.device.type, 4 << 20) // row_bytes)
    if kernels is None and type(edges) is int and edges > edges_at_a_time:
        # Kernels run on parts, so schedules are those for graphs of their size.
        operator = module._operator_of(x, edges_at_a_time, max(1, num_out * edges_at_a_time // edges))
    elif operator is None:
        operator = module._operator_of(x, edges, num_out, receiver)
    given = (x, y, hidden, matrix, sender, receiver, num_out)
    return radial_product(*given, operator, edges_at_a_time, product, kernels)


def has_room(device: torch.device, weights_bytes: int, trains: bool) -> bool:
    """Whether a device can hold the weights of all edges, and what is made of them.

    What torch's allocator keeps for later counts as free. While a CUDA graph is captured, nothing is asked.
    """
    if device.type != "cuda" or weights_bytes < ASKED_FROM or torch.cuda.is_current_stream_capturing():
        return True
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return weights_bytes * (ROOM_IN_TRAINING if trains else ROOM) <= free + kept


# The kernels that form edge weights in registers, with the schedules tuned for a device and a graph's size.

OURS = "fused"


@functools.lru_cache(maxsize=256)
def tuned_fused(
    operator: Operator, hidden: int, product: str, size: tuple[int, int], strict: bool | None = None
) -> FusedRadial | None:
    """The kernels of an operator's convolution for graphs of a ``size_class``; None if there are none on its device.

    product: as for ``fused_of``. Without a tuned schedule the default is used; if strict (None: ``$EQUITUNE_STRICT``),
    that raises TuningMissError.
    """
    if fused_of(operator, hidden, product) is None:
        return None
    found = _tunings(operator, hidden, product, size, strict)
    return fused_of(operator, hidden, product, tuple((name, tuning.schedule) for name, tuning in found.items()))


@functools.lru_cache(maxsize=256)
def is_fused_fastest(
    operator: Operator, hidden: int, product: str, size: tuple[int, int], *, beside_whole: bool, times: float = 1.0
) -> bool:
    """Whether these kernels took the least time for a value and its gradients on graphs of a ``size_class``.

    By the tuned database: the kernels, and the other forms beside them, were measured in one comparison, on this device
    or on another one of its architecture. False if they were not. beside_whole: whether all weights fit into memory;
    if not, what is compared with takes as little memory. times: how many times the least time is enough.
    """
    if fused_of(operator, hidden, product) is None:
        return False
    totals: defaultdict[str, float] = defaultdict(float)
    for tuning in _tunings(operator, hidden, product, size, strict=False).values():
        entry, facts = tuning.entry, device_facts(operator.device)
        if entry is None or (tuning.origin == "other-device" and not is_of_architecture(entry, facts)):
            return False
        totals[OURS] += entry.time_us
        rounded = ("product-tf32",) if product == "tf32" else ()
        for name in (*WHOLE, *rounded) if beside_whole else STREAMED:
            totals[name] += entry.peers.get(name, {}).get("time_us", math.inf)
    others = [time_us for name, time_us in totals.items() if name != OURS and time_us < math.inf]
    return bool(others) and totals[OURS] <= times * min(others)


def _tunings(
    operator: Operator, hidden: int, product: str, size: tuple[int, int], strict: bool | None
) -> dict[str, Tuning]:
    """By direction; in TF32 those of its class, else of three products: the kernels differ in nothing else."""
    facts, where = device_facts(operator.device), GraphClass(RADIAL, *size)

    def of_class(accuracy: str, strict: bool | None) -> dict[str, Tuning]:
        problem = RadialProblem(operator.problem, hidden, accuracy)
        return {
            name: find_schedule(problem, RADIAL, name, "float32", operator.layout, facts, where, strict)
            for name in RadialKind.directions
        }

    own = of_class(ACCURACY[product], False if product == "tf32" else strict)
    if product != "tf32" or all(tuning.entry is not None for tuning in own.values()):
        return own
    other = of_class("ieee", strict)
    return own if any(tuning.entry is None for tuning in other.values()) else other
