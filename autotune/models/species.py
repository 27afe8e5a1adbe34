"""Products of features with one-hot species: a matrix product for each element that occurs, not for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autotune.models.linear import LEAST_IN_TF32, Trilinear, component_rows, components, joined, with_rows
from autotune.models.stand_ins import Draw, NodeStandIn, ProductStandIn
from autotune.modules.base import autocast
from autotune.workload.workload import relayout
from kernelgen.compat import is_eager, is_tracing, runs_eagerly, without_autocast
from kernelgen.errors import UnsupportedError
from kernelgen.ops.node_kernels import CHUNK, BlockProduct, Groups, MatrixPath
from kernelgen.problem.irreps import Block, blocks_of
from kernelgen.runtime.graph import KnownGraphs

# Nodes by element: which rows of one-hot ``node_attrs`` belong together, found once a tensor for all layers.
#
# On a CPU nodes are sorted by element. On a GPU, where the counts are not known without waiting for it, every element's
# nodes fill chunks of ``CHUNK`` rows, the last one padded; elements and nodes bound the number of chunks.


class Species(NamedTuple):
    """elements: int64 [nodes]. On a CPU ``order`` is the sorted nodes (None if they are sorted), ``place`` where each
    went, and ``spans`` are (element, begin, end). On a GPU ``place`` is each node's row in the chunks, ``chunks`` their
    elements, and ``groups`` the same for kernels.
    """

    elements: Tensor
    place: Tensor | None
    order: Tensor | None = None
    spans: tuple[tuple[int, int, int], ...] = ()
    chunks: Tensor | None = None
    groups: Groups | None = None


def sorted_species(elements: Tensor) -> Species:
    """By sorting; waits for the device."""
    ordered, order = torch.sort(elements, stable=True)
    found, counts = torch.unique_consecutive(ordered, return_counts=True)
    ends = counts.cumsum(0).tolist()
    spans = tuple(zip(found.tolist(), [0, *ends[:-1]], ends, strict=True))
    if torch.equal(ordered, elements):
        return Species(elements, None, None, spans)
    return Species(elements, torch.argsort(order), order, spans)


def chunked_species(elements: Tensor, count: int) -> Species:
    """By chunks, for ``count`` elements; does not wait for the device."""
    nodes, device = len(elements), elements.device
    ordered, order = torch.sort(elements, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(count + 1, device=device))
    ends = ((starts.diff() + CHUNK - 1) // CHUNK).cumsum(0)
    begins = torch.cat((ends.new_zeros(1), ends))
    rows = torch.arange(nodes, device=device) - starts[ordered] + begins[ordered] * CHUNK
    most = min(nodes, count) + nodes // CHUNK
    chunks = torch.searchsorted(ends, torch.arange(most, device=device), right=True).clamp_(max=count - 1)
    place = torch.empty_like(rows).index_copy_(0, order, rows)
    slots = rows.new_full((most * CHUNK,), -1).index_copy_(0, rows, order)
    return Species(elements, place, chunks=chunks, groups=Groups(nodes, slots, chunks, begins))


_KNOWN = KnownGraphs()
# Devices and numbers of elements for which rows were one-hot: later tensors are checked without waiting.
_MET: set[tuple[torch.device, int]] = set()


def species_of(node_attrs: Tensor) -> Species | None:
    """The nodes by element; None if rows are not one-hot, need gradients, or are traced or transformed.

    On a GPU the first tensor of a device is checked with a wait. Should a later one not be one-hot, a device-side
    assertion fails.
    """
    if node_attrs.requires_grad or not is_eager(node_attrs):
        return None
    return _found_once(node_attrs, (), lambda: _found(node_attrs))


def types_of(types: Tensor, count: int) -> tuple[Species, Tensor]:
    """The nodes by type, int64 [nodes] below ``count``, and a node of each type.

    On a CPU types are numbered anew, those that occur alone. On a GPU there are as many numbers as types, or as so few
    nodes may have; those that do not occur have node 0.
    """
    return _found_once(types, ("types", count), lambda: _by_types(types, count))


def _found_once(nodes: Tensor, key: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    """What is found of a tensor, once on each stream."""
    known = _KNOWN.find(nodes, nodes)
    if known is None:
        return find()
    key = (*key, torch.cuda.current_stream(nodes.device).cuda_stream if nodes.is_cuda else 0)
    if key not in known.facts:
        with torch.inference_mode(False):
            known.facts[key] = find()
    return known.facts[key]


def types_without_waiting(types: Tensor, count: int) -> tuple[Species, Tensor]:
    """What :func:`types_of` gives on a GPU."""
    most = -(-len(types) // 8) * 8  # a multiple, so that few numbers of nodes make products of their own
    if most < count:
        occurs = types.new_zeros(count).scatter_(0, types, 1)
        types, count = (occurs.cumsum(0) - 1).index_select(0, types), most
    nodes = torch.arange(len(types), device=types.device)
    return chunked_species(types, count), types.new_zeros(count).scatter_(0, types, nodes)


def _by_types(types: Tensor, count: int) -> tuple[Species, Tensor]:
    if types.is_cuda:
        return types_without_waiting(types, count)
    nodes = torch.arange(len(types), device=types.device)
    found, elements = torch.unique(types, return_inverse=True)
    return sorted_species(elements), torch.empty_like(found).scatter_(0, elements, nodes)


def elements_of(node_attrs: Tensor) -> Tensor | None:
    """The number of each node's element, int64; also in traced code, where rows must be one-hot.

    Code of torch.compile asserts that. What is exported does not: torch's compiler would try the assertion on any rows.
    """
    if is_tracing() and not node_attrs.requires_grad:
        elements, are_one_hot = _largest(node_attrs)
        if torch.compiler.is_compiling():
            torch._assert_async(are_one_hot, "node_attrs has rows that are not one-hot")
        return elements
    species = species_of(node_attrs)
    return None if species is None else species.elements


@torch.no_grad()
def _found(node_attrs: Tensor) -> Species | None:
    if 0 in node_attrs.shape:
        return None
    is_captured = node_attrs.is_cuda and torch.cuda.is_current_stream_capturing()
    if is_captured:
        # Rows of a graph that is being captured cannot be looked at; those that were not one-hot before are not now.
        before = _KNOWN.seen(node_attrs, node_attrs)
        if before is not None and None in before.facts.values():
            return None
    elements, are_one_hot = _largest(node_attrs)
    key = (node_attrs.device, node_attrs.shape[1])
    if is_captured or (node_attrs.is_cuda and key in _MET):
        torch._assert_async(are_one_hot, "node_attrs has rows that are not one-hot, after one-hot ones on this device")
    elif not are_one_hot:
        return None
    else:
        _MET.add(key)
    return chunked_species(elements, node_attrs.shape[1]) if node_attrs.is_cuda else sorted_species(elements)


def _largest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The place of each row's largest number, and whether all rows are one-hot."""
    largest, places = rows.max(1)
    return places, ((largest == 1) & (rows.count_nonzero(1) == 1)).all()


