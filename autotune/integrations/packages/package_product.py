"""What :func:`autotune.accelerate` must know of a package's own product, one that is no module of e3nn's."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autotune.database.lookup import Tuning
from autotune.integrations.acceleration import PRODUCTS
from autotune.integrations.stand_ins import StandIn
from autotune.modules.base import NoTorchScript
from kernelgen.folder import collected


class PackageStandIn(StandIn, NoTorchScript):
    """Replaces one product of a package. Made with the arguments ``original``, ``strict`` and ``deterministic``.

    Parameters and names in checkpoints stay the package's.
    """

    @abstractmethod
    def tuning_for(self, *arguments: Any) -> Mapping[str, Tuning]:
        """As of :class:`autotune.TensorProduct`."""

    @abstractmethod
    def both_results(self, normal: Callable[..., list[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Its result and the original's on random inputs; ``normal`` makes them from a tensor like them and shapes."""


@dataclass(frozen=True)
class PackageProduct:
    """The value ``PRODUCT`` of a package's file.

    why_it_stays: of a module, the reason; empty if it can be replaced; None if it is no such product. kind: the words
    for it in the table of ``accelerate``.
    """

    why_it_stays: Callable[[torch.nn.Module], str | None]
    stand_in: type[PackageStandIn]
    kind: str = PRODUCTS


@functools.cache
def _known_products() -> tuple[PackageProduct, ...]:
    return collected("autotune.integrations.packages", "PRODUCT")


def product_of(module: torch.nn.Module) -> PackageProduct | None:
    """The package's product that a module is, if any."""
    return next((product for product in _known_products() if product.why_it_stays(module) is not None), None)
