"""Generates kernels for O(3)-equivariant products, contractions and harmonics, as differentiable torch operators.

Each sub-package is a step and imports only those before it:

    problem -> arithmetic -> kernels -> compile -> runtime -> ops -> packs

>>> from kernelgen import TensorProductProblem, build
>>> problem = TensorProductProblem.channelwise("128x0e+128x1o", "0e+1o+2e", "0e+1o+2e")
>>> operator = build(problem)                       # default schedule, float32, convolution on the CPU
>>> out = operator(x, y, w, sender, receiver)       # [num_nodes, problem.dim_out], differentiable twice

Names load on first access, so what needs no torch (errors, the version) does not wait for it. Exported programs and
pickles need the torch operators: ``import kernelgen`` registers them at once if torch is loaded, else when it is.
``__init__.pyi`` lists the names, for type checkers too.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from kernelgen.old_paths import MOVED, RENAMED, homes_of, install

# By public name, the module that has it.
_HOMES = homes_of(__file__)
__all__ = sorted(_HOMES)
# These register torch operators, and how an operator is rebuilt from its text.
_OPERATORS = (
    "kernelgen.ops.product",
    "kernelgen.ops.harmonics",
    "kernelgen.ops.symmetric_contraction",
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kernelgen' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    register_operators()
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def register_operators() -> None:
    """Register all torch operators, if torch is loaded and nothing of Equitune waits for its own import."""
    if sys.modules.get("torch") and not any(_is_loading(name) for name in tuple(sys.modules)):
        for module in _OPERATORS:
            importlib.import_module(module)


def _is_loading(name: str) -> bool:
    if name.split(".")[0] not in ("torch", "kernelgen", "autotune") or name in ("kernelgen", "autotune"):
        return False
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


class _AfterTorch:
    """Registers the operators when torch has been loaded; an import hook, since torch may be imported after this."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: Any) -> None:
                load(module)
                sys.meta_path.remove(self)
                # Until here the loader's caller would say that torch is being loaded.
                module.__spec__._initializing = False
                register_operators()

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


install("kernelgen", MOVED, RENAMED)
if sys.modules.get("torch"):
    register_operators()
else:
    sys.meta_path.insert(0, _AfterTorch())
