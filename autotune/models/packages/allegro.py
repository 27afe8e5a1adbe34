"""Allegro: its model, and its modifiers for the product's Triton and cuEquivariance forms. All else is NequIP's.

Read in nequip-allegro 0.8.3, ``allegro/model/allegro_models.py`` and ``allegro/nn/_strided/_contract.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autotune.models.packages.nequip import NequIP

_MODIFIERS = {"cuequivariance": "enable_CuEquivarianceContracter", "triton": "enable_TritonContracter"}


class Allegro(NequIP):
    name = "allegro"
    modules = ("allegro", *NequIP.modules)
    install = "nequip-allegro==0.8.3"
    modifiers = _MODIFIERS
    peers = tuple(_MODIFIERS)

    def builder(self) -> Callable[..., torch.nn.Module]:
        from allegro.model import AllegroModel

        return AllegroModel

    def owns(self, model: torch.nn.Module) -> bool:
        """NequIP's class holds its modules."""
        return super().owns(model) and any("allegro." in type(module).__module__ for module in model.modules())
