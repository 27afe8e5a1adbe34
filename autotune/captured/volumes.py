"""Determinants of cells without a solver library.

torch computes them by a factorisation in another library, of which not all can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class VolumesByProducts(TorchFunctionMode):
    """Within, ``det`` of matrices [..., 3, 3] is the triple product of their rows."""

    def __torch_function__(
        self, func: Callable, types: Sequence, args: Sequence = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _DETERMINANTS and args[0].shape[-2:] == (3, 3):
            return triple_product(args[0])
        return func(*args, **(kwargs or {}))


_DETERMINANTS = (torch.linalg.det, torch.det, Tensor.det)


def triple_product(cell: Tensor) -> Tensor:
    """``a . (b x c)`` of the rows of cells [..., 3, 3]."""
    a, b, c = cell.unbind(-2)
    return (a * torch.linalg.cross(b, c)).sum(-1)
