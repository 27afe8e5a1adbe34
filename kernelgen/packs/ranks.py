"""Operators by which an exported program sends rows of nodes to the ranks that hold them as ghosts, and gradients back.

A rank of a molecular-dynamics program has its own atoms and *ghosts*: copies of the atoms near it that other ranks own,
or periodic images. After each layer of a network the ghosts' features come from their owners, and on the way back their
gradients go there. The program that runs the model does both, since only it knows its ranks: here are only the
operators' names, shapes and dtypes, for tracing. ``cpp/pair_equitune.cpp`` has them for LAMMPS.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelgen.errors import UnsupportedError


@torch.library.custom_op("ranks::forward_exchange", mutates_args=())
def forward_exchange(rows: Tensor) -> Tensor:
    """Rows [own atoms and ghosts, width] with each ghost's row from its owner."""
    raise UnsupportedError(_WHY)


@torch.library.custom_op("ranks::reverse_exchange", mutates_args=())
def reverse_exchange(rows: Tensor) -> Tensor:
    """Rows [own atoms and ghosts, width] with each ghost's row added to its owner's; those of ghosts stay undefined."""
    raise UnsupportedError(_WHY)


_WHY = "rows are exchanged between ranks by the program that runs an exported model; Python only traces it"

forward_exchange.register_fake(torch.empty_like)
reverse_exchange.register_fake(torch.empty_like)


class Exchange:
    """What a model's code for LAMMPS's ML-IAP takes for its ``data``, while it is traced.

    nlocal, ntotal: numbers of own atoms, and of these and ghosts; they may be symbols.
    """

    def __init__(self, atoms: int, ghosts: int) -> None:
        self.nlocal, self.ntotal = atoms, atoms + ghosts

    def forward_exchange(self, features: Tensor, out: Tensor, _: int) -> None:
        out.copy_(torch.ops.ranks.forward_exchange(features.contiguous()))

    def reverse_exchange(self, gradients: Tensor, out: Tensor, _: int) -> None:
        out.copy_(torch.ops.ranks.reverse_exchange(gradients.contiguous()))
