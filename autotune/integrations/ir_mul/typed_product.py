"""Products of features with an embedding of the nodes' types: a matrix for each type that occurs, not for each node."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from autotune.integrations.ir_mul.species import types_of
from autotune.integrations.ir_mul.species_product import ByElement, MatricesByElement, Path, SpeciesProduct, by_element
from autotune.integrations.ir_mul.trilinear import Trilinear
from autotune.modules.base import autocast
from kernelgen.compat import runs_eagerly

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
            self.by_count[count] = TypeMatrices(self.paths, count), _by_type(self.paths, self.dims, count)
        matrices, product = self.by_count[count]
        return MatricesByElement(product, species)(x, matrices(rows, weight))


def _by_type(paths: Sequence[Path], dims: dict[str, int], count: int) -> ByElement:
    """The product with the matrices ``[rows, types, columns]`` of each path one after the other."""
    return by_element([path._replace(w=path.w // path.elements * count, elements=count) for path in paths], dims)


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
