"""Kernels for GPUs whose text no schedule decides, which Python launches beside those of operators."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernelgen.emit.source import Source
from kernelgen.ops.contraction.elements import sums_source
from kernelgen.ops.nodes import gates, matrices


def node_sources(dtype: str) -> Iterator[Source]:
    """What happens at nodes, in float32 or float64: linear layers and products by element, gates, sums by element."""
    of_torch = getattr(torch, dtype)
    yield from (matrices.source(of_torch, of_weights) for of_weights in (False, True))
    yield gates.source(of_torch)
    yield sums_source(of_torch)
