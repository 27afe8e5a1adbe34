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
    from autotune.models.capture import CapturedModel, capture
    from autotune.models.capture_training import CapturedTraining, capture_training
    from autotune.models.stand_ins import Acceleration
    from autotune.modules.convolution import TensorProductConv
    from autotune.modules.harmonics import SphericalHarmonics, SphericalHarmonicsConv, spherical_harmonics
    from autotune.modules.product import (
        ElementwiseTensorProduct,
        FullTensorProduct,
        FullyConnectedTensorProduct,
        TensorProduct,
    )
    from autotune.modules.radial_convolution import RadialTensorProductConv
    from autotune.modules.symmetric_contraction import SymmetricContraction
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

_HOMES = {
    "Acceleration": "autotune.models.stand_ins",
    "CapturedModel": "autotune.models.capture",
    "CapturedTraining": "autotune.models.capture_training",
    "Certificate": "autotune.certification.certificate",
    "Database": "autotune.database.store",
    "ElementwiseTensorProduct": "autotune.modules.product",
    "Entry": "autotune.database.entry",
    "FullTensorProduct": "autotune.modules.product",
    "FullyConnectedTensorProduct": "autotune.modules.product",
    "GraphClass": "autotune.workload.workload",
    "ModelTuning": "autotune.tune.model",
    "RadialTensorProductConv": "autotune.modules.radial_convolution",
    "SphericalHarmonics": "autotune.modules.harmonics",
    "SphericalHarmonicsConv": "autotune.modules.harmonics",
    "SymmetricContraction": "autotune.modules.symmetric_contraction",
    "TensorProduct": "autotune.modules.product",
    "TensorProductConv": "autotune.modules.convolution",
    "Tuning": "autotune.database.lookup",
    "__version__": "kernelgen.version",
    "accelerate": "autotune.models.accelerate",
    "capture": "autotune.models.capture",
    "capture_training": "autotune.models.capture_training",
    "certify": "autotune.certification.certificate",
    "find_schedule": "autotune.database.lookup",
    "restore": "autotune.models.accelerate",
    "spherical_harmonics": "autotune.modules.harmonics",
    "tune_model": "autotune.tune.model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


install()
