"""The packages by name; importing this imports none of them."""

from __future__ import annotations

import torch

from autotune.errors import ConfigError, unknown_name
from autotune.models.packages.allegro import Allegro
from autotune.models.packages.base import Package
from autotune.models.packages.mace import Mace
from autotune.models.packages.nequip import NequIP
from autotune.models.packages.sevennet import SevenNet

# Of those that own a model the first is taken.
PACKAGES: tuple[Package, ...] = (Mace(), Allegro(), NequIP(), SevenNet())


def package_named(name: str) -> Package:
    """ConfigError if there is none of this name."""
    found = {package.name: package for package in PACKAGES}
    if name not in found:
        raise ConfigError(unknown_name("model package", name, found))
    return found[name]


def package_of(model: torch.nn.Module) -> Package:
    """The package that a model belongs to, by its class."""
    for package in PACKAGES:
        if package.owns(model):
            return package
    names = ", ".join(package.name for package in PACKAGES)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    raise ConfigError(f"the model is a {kind}; expected one of {names}, or a WholeModel")
