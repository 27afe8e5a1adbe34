"""The order of MACE's canonical weights of linear maps, and their random draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from mace_core.clebsch_gordan.irreps import Irreps
from torch import Tensor

from kernelgen.errors import InputError
from kernelgen.problem.irreps import Block, blocks_of

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Pair(NamedTuple):
    """Two blocks of one irrep, and the canonical numbers of the weights between their copies.

    weights: [copies of x, copies of y]. irrep: mace_core's, of both.
    """

    x: Block
    y: Block
    weights: Tensor
    irrep: Any


def pairs_of(irreps_in: str, irreps_out: str) -> list[Pair]:
    """All pairs of blocks that a linear map connects.

    A copy of the output has one weight for each copy of the input of its irrep. Canonical order: copies of the output
    outermost, and for each of them those of the input, both as the irreps are written.
    """
    inputs, outputs = list(_terms(irreps_in)), list(_terms(irreps_out))
    found, begin = [], 0
    for y, irrep in outputs:
        matching = [x for x, other in inputs if other == irrep]
        width = sum(x.mul for x in matching)
        numbers = torch.arange(begin, begin + y.mul * width).view(y.mul, width)
        for x, part in zip(matching, numbers.split([x.mul for x in matching], 1), strict=True):
            found.append(Pair(x, y, part.t(), irrep))
        begin += y.mul * width
    return found


def _terms(irreps: str) -> Iterator[tuple[Block, Any]]:
    return zip(blocks_of(irreps), (irrep for _, irrep in Irreps.parse(irreps).terms), strict=True)


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    """Standard normal numbers in float64 that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def checked(state: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of a canonical state; InputError if it is not there or has another shape."""
    found = state.get(name)
    if found is None or tuple(found.shape) != shape:
        given = "is not there" if found is None else f"has shape {tuple(found.shape)}"
        raise InputError(f"canonical weights: {name!r} {given}; expected {shape}. They belong to another operation")
    return found
