"""Equitune under its own name: all public names of ``autotune`` and ``kernelgen``.

>>> import equitune
>>> equitune.accelerate(model)

setup.py installs this folder as ``equitune``. Names load on first access; ``__init__.pyi`` has them for type checkers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def _own(name: str) -> ModuleType:
    """Equitune's package of this name; ImportError if another project's lies in its place."""
    try:
        module = importlib.import_module(name)
        is_own = hasattr(module, "_HOMES")
    except ImportError as error:
        # A file of another project, in a folder that has Equitune's files too, asks for what that project needs.
        if (error.name or "").partition(".")[0] in ("torch", "numpy", "autotune", "kernelgen"):
            raise
        is_own = False
    if not is_own:
        raise ImportError(
            f"the package {name} that is installed here is another project's, whose files replaced Equitune's; type: "
            f"{sys.executable} -m pip uninstall {name} equitune; then install equitune again"
        )
    return module


def __getattr__(name: str) -> Any:
    for package in (_own("autotune"), _own("kernelgen")):
        if name in package._HOMES:
            value = getattr(package, name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'equitune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_own("autotune")._HOMES, *_own("kernelgen")._HOMES})


def main() -> None:
    """The command ``equitune``."""
    _own("autotune")
    from autotune.cli import main as run

    run()


_own("autotune")
