"""Equitune's tuning package: search, measure, store and look up schedules; modules that load the best one.

Models use ``from autotune import TensorProduct, TensorProductConv``. Names load on first access, so ``import autotune``
is cheap, and a model never loads the search and plotting packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autotune.old_paths import install

if TYPE_CHECKING:
    from autotune.certification.certificate import Certificate, certify
    from autotune.database.entry import Entry
    from autotune.database.lookup import Tuning, find_schedule
    from autotune.database.store import Database
    from autotune.models.accelerate import accelerate, restore
    from autotune.models.capture import CapturedModel, CapturedTraining, capture, capture_training
    from autotune.models.stand_ins import Acceleration
    from autotune.modules.convolution import RadialTensorProductConv, TensorProductConv
    from autotune.modules.product import (
        ElementwiseTensorProduct,
        FullTensorProduct,
        FullyConnectedTensorProduct,
        TensorProduct,
    )
    from autotune.modules.rows import (
        SphericalHarmonics,
        SphericalHarmonicsConv,
        SymmetricContraction,
        spherical_harmonics,
    )
    from autotune.tune.model import ModelTuning, tune_model
    from autotune.workload.workload import GraphClass
    from kernelgen.version import __version__

__all__ = [
    "Acceleration",
    "CapturedModel",
    "CapturedTraining",
    "Certificate",
    "Database",
    "ElementwiseTensorProduct",
    "Entry",
    "FullTensorProduct",
    "FullyConnectedTensorProduct",
    "GraphClass",
    "ModelTuning",
    "RadialTensorProductConv",
    "SphericalHarmonics",
    "SphericalHarmonicsConv",
    "SymmetricContraction",
    "TensorProduct",
    "TensorProductConv",
    "Tuning",
    "__version__",
    "accelerate",
    "capture",
    "capture_training",
    "certify",
    "find_schedule",
    "restore",
    "spherical_harmonics",
    "tune_model",
]

# By module, the names that it has.
_NAMES = {
    "autotune.certification.certificate": "Certificate certify",
    "autotune.database.entry": "Entry",
    "autotune.database.lookup": "Tuning find_schedule",
    "autotune.database.store": "Database",
    "autotune.models.accelerate": "accelerate restore",
    "autotune.models.capture": "CapturedModel CapturedTraining capture capture_training",
    "autotune.models.stand_ins": "Acceleration",
    "autotune.modules.convolution": "RadialTensorProductConv TensorProductConv",
    "autotune.modules.product": "ElementwiseTensorProduct FullTensorProduct FullyConnectedTensorProduct TensorProduct",
    "autotune.modules.rows": "SphericalHarmonics SphericalHarmonicsConv SymmetricContraction spherical_harmonics",
    "autotune.tune.model": "ModelTuning tune_model",
    "autotune.workload.workload": "GraphClass",
    "kernelgen.version": "__version__",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


install()