class Path(NamedTuple):
    """A block of x times the matrix of an element, added to a block of y. Weights at w: [rows, elements, columns]."""

    x: Block
    y: Block
    w: int
    elements: int
    coefficient: float

    @property
    def numel(self) -> int:
        return self.x.mul * self.elements * self.y.mul

    def weights(self, row: Tensor) -> Tensor:
        return row.narrow(0, self.w, self.numel).view(self.x.mul, self.elements, self.y.mul)


class Grouping(ABC):
    """Rows put together by element, and the views of a block that one batched product takes."""

    def __init__(self, species: Species) -> None:
        self.species = species

    @abstractmethod
    def grouped(self, features: Tensor) -> Tensor: ...

    @abstractmethod
    def ungrouped(self, found: Tensor) -> Tensor: ...

    @abstractmethod
    def views(self, grouped: Tensor, block: Block) -> list[Tensor]:
        """Batches of rows, ``[batch, rows, channels]``."""

    @abstractmethod
    def matrices(self, weights: Tensor, dim: int) -> list[Tensor]:
        """For each of them the matrices of their elements, from weights [rows, elements, columns]."""

    @abstractmethod
    def collect(self, gradients: list[Tensor], weights: Tensor) -> None:
        """Write the gradients of these matrices into those of the weights."""


class Spans(Grouping):
    """Rows sorted by element: a batch for each element, of an irrep's components."""

    def grouped(self, features: Tensor) -> Tensor:
        order = self.species.order
        return with_rows(features) if order is None else features.index_select(0, order)

    def ungrouped(self, found: Tensor) -> Tensor:
        place = self.species.place
        return found if place is None else found.index_select(0, place)

    def views(self, grouped: Tensor, block: Block) -> list[Tensor]:
        spans = self.species.spans
        return [component_rows(grouped[begin:end], block.offset, block.dim, block.mul) for _, begin, end in spans]

    def matrices(self, weights: Tensor, dim: int) -> list[Tensor]:
        return [weights[:, element].expand(dim, -1, -1) for element, _, _ in self.species.spans]

    def collect(self, gradients: list[Tensor], weights: Tensor) -> None:
        weights.zero_()
        for (element, _, _), values in zip(self.species.spans, gradients, strict=True):
            weights[:, element] = values.sum(0)


