"""What all stand-ins for node features in ``ir_mul`` have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from autotune.integrations.stand_ins import StandIn
from autotune.modules.base import NoTorchScript

# Random tensors of given shapes, of a model's device and dtype.
Draw: TypeAlias = "Callable[..., list[Tensor]]"


class NodeStandIn(StandIn, NoTorchScript):
    """Made with the arguments ``original``, ``strict`` and ``deterministic``. detail: what computes it, in words."""

    detail: str

    @abstractmethod
    def both_results(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Its result and the original's, in the original's layout, on random inputs."""
