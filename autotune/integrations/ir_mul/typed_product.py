"""Products of features with an embedding of the nodes' types: a matrix for each type that occurs, not for each node."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from autotune.integrations.ir_mul.species import types_of
from autotune.integrations.ir_mul.species_product import MatricesByElement, Path, SpeciesProduct, grouping_of
from autotune.integrations.ir_mul.trilinear import runs_eagerly
from autotune.modules.base import autocast

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

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x ``[nodes, irreps_in1.dim]``, y ``[nodes, scalars]`` -> ``[nodes, irreps_out.dim]``."""
        x, y, weight = autocast(x, y, self.weight)
        kinds = NODE_TYPES.get()
        if kinds is None or not runs_eagerly(x, y, weight, kinds) or 0 in y.shape:
            return super().forward(x, y)
        species, members = types_of(kinds[: len(y)], self.types)
        # One row of the embedding for each type. Its gradient goes to one of the type's nodes, which stands for all.
        rows = y.index_select(0, members)
        paths, blocks, at = [], [], 0
        for path in self.paths:
            blocks.append(torch.einsum("uaw,ta->utw", path.weights(weight), rows).flatten())
            paths.append(Path(path.x, path.y, at, len(members), path.coefficient))
            at += paths[-1].numel
        return MatricesByElement(paths, self.dims, grouping_of(species))(x, torch.cat(blocks))
