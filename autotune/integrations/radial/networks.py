"""Radial networks that end with a matrix product, and can leave that product to a convolution.

Such a network changes its class to a subclass whose ``forward`` stops before the last layer, and whose ``matrix()`` is
that layer's [hidden, weights] with all constants. Parameters and names in checkpoints stay. ``stops_early`` says
whether it does so now: not while it or its last layer has hooks, or that layer is another module (pruning, adapters).
"""

from __future__ import annotations

from typing import Any

import torch

from autotune.integrations.convolution_block import home_of, retype, take_type_back
from autotune.integrations.radial.folded import AcceleratedRadial

# By module and name of a network's class: its subclass, in a module that imports the package.
_SHORTENED = {
    ("e3nn.nn._fc", "FullyConnectedNet"): "autotune.integrations.blocks.e3nn:ShortenedFullyConnectedNet",
    ("mace.modules.radial", "RadialMLP"): "autotune.integrations.blocks.mace_radial:ShortenedRadialMLP",
    ("nequip.nn.mlp", "ScalarMLPFunction"): "autotune.integrations.blocks.nequip:ShortenedScalarMLP",
}


def shorten(network: Any) -> bool:
    """Have a network stop before its last layer; whether it can."""
    if isinstance(network, AcceleratedRadial):
        network.__dict__["shortened"] = True
        return network.stops_early
    kind = type(network)
    name = _SHORTENED.get((home_of(kind), kind.__qualname__))
    if name is None or "forward" in network.__dict__ or isinstance(network, torch.jit.ScriptModule):
        return False
    retype(network, name)
    return network.stops_early or not take_type_back(network, name)


def lengthen(network: torch.nn.Module) -> None:
    """Undo :func:`shorten`."""
    if any(take_type_back(network, name) for name in _SHORTENED.values()):
        for option in ("product", "in_one_kernel"):
            network.__dict__.pop(option, None)


def choose_arithmetic(model: torch.nn.Module, product: str, in_one_kernel: bool) -> None:
    """How Equitune's radial networks multiply, and whether their hidden layers are one kernel where there is one."""
    for network in model.modules():
        kind = type(network)
        if isinstance(network, AcceleratedRadial) or f"{kind.__module__}:{kind.__qualname__}" in _SHORTENED.values():
            network.__dict__.update(product=product, in_one_kernel=in_one_kernel)
