"""Where names are: public ones of a package; and old names of modules, so that pickles that have them load.

Old names stay importable for one version: ``import kernelgen`` and ``import autotune`` install their tables. An old
module is a view of the new one: it has the same objects, also those that have another name now.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


def homes_of(package: str) -> dict[str, str]:
    """By public name the module that has it, as the stub beside ``package`` (an ``__init__.py``) imports them."""
    stub = ast.parse(Path(package).with_suffix(".pyi").read_text())
    imports = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    return {alias.name: line.module or "" for line in imports for alias in line.names}


# By module, the names that it had, without the package.
MOVED: dict[str, str] = {
    "arithmetic.contraction": "terms.contraction_statements terms.coupled_statements",
    "arithmetic.contraction_couplings": (
        "terms.cheapest_couplings terms.contraction_couplings terms.equivariant_polynomials"
    ),
    "arithmetic.couplings": "arithmetic.product terms.clebsch_gordan terms.path_statements",
    "arithmetic.directions": "terms.directions",
    "arithmetic.harmonics": "terms.harmonics_statements terms.scalar_statements",
    "compat": "e3nn_import torch_versions tracing",
    "compile.compiler": "compile.cache",
    "compile.gpu": "compile.hip compile.nvrtc",
    "compile.job": "compile.elf compile.leftovers",
    "compile.pack_file": "compile.pack_index compile.shipped",
    "files": "json_data",
    "kernels.dispatch": "emit.hip emit.kernel_source emit.radial_convolution emit.tensor_product plan.planner",
    "kernels.knobs": "schedule.knobs",
    "kernels.pairs.emit": "emit.pairs.kernel emit.pairs.path_steps emit.pairs.weights",
    "kernels.pairs.plan": "plan.pairs",
    "kernels.product.channelwise": "plan.channelwise plan.l2_prefetch plan.path_groups",
    "kernels.product.emit": (
        "emit.cuda.kernel emit.cuda.two_part_kernel emit.cuda.zero_blocks emit.host kernels.product.cuda "
        "kernels.product.host"
    ),
    "kernels.product.group": "emit.cuda.edge_loop emit.cuda.path_group emit.cuda.weight_ring",
    "kernels.product.memory": "emit.cuda.edge_operand emit.cuda.memory_access",
    "kernels.product.plan": "kernels.product.defaults plan.defaults plan.tensor_product",
    "kernels.product.schedule": "schedule.tensor_product",
    "kernels.radial.coupled": "emit.radial.coupled emit.radial.coupled_stage emit.radial.single_terms",
    "kernels.radial.emit": "emit.radial.kernel",
    "kernels.radial.group": (
        "emit.radial.edge_loop emit.radial.fragments emit.radial.normalized emit.radial.path_group "
        "kernels.radial.fragments"
    ),
    "kernels.radial.plan": (
        "kernels.radial.schedule plan.radial.coupled plan.radial.defaults plan.radial_convolution schedule.radial "
        "schedule.radial_knobs"
    ),
    "kernels.radial.warpgroup": "emit.radial.warpgroup emit.radial.warpgroup_calls emit.radial.warpgroup_values",
    "kernels.source": "emit.launch emit.source",
    "kernels.spec": "emit.signature schedule.kernel_spec",
    "kernels.spherical_harmonics": (
        "emit.harmonics emit.harmonics_function kernels.harmonics.emit kernels.harmonics.plan "
        "kernels.harmonics.schedule plan.spherical_harmonics schedule.edge_vectors schedule.spherical_harmonics"
    ),
    "kernels.symmetric_contraction": (
        "emit.contraction.gpu emit.contraction.host emit.contraction.parts emit.symmetric_contraction "
        "kernels.contraction.emit kernels.contraction.plan kernels.contraction.schedule plan.symmetric_contraction "
        "schedule.symmetric_contraction"
    ),
    "ops.base": "harmonics_library library ops.family ops.registry",
    "ops.edge_networks": "ops.edges.networks ops.edges.silu",
    "ops.harmonics": "ops.edge_vectors ops.harmonics_operator ops.harmonics_ops ops.vectors",
    "ops.library": "ops.torch_ops ops.transforms",
    "ops.node_kernels": "ops.gates ops.node_matrices ops.nodes.gates ops.nodes.matrices",
    "ops.product": "ops.operator",
    "ops.radial_convolution": (
        "ops.radial.convolution ops.radial.fused ops.radial.parts ops.radial.products ops.radial.transformed"
    ),
    "ops.symmetric_contraction": (
        "ops.contraction.autograd ops.contraction.elements ops.contraction.operator ops.contraction.torch_ops"
    ),
    "ops.tall_products": "ops.edges.products ops.edges.tall_matrices",
    "packs.library": "packs.ranks packs.sums",
    "packs.write": "packs.calls packs.content packs.exported packs.fixed packs.make packs.recorded",
    "problem.irreps": "problem.connection_modes",
    "problem.other_kinds": (
        "problem.contraction problem.edge_vectors problem.harmonics problem.spherical_harmonics "
        "problem.symmetric_contraction"
    ),
    "problem.product": (
        "plan.size_class problem.from_e3nn problem.radial_convolution problem.shape problem.sizes "
        "problem.tensor_product"
    ),
    "runtime.call": "runtime.allocation runtime.arguments runtime.calls runtime.runner watchers",
    "runtime.graph": "runtime.index_check runtime.known_graphs",
    "runtime.kernel": "runtime.cuda_driver runtime.instruction_cache runtime.zero_flags",
}
# By old name of a module, what is called otherwise in the new one.
RENAMED: dict[str, dict[str, str]] = {
    "compile.shipped": {"FORMAT": "INDEX_FORMAT"},
    "harmonics_library": {"resolve_harmonics": "resolve"},
    "ops.edges.networks": {"fits": "network_fits", "sources": "network_sources"},
    "ops.edges.tall_matrices": {"fits": "product_fits", "sources": "product_sources"},
    "ops.gates": {"takes": "may_launch"},
    "ops.nodes.gates": {"takes": "may_launch"},
    "runtime.zero_flags": {"Launch": "FlaggedLaunch"},
}


class OldPaths:
    """Finds old modules of a package, and folders that only old modules are in."""

    def __init__(self, package: str, moved: Mapping[str, str], renamed: Mapping[str, Mapping[str, str]]) -> None:
        self.homes = {f"{package}.{old}": f"{package}.{new}" for new, names in moved.items() for old in names.split()}
        self.renamed = {f"{package}.{old}": names for old, names in renamed.items()}
        self.folders = {name.rpartition(".")[0] for name in self.homes} - {package}
        self.folders |= {name.rpartition(".")[0] for name in self.folders} - {package}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.homes and (name not in self.folders or _is_there(name)):
            return None
        return ModuleSpec(name, self, origin=name, is_package=name in self.folders)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Modules are made as usual."""

    def get_code(self, name: str) -> CodeType:
        """Of ``python -m`` with an old name."""
        return compile(f"import runpy\nrunpy.run_module({self.homes[name]!r}, run_name='__main__')", name, "exec")

    def exec_module(self, module: ModuleType) -> None:
        home = self.homes.get(module.__name__)
        if home is None:
            return
        new, renamed = importlib.import_module(home), self.renamed.get(module.__name__, {})
        vars(module)["__getattr__"] = lambda name: getattr(new, renamed.get(name, name))


def _is_there(folder: str) -> bool:
    return (Path(__file__).parents[1] / folder.replace(".", "/") / "__init__.py").exists()


def install(package: str, moved: Mapping[str, str], renamed: Mapping[str, Mapping[str, str]]) -> None:
    """Let the old modules of a package be imported."""
    # The first of all finders: another one may know the files of an older Equitune.
    sys.meta_path.insert(0, OldPaths(package, moved, renamed))
