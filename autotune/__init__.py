"""Equitune's tuning package: search, measure, store and look up schedules; modules that load the best one.

Models use ``from autotune import TensorProduct, TensorProductConv``. Names load on first access, so ``import autotune``
is cheap, and a model never loads the search and plotting packages. ``__init__.pyi`` lists the names, for type checkers
too.
"""

from __future__ import annotations

import importlib
from typing import Any

from autotune.old_paths import MOVED, RENAMED
from kernelgen.old_paths import homes_of, install

# By public name, the module that has it.
_HOMES = homes_of(__file__)
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


install("autotune", MOVED, RENAMED)
