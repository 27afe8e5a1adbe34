"""Products of features with one-hot species: a matrix product for each element that occurs, not for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autotune.integrations.ir_mul.species import Species, species_of
from autotune.integrations.ir_mul.stand_in import Draw, NodeStandIn
from autotune.integrations.ir_mul.trilinear import Trilinear, component_rows, components, joined, with_rows
from autotune.integrations.stand_ins import ProductStandIn
from autotune.modules.base import autocast
from autotune.workload.workload import relayout
from kernelgen.compat import without_autocast
from kernelgen.errors import UnsupportedError
from kernelgen.ops import node_matrices as matrices
from kernelgen.ops.node_matrices import CHUNK, BlockProduct, MatrixPath
from kernelgen.problem.irreps import Block, blocks_of


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
            if groups is not None and matrices.takes(first):
                return self.kernel.weights(with_rows(first), with_rows(second), groups, self.paths[0].elements)
            return self._of_weights(grouping.grouped(first), grouping.grouped(second))
        features, weights = (first, second) if wanted == "y" else (second, first)
        if groups is not None and matrices.takes(features):
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