class Chunks(Grouping):
    """Rows in chunks of one element: a batch for each component of an irrep, of chunks."""

    def __init__(self, species: Species, elements: Tensor, place: Tensor) -> None:
        super().__init__(species)
        self.elements, self.place = elements, place

    def grouped(self, features: Tensor) -> Tensor:
        rows = features.new_zeros(len(self.elements) * CHUNK, features.shape[1])
        return rows.index_copy_(0, self.place, features).view(-1, CHUNK, features.shape[1])

    def ungrouped(self, found: Tensor) -> Tensor:
        return found.flatten(0, 1).index_select(0, self.place)

    def views(self, grouped: Tensor, block: Block) -> list[Tensor]:
        return list(grouped.narrow(2, block.offset, block.dim * block.mul).split(block.mul, 2))

    def matrices(self, weights: Tensor, dim: int) -> list[Tensor]:
        return [weights.index_select(1, self.elements).transpose(0, 1)] * dim

    def collect(self, gradients: list[Tensor], weights: Tensor) -> None:
        # A matrix product adds the chunks of an element in an order that is the same at every call.
        of_element = torch.nn.functional.one_hot(self.elements, weights.shape[1]).to(weights)
        found = torch.mm(of_element.t(), sum(gradients[1:], gradients[0]).flatten(1))
        weights.copy_(found.view(weights.shape[1], weights.shape[0], weights.shape[2]).transpose(0, 1))


def grouping_of(species: Species) -> Grouping:
    chunks, place = species.chunks, species.place
    return Spans(species) if chunks is None or place is None else Chunks(species, chunks, place)


class ByElement(NamedTuple):
    """A product's paths, the widths of x and y, and its kernels."""

    paths: Sequence[Path]
    dims: dict[str, int]
    kernel: BlockProduct


def by_element(paths: Sequence[Path], dims: dict[str, int]) -> ByElement:
    """With the kernels of these paths."""
    found = [
        MatrixPath(
            *(path.x.offset, path.y.offset, path.w, path.elements * path.y.mul, path.y.mul),
            *(path.x.mul, path.y.mul, path.y.dim, path.coefficient),
        )
        for path in paths
    ]
    return ByElement(paths, dims, BlockProduct(found, (dims["x"], dims["y"]), sum(path.numel for path in paths)))


class MatricesByElement(Trilinear):
    """The product for nodes whose elements are known."""

    def __init__(self, product: ByElement, species: Species) -> None:
        self.paths, self.dims, self.kernel = product
        self.groups, self.grouping = species.groups, grouping_of(species)
        self.weight_numel = self.kernel.numel

    def derivative(self, wanted: str, first: Tensor, second: Tensor) -> Tensor:
        grouping, groups = self.grouping, self.groups
        if wanted == "w":
            if groups is not None and self.kernel.takes(first):
                return self.kernel.weights(with_rows(first), with_rows(second), groups, self.paths[0].elements)
            return self._of_weights(grouping.grouped(first), grouping.grouped(second))
        features, weights = (first, second) if wanted == "y" else (second, first)
        if groups is not None and self.kernel.takes(features):
            return self.kernel.rows(wanted, with_rows(features), weights.contiguous(), groups)
        given = grouping.grouped(features)
        found, written = given.new_empty(*given.shape[:-1], self.dims[wanted]), set()
        for path in self.paths:
            source, target = (path.x, path.y) if wanted == "y" else (path.y, path.x)
            each = grouping.matrices(path.weights(weights), target.dim)
            for x, y, w in zip(grouping.views(given, source), grouping.views(found, target), each, strict=True):
                w = w if wanted == "y" else w.mT
                y.baddbmm_(x, w, beta=float(target in written), alpha=path.coefficient)
            written.add(target)
        if sum(block.dim * block.mul for block in written) < self.dims[wanted]:
            _clear_rest(found, written)
        return grouping.ungrouped(found)

    def _of_weights(self, x: Tensor, y: Tensor) -> Tensor:
        found = x.new_empty(self.weight_numel)
        for path in self.paths:
            pairs = zip(self.grouping.views(x, path.x), self.grouping.views(y, path.y), strict=True)
            weights = path.weights(found)
            self.grouping.collect([torch.bmm(a.mT, b) for a, b in pairs], weights)
            weights.mul_(path.coefficient)
        return found

    def traceable(self, wanted: str, first: Tensor, second: Tensor) -> Tensor:
        one_hot = torch.nn.functional.one_hot(
            self.grouping.species.elements, self.paths[0].elements if self.paths else 1
        )
        return dense(self.paths, self.dims, one_hot, wanted, first, second)


