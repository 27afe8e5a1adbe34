"""Equitune's tuning side: search, measure, store and look up schedules, and the modules that load the best one.

``from autotune import TensorProduct, TensorProductConv`` is what a model needs. Names load when they are asked for,
so that ``import autotune`` itself costs nothing, and the searching and plotting packages are never loaded by a model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.database import Database, Entry
    from autotune.drop_in import Acceleration, accelerate, restore
    from autotune.graphs import GraphClass
    from autotune.harmonics import SphericalHarmonics, spherical_harmonics
    from autotune.lookup import Tuning, find_schedule
    from autotune.modules import TensorProduct, TensorProductConv
    from autotune.products import ElementwiseTensorProduct, FullTensorProduct, FullyConnectedTensorProduct
    from autotune.vector_conv import SphericalHarmonicsConv

__all__ = [
    "Acceleration",
    "Database",
    "ElementwiseTensorProduct",
    "Entry",
    "FullTensorProduct",
    "FullyConnectedTensorProduct",
    "GraphClass",
    "SphericalHarmonics",
    "SphericalHarmonicsConv",
    "TensorProduct",
    "TensorProductConv",
    "Tuning",
    "accelerate",
    "find_schedule",
    "restore",
    "spherical_harmonics",
]

_HOMES = {
    "Acceleration": "autotune.drop_in",
    "Database": "autotune.database",
    "ElementwiseTensorProduct": "autotune.products",
    "Entry": "autotune.database",
    "FullTensorProduct": "autotune.products",
    "FullyConnectedTensorProduct": "autotune.products",
    "GraphClass": "autotune.graphs",
    "SphericalHarmonics": "autotune.harmonics",
    "SphericalHarmonicsConv": "autotune.vector_conv",
    "TensorProduct": "autotune.modules",
    "TensorProductConv": "autotune.modules",
    "Tuning": "autotune.lookup",
    "accelerate": "autotune.drop_in",
    "find_schedule": "autotune.lookup",
    "restore": "autotune.drop_in",
    "spherical_harmonics": "autotune.harmonics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
