"""What the files of a folder bring: a layer finds its files for kinds of kernels, so that a new one needs no list."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def collected(package: str, name: str) -> tuple[Any, ...]:
    """The values of a name in all modules of a package's folder that have it, in the order of the files' names."""
    folder = importlib.import_module(package).__path__
    files = sorted(found.name for found in pkgutil.iter_modules(folder) if not found.ispkg)
    modules = (importlib.import_module(f"{package}.{file}") for file in files)
    return tuple(getattr(module, name) for module in modules if hasattr(module, name))
