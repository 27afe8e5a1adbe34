"""The modules of a folder: a layer finds its files for kinds of kernels, so that a new file needs no list."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def modules_of(package: str) -> tuple[ModuleType, ...]:
    """All modules that lie in a package's folder, imported, by name; sub-packages are left out."""
    folder = importlib.import_module(package).__path__
    names = sorted(found.name for found in pkgutil.iter_modules(folder) if not found.ispkg)
    return tuple(importlib.import_module(f"{package}.{name}") for name in names)
