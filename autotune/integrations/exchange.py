"""Equitune's convolution in blocks that a package's conversion gave another library's (cuEquivariance, for one).

The other parts of the conversion stay, such as cuEquivariance's symmetric contraction. Every file of ``packages/`` may
have ``EXCHANGES``: its kinds of such blocks.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autotune.integrations.acceleration import CONVOLUTIONS, Place
from autotune.integrations.replacement import Replacing, check_graph, compared, normal
from autotune.integrations.stand_ins import StandIn
from autotune.modules.convolution import TensorProductConv
from kernelgen.folder import collected


class ExchangedConvolution(StandIn, TensorProductConv):
    """Replaces another library's convolution; checkpoints keep the names of its parameters and children."""

    def __init__(self, original: torch.nn.Module, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._take_place_of(original)
        self._keep_children_of(original)


class Exchange(ABC):
    """One kind of block. product: the attribute that holds the other library's convolution."""

    product: str

    @abstractmethod
    def library(self, block: torch.nn.Module) -> str:
        """The name of the library whose convolution the block holds; empty for any other module."""

    @abstractmethod
    def stand_in(self, block: Any, **options: Any) -> ExchangedConvolution:
        """Equitune's convolution for this block, with the options ``strict`` and ``deterministic``."""

    @abstractmethod
    def convolved(self, block: Any, x: Tensor, y: Tensor, weights: Tensor, edges: Tensor) -> Tensor:
        """What the block's own convolution gives, ``edges`` [2, edges] being senders and receivers."""

    @abstractmethod
    def fuse(self, block: torch.nn.Module) -> None:
        """Have the block call its product with the graph."""


@functools.cache
def _known() -> tuple[Exchange, ...]:
    return tuple(one for found in collected("autotune.integrations.packages", "EXCHANGES") for one in found)


def exchange_all(model: torch.nn.Module, replacing: Replacing) -> Iterator[Place]:
    """Exchange every such convolution of a model, in place."""
    for name, block in list(model.named_modules()):
        for kind in _known():
            if library := kind.library(block):
                yield _exchanged(replacing, kind, block, f"{name}.{kind.product}".lstrip("."), library)


def _exchanged(replacing: Replacing, kind: Exchange, block: torch.nn.Module, name: str, library: str) -> Place:
    original = getattr(block, kind.product)
    try:
        made = kind.stand_in(block, strict=replacing.strict, deterministic=replacing.deterministic)
        reason = "" if replacing.like is None else _difference(kind, block, made, replacing.like)
    except Exception as error:  # from the kernel or from the library: one failure must not stop the others
        reason = f"{type(error).__name__}: {error}"
    if reason:
        return Place(name, repr(original), False, f"{library} computes it: {reason}", CONVOLUTIONS)
    setattr(block, kind.product, made)
    kind.fuse(block)
    chosen = made.tuning["forward"]
    detail = f"in the place of {library}'s; schedule {chosen.origin}: {chosen.reason}"
    return Place(name, repr(original), True, detail, CONVOLUTIONS)


@torch.no_grad()
def _difference(kind: Exchange, block: Any, made: ExchangedConvolution, like: Tensor) -> str:
    """How far the two convolutions differ on random inputs; empty if they agree."""
    sizes = (made.irreps_in1.dim, made.irreps_in2.dim, made.weight_numel)
    sender, receiver = check_graph(like.device)
    x, y, weights = normal(like, *((len(sender), size) for size in sizes))
    found = TensorProductConv.forward(made, x, y, weights, sender, receiver)
    return compared(found, kind.convolved(block, x, y, weights, torch.stack((sender, receiver))))