def dense(
    paths: Sequence[Path], dims: dict[str, int], node_attrs: Tensor, wanted: str, first: Tensor, second: Tensor
) -> Tensor:
    """A derivative of the product with any rows of scalars, in operations that torch traces and differentiates."""
    attrs = node_attrs.to(first.dtype)
    if wanted == "w":
        gradients = []
        for path in paths:
            by_node = torch.matmul(_of(first, path.x).transpose(1, 2), _of(second, path.y))
            by_element = torch.matmul(attrs.t(), by_node.reshape(first.shape[0], path.x.mul * path.y.mul))
            by_element = by_element.reshape(path.elements, path.x.mul, path.y.mul).transpose(0, 1)
            gradients.append(path.coefficient * by_element.reshape(path.numel))
        return torch.cat(gradients)
    features, weights = (first, second) if wanted == "y" else (second, first)
    found: dict[int, Tensor] = {}
    for path in paths:
        source, target = (path.x, path.y) if wanted == "y" else (path.y, path.x)
        by_element = path.coefficient * path.weights(weights).transpose(0, 1).reshape(
            path.elements, path.x.mul * path.y.mul
        )
        matrices = torch.matmul(attrs, by_element).reshape(features.shape[0], path.x.mul, path.y.mul)
        values = torch.matmul(_of(features, source), matrices if wanted == "y" else matrices.transpose(1, 2))
        values = values.reshape(features.shape[0], target.dim * target.mul)
        found[target.offset] = found[target.offset] + values if target.offset in found else values
    return joined(found, dims[wanted], features)


def _of(features: Tensor, block: Block) -> Tensor:
    """A block as ``[nodes, dim, mul]``."""
    return components(features, block.offset, block.dim, block.mul).transpose(0, 1)


def _clear_rest(found: Tensor, written: set[Block]) -> None:
    """Zeros in the blocks that no path writes."""
    end = 0
    for block in sorted(written, key=lambda block: block.offset):
        found[..., end : block.offset].zero_()
        end = block.offset + block.dim * block.mul
    found[..., end:].zero_()


