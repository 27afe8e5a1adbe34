"""Vectors times matrices of few kinds (a cell, a strain), one for each structure, as models read them at every edge.

``cell[batch]`` and a batched product of its rows are what packages write. On a GPU both are slow. The gradient by the
cell is a sum over all edges of a structure into one row, and a batched product of 3 by 3 matrices takes some 6
nanoseconds an edge with its gradients (H200: 2.6 ms of 51 for 443,000 edges, where the sum took another 1.5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelgen.errors import InputError

# Rows that are summed one after the other.
_TOGETHER = 256


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` for a table of few rows; its gradient is summed by parts of the index, then over parts."""
    if index.dim() != 1:  # would be broadcast, or not looked at
        raise InputError(f"batch has shape {tuple(index.shape)}; expected the structure of each atom, [atoms]")
    count = table.shape[0]
    if count == 1:
        return table.expand(index.shape[0], *table.shape[1:])
    parts = -(-index.shape[0] // _TOGETHER)
    copies = table.expand(parts, *table.shape).flatten(0, 1)
    return copies[torch.arange(index.shape[0], device=index.device) // _TOGETHER * count + index]


def times_matrices(vectors: Tensor, matrices: Tensor) -> Tensor:
    """Each row [n, 3] times its matrix [n, 3, 3], as ``einsum("be,bec->bc")``, without a batched matrix product."""
    return (vectors.unsqueeze(-1) * matrices).sum(-2)
