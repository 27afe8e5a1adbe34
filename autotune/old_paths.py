"""Old names of modules, which stay importable for one version: see ``kernelgen.old_paths``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

# By module, the names that it had, without the package.
MOVED: dict[str, str] = {
    "database.knobs": "database.candidates.knob_choices database.candidates.legal_form",
    "database.lookup": "database.edge_vectors",
    "database.maintenance": "database.provenance",
    "database.misses": "database.requests",
    "database.model_of_time": (
        "database.prediction.features database.prediction.table database.prediction.trees database.prediction.work"
    ),
    "database.nearest": (
        "database.candidates.choice database.candidates.fitting database.candidates.moving "
        "database.candidates.other_devices database.candidates.query"
    ),
    "database.predicted": "database.prediction.first_runs database.prediction.pool database.prediction.predicted",
    "database.trials": "database.quarantine database.trial_archive database.trial_records",
    "measure.operations": (
        "measure.autograd_passes measure.runs.base measure.runs.edge_vectors "
        "measure.runs.radial_convolution measure.runs.registry measure.runs.spherical_harmonics "
        "measure.runs.symmetric_contraction measure.runs.tensor_product"
    ),
    "measure.reference_contraction": "measure.reference.symmetric_contraction",
    "measure.references": (
        "measure.reference.edge_vectors measure.reference.radial_convolution "
        "measure.reference.spherical_harmonics measure.reference.tensor_product"
    ),
    "measure.timing": "measure.intervals",
    "measure.trial": "measure.certificate measure.equivariance",
    "measure.worker": "measure.devices measure.fork_server measure.processes",
    "modules.base": "modules.sizes",
    "modules.convolution": "modules.tensor_product_conv modules.tuned_rows",
    "modules.harmonics": "modules.spherical_harmonics modules.spherical_harmonics_conv",
    "modules.product": (
        "modules.e3nn_interface.checkpoints modules.e3nn_interface.path_weights modules.e3nn_products "
        "modules.matrix_contraction modules.tensor_product"
    ),
    "modules.radial_convolution": "modules.radial.convolution modules.radial.tuned",
    "workload.config": "workload.config_tables",
    "workload.graphs": "workload.edge_lists workload.water",
    "workload.workload": "workload.graph_class workload.passes workload.restriction workload.tensors",
}
# By old name of a module, what is called otherwise in the new one.
RENAMED: dict[str, dict[str, str]] = {
    "database.prediction.features": {"NAMES": "FEATURES", "WORK": "WORK_NAMES"},
    "database.prediction.work": {"NAMES": "WORK_NAMES", "schedule_of": "cuda_schedule"},
}
_OLD = {old for names in MOVED.values() for old in names.split()}
_OLD |= {old.rpartition(".")[0] for old in _OLD}
_OLD |= {old.rpartition(".")[0] for old in _OLD}


class _OldNames:
    """Knows old names only, so that ``import autotune`` does not load kernelgen."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != "autotune" or rest not in _OLD:
            return None
        from kernelgen.old_paths import OldPaths

        return OldPaths("autotune", MOVED, RENAMED).find_spec(name)


def install() -> None:
    """Let the old modules be imported."""
    sys.meta_path.insert(0, _OldNames())