class SpeciesProduct(ProductStandIn, NodeStandIn):
    """Replaces one ``e3nn.o3.TensorProduct`` of node features with species, by default one-hot ones.

    Other rows of scalars, and rows that need gradients, give e3nn's values too, as dense products.
    """

    detail = "a matrix product by element in layout ir_mul"

    def __init__(self, original: Any, **_: Any) -> None:
        super().__init__()
        self.__dict__["paths"] = _paths_of(original)
        self.__dict__["dims"] = {"x": original.irreps_in1.dim, "y": original.irreps_out.dim}
        self.__dict__["product"] = by_element(self.paths, self.dims)
        self._take_place_of(original)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x ``[nodes, irreps_in1.dim]``, y ``[nodes, elements]`` -> ``[nodes, irreps_out.dim]``."""
        x, y, weight = autocast(x, y, self.weight)
        species = species_of(y)
        if species is None:
            with without_autocast(x):
                return dense(self.paths, self.dims, y, "y", x, weight)
        return MatricesByElement(self.product, species)(x, weight)

    @property
    def block_products(self) -> tuple[BlockProduct, ...]:
        """The kernels that a user's choice of precision is for."""
        is_wide = self.paths and all(path.y.mul >= LEAST_IN_TF32 for path in self.paths)
        return (self.product.kernel,) if is_wide else ()

    def both_results(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """The node attributes are one-hot, all elements in turn."""
        count = self.irreps_in2.dim
        rows = max(16, count)
        (x,) = draw((rows, self.irreps_in1.dim))
        y = torch.eye(count).to(x)[torch.arange(rows, device=x.device).flip(0) % count]
        irreps = (str(self.irreps_in1), str(self.irreps_out))
        found = self.forward(relayout(x, irreps[0], "mul_ir", "ir_mul"), y)
        return relayout(found, irreps[1], "ir_mul", "mul_ir"), self.original.forward(x, y)


def _paths_of(product: Any) -> tuple[Path, ...]:
    """UnsupportedError unless every path multiplies shared weights of mode uvw with the one block of scalars."""
    scalars = blocks_of(str(product.irreps_in2))
    inputs, outputs = blocks_of(str(product.irreps_in1)), blocks_of(str(product.irreps_out))
    is_weighted = all(step.connection_mode == "uvw" and step.has_weight for step in product.instructions)
    if not (is_weighted and product.shared_weights and product.internal_weights):
        raise UnsupportedError("it is not a product of mode uvw with shared weights of its own")
    if len(scalars) != 1 or scalars[0].l != 0:
        raise UnsupportedError(f"its second input is {product.irreps_in2}; expected one block of scalars")
    found, at = [], 0
    for step in product.instructions:
        x, y = inputs[step.i_in1], outputs[step.i_out]
        # The coupling of an irrep with a scalar is the identity over the square root of its dimension.
        found.append(Path(x, y, at, scalars[0].mul, float(step.path_weight) / y.dim**0.5))
        at += x.mul * scalars[0].mul * y.mul
    return tuple(found)


# Products of features with an embedding of the nodes' types: a matrix for each type that occurs, not for each node.

# The nodes' types, int64 [nodes] or more, while a block that has them runs; its product sees the embedding alone.
NODE_TYPES: ContextVar[Tensor | None] = ContextVar("NODE_TYPES", default=None)


class TypedProduct(SpeciesProduct):
    """Replaces one ``e3nn.o3.TensorProduct`` of node features with rows of scalars that depend on a node's type alone.

    Without :data:`NODE_TYPES`, and in what torch traces, it is a :class:`SpeciesProduct`.
    """

    detail = "a matrix product by type in layout ir_mul"

    def __init__(self, original: Any, types: int, **_: Any) -> None:
        super().__init__(original)
        self.__dict__["types"] = types
        # By the number of types: their matrices, and the product with them.
        self.__dict__["by_count"] = {}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x ``[nodes, irreps_in1.dim]``, y ``[nodes, scalars]`` -> ``[nodes, irreps_out.dim]``."""
        x, y, weight = autocast(x, y, self.weight)
        kinds = NODE_TYPES.get()
        if kinds is None or not runs_eagerly(x, y, weight, kinds) or 0 in y.shape or not self.paths:
            return super().forward(x, y)
        species, members = types_of(kinds[: len(y)], self.types)
        # One row of the embedding for each type. Its gradient goes to one of the type's nodes, which stands for all.
        rows, count = y.index_select(0, members), len(members)
        if count not in self.by_count:
            # The matrices ``[rows, types, columns]`` of each path are one after the other.
            paths = [path._replace(w=path.w // path.elements * count, elements=count) for path in self.paths]
            self.by_count[count] = TypeMatrices(self.paths, count), by_element(paths, self.dims)
        matrices, product = self.by_count[count]
        product.kernel.in_tf32 = self.product.kernel.in_tf32
        return MatricesByElement(product, species)(x, matrices(rows, weight))


class TypeMatrices(Trilinear):
    """y, the matrices ``[rows, types, columns]`` of all paths, from weights w ``[rows, width, columns]`` of each.

    x ``[types, width]``: the rows of an embedding.
    """

    def __init__(self, paths: Sequence[Path], count: int) -> None:
        self.paths, self.count, self.width = paths, count, paths[0].elements
        self.rows = sum(path.numel for path in paths) // self.width

    def derivative(self, wanted: str, first: Tensor, second: Tensor) -> Tensor:
        if wanted == "x":
            return self.traceable(wanted, first, second)
        before, after = (self.width, self.count) if wanted == "y" else (self.count, self.width)
        given, found = second.contiguous(), first.new_empty(self.rows * after)
        x = first if wanted == "y" else first.t()
        for path in self.paths:
            left = x.expand(path.x.mul, -1, -1)
            torch.bmm(left, _matrices(path, given, before), out=_matrices(path, found, after))
        return found

    def traceable(self, wanted: str, first: Tensor, second: Tensor) -> Tensor:
        if wanted == "x":
            pairs = [(_matrices(path, second, self.count), _matrices(path, first, self.width)) for path in self.paths]
            parts = [torch.bmm(of_types, weights.transpose(1, 2)).sum(0) for of_types, weights in pairs]
            return sum(parts[1:], parts[0])
        before, x = (self.width, first) if wanted == "y" else (self.count, first.t())
        given = second.contiguous()
        return torch.cat(
            [torch.bmm(x.expand(path.x.mul, -1, -1), _matrices(path, given, before)).flatten() for path in self.paths]
        )


def _matrices(path: Path, row: Tensor, width: int) -> Tensor:
    """A path's ``[rows, width, columns]`` in a row of all paths'."""
    rows, columns = path.x.mul, path.y.mul
    return row.narrow(0, path.w // path.elements * width, rows * width * columns).view(rows, width, columns)
