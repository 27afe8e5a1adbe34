"""Generates kernels for O(3)-equivariant products, contractions and harmonics, as differentiable torch operators.

Each sub-package is a step and imports only those before it:

    problem -> arithmetic -> kernels -> compile -> runtime -> ops -> packs

>>> from kernelgen import TensorProductProblem, build
>>> problem = TensorProductProblem.channelwise("128x0e+128x1o", "0e+1o+2e", "0e+1o+2e")
>>> operator = build(problem)                       # default schedule, float32, convolution on the CPU
>>> out = operator(x, y, w, sender, receiver)       # [num_nodes, problem.dim_out], differentiable twice

Names load on first access, so what needs no torch (errors, the version) does not wait for it. Exported programs and
pickles need the torch operators: ``import kernelgen`` registers them at once if torch is loaded, else when it is.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from kernelgen.old_paths import MOVED, RENAMED, install

if TYPE_CHECKING:
    from kernelgen.arithmetic.directions import DIRECTIONS, Direction
    from kernelgen.compile.compiler import compile_many, compile_source
    from kernelgen.compile.host import find_host_compiler
    from kernelgen.compile.pack_file import load_pack
    from kernelgen.device import DeviceFacts, cuda_facts, device_facts
    from kernelgen.errors import (
        CacheError,
        CompileError,
        EquituneError,
        InputError,
        LaunchError,
        PackError,
        ProblemError,
        ScheduleError,
        ToolMissingError,
        UnsupportedError,
    )
    from kernelgen.kernels.dispatch import make_plan
    from kernelgen.kernels.product.plan import default_schedule
    from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule, Schedule, schedule_from_dict
    from kernelgen.kernels.spec import Spec
    from kernelgen.ops.base import build_family
    from kernelgen.ops.harmonics import HarmonicProduct, HarmonicsOperator, build_harmonics
    from kernelgen.ops.product import Operator, build
    from kernelgen.ops.symmetric_contraction import ContractionOperator, build_contraction
    from kernelgen.problem.contraction import ContractionProblem
    from kernelgen.problem.harmonics import HarmonicsProblem
    from kernelgen.problem.irreps import Instruction
    from kernelgen.problem.product import TensorProductProblem
    from kernelgen.runtime.graph import EdgeOrder, check_indices, edge_order
    from kernelgen.version import GENERATOR_VERSION, __version__

__all__ = [
    "CacheError",
    "CompileError",
    "ContractionOperator",
    "ContractionProblem",
    "CudaSchedule",
    "DIRECTIONS",
    "DeviceFacts",
    "Direction",
    "EdgeOrder",
    "EquituneError",
    "GENERATOR_VERSION",
    "HarmonicProduct",
    "HarmonicsOperator",
    "HarmonicsProblem",
    "HostSchedule",
    "InputError",
    "Instruction",
    "LaunchError",
    "Operator",
    "PackError",
    "ProblemError",
    "Schedule",
    "ScheduleError",
    "Spec",
    "TensorProductProblem",
    "ToolMissingError",
    "UnsupportedError",
    "__version__",
    "build",
    "build_contraction",
    "build_family",
    "build_harmonics",
    "check_indices",
    "compile_many",
    "compile_source",
    "cuda_facts",
    "default_schedule",
    "device_facts",
    "edge_order",
    "find_host_compiler",
    "load_pack",
    "make_plan",
    "schedule_from_dict",
]

# By module, the names that it has.
_NAMES = {
    "kernelgen.arithmetic.directions": "DIRECTIONS Direction",
    "kernelgen.compile.compiler": "compile_many compile_source",
    "kernelgen.compile.host": "find_host_compiler",
    "kernelgen.compile.pack_file": "load_pack",
    "kernelgen.device": "DeviceFacts cuda_facts device_facts",
    "kernelgen.errors": (
        "CacheError CompileError EquituneError InputError LaunchError PackError ProblemError "
        "ScheduleError ToolMissingError UnsupportedError"
    ),
    "kernelgen.kernels.dispatch": "make_plan",
    "kernelgen.kernels.product.plan": "default_schedule",
    "kernelgen.kernels.product.schedule": "CudaSchedule HostSchedule Schedule schedule_from_dict",
    "kernelgen.kernels.spec": "Spec",
    "kernelgen.ops.base": "build_family",
    "kernelgen.ops.harmonics": "HarmonicProduct HarmonicsOperator build_harmonics",
    "kernelgen.ops.product": "Operator build",
    "kernelgen.ops.symmetric_contraction": "ContractionOperator build_contraction",
    "kernelgen.problem.contraction": "ContractionProblem",
    "kernelgen.problem.harmonics": "HarmonicsProblem",
    "kernelgen.problem.irreps": "Instruction",
    "kernelgen.problem.product": "TensorProductProblem",
    "kernelgen.runtime.graph": "EdgeOrder check_indices edge_order",
    "kernelgen.version": "GENERATOR_VERSION __version__",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
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
    if "torch" in sys.modules and not any(_is_loading(name) for name in tuple(sys.modules)):
        for module in _OPERATORS:
            importlib.import_module(module)


def _is_loading(name: str) -> bool:
    if name.split(".")[0] not in ("torch", "kernelgen", "autotune") or name == "kernelgen":
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
if "torch" in sys.modules:
    register_operators()
else:
    sys.meta_path.insert(0, _AfterTorch())
