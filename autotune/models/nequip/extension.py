"""NequIP's extension: its models get the modifier ``enable_Equitune``.

NequIP imports this file through the entry point ``nequip.extension`` whenever it is imported itself, before most of its
own modules can be. So the modifier is added when NequIP imports the module that looks for modifiers (read in nequip
0.19.1, ``nequip/model/modify_utils.py``). It is no method of a class, because models of ``nequip-package`` files bring
their own classes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

NAME = "enable_Equitune"
_HOME = "nequip.model.modify_utils"
# The package that defines the operators, without which a compiled file cannot be loaded.
_OPERATORS = "kernelgen"


def enable_equitune(
    model: torch.nn.Module,
    strict: bool | None = None,
    deterministic: bool = False,
    precision: str = "float32",
    memory: str = "auto",
) -> torch.nn.Module:
    """Enable Equitune's kernels for tensor products, convolutions and spherical harmonics, on CPUs and NVIDIA GPUs.

    For training (eager and ``compile_mode: compile``), for inference in Python, and for ``nequip-compile --mode
    aotinductor``: NequIP imports the operators before it loads such a file, and a C++ program loads Equitune's library
    and a pack of the file. The options are those of ``autotune.accelerate``.
    """
    from autotune.models.accelerate import accelerate

    options: dict[str, Any] = {"strict": strict, "deterministic": deterministic}
    accelerate(model, precision=precision, memory=memory, **options).warn_without_convolutions()
    # NequIP looks for such names in what the model wraps, and writes them into compiled files.
    for inner in model.children():
        inner._nequip_custom_ops_libs = (*getattr(inner, "_nequip_custom_ops_libs", ()), _OPERATORS)  # type: ignore[assignment]
    return model


def _modifier() -> Any:
    """The function as NequIP wants it: a class method with the attributes of a modifier."""
    from nequip.nn.model_modifier_utils import model_modifier

    @functools.wraps(enable_equitune)
    def called(cls: type, *arguments: Any, **options: Any) -> torch.nn.Module:
        return enable_equitune(*arguments, **options)

    method = model_modifier(persistent=False, private=False, supported_compile_modes=["aotinductor"])(
        classmethod(called)
    )
    return getattr(type("Equitune", (), {NAME: method}), NAME)


def _add_modifier(home: ModuleType) -> None:
    """Have NequIP find the modifier in every model."""
    found_by_nequip, modifier = home.get_all_modifiers, _modifier()

    @functools.wraps(found_by_nequip)
    def get_all_modifiers(*arguments: Any, **options: Any) -> dict[str, Any]:
        return found_by_nequip(*arguments, **options) | {NAME: modifier}

    home.get_all_modifiers = get_all_modifiers  # type: ignore[attr-defined]


class _WhenImported(MetaPathFinder):
    """Adds the modifier right after NequIP's module was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _HOME:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _add_modifier(module)

        loader.exec_module = exec_module
        return spec


if _HOME in sys.modules:
    _add_modifier(sys.modules[_HOME])
else:
    sys.meta_path.insert(0, _WhenImported())
