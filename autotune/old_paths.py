"""Old names of modules, which stay importable for one version: see ``kernelgen.old_paths``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

# By module, the names that it had, without the package.
MOVED: dict[str, str] = {
    "bench.contenders": "bench.models.contenders bench.models.kernel_groups",
    "bench.kernels": "bench.again bench.orders bench.plans bench.run bench.turns",
    "bench.largest": "bench.models.largest bench.models.largest_rows",
    "bench.model_rows": "bench.models.rows bench.models.text",
    "bench.rows": "bench.text",
    "bench.session": "bench.models.held_memory bench.models.measuring bench.models.session bench.models.values",
    "bench.whole_models": "bench.models.run",
    "cli.bench": "cli.model_rows",
    "cli.pack": "cli.packs.command",
    "cli.packing": "cli.packs.certificates cli.packs.of_model cli.packs.of_problem cli.packs.of_suite",
    "cli.tune": "cli.tune_model",
    "compare.comparison": "compare.comparison_worker compare.sampling",
    "compare.peers.harmonics": "compare.peers.edge_vectors compare.peers.spherical_harmonics",
    "compare.precompile": "compare.ahead compare.idle_process",
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
    "errors": "report.errors",
    "measure.kinds": (
        "measure.runs.base measure.runs.edge_vectors "
        "measure.runs.radial_convolution measure.runs.registry measure.runs.spherical_harmonics "
        "measure.runs.symmetric_contraction measure.runs.tensor_product"
    ),
    "measure.operations": "measure.autograd_passes",
    "measure.reference_contraction": "measure.reference.symmetric_contraction",
    "measure.references": (
        "measure.reference.edge_vectors measure.reference.radial_convolution "
        "measure.reference.spherical_harmonics measure.reference.tensor_product"
    ),
    "measure.space": (
        "search.probes search.space search.spaces.edge_vectors search.spaces.radial_convolution "
        "search.spaces.registry search.spaces.spherical_harmonics search.spaces.symmetric_contraction "
        "search.spaces.tensor_product"
    ),
    "measure.timing": "measure.intervals",
    "measure.trial": "measure.certificate measure.equivariance",
    "measure.worker": "measure.devices measure.fork_server measure.processes",
    "models.accelerate": "integrations.accelerate",
    "models.capture": "captured.capture captured.model_state captured.package",
    "models.e3nn_network": "integrations.blocks.e3nn",
    "models.gate": "integrations.ir_mul.gate",
    "models.lammps": "integrations.lammps.compiled",
    "models.layout": (
        "integrations.ir_mul.features integrations.ir_mul.model integrations.ir_mul.outline "
        "integrations.ir_mul.transposed"
    ),
    "models.linear": "integrations.blocks.strain integrations.ir_mul.linear integrations.ir_mul.trilinear",
    "models.mace.backend": (
        "integrations.mace_backend.backend integrations.mace_backend.canonical "
        "integrations.mace_backend.contraction integrations.mace_backend.convolution "
        "integrations.mace_backend.linear integrations.mace_backend.skip"
    ),
    "models.mace.package": (
        "captured.packages.mace integrations.contraction integrations.packages.mace "
        "integrations.packages.mace_layout models.packages.mace"
    ),
    "models.mace.patched": "integrations.blocks.mace integrations.blocks.mace_radial",
    "models.mace.train": "integrations.training.mace",
    "models.mace.use": "integrations.lammps.mace integrations.mace",
    "models.nequip.allegro": "integrations.packages.allegro models.packages.allegro",
    "models.nequip.extension": "integrations.nequip_extension",
    "models.nequip.lammps": "integrations.lammps.nequip",
    "models.nequip.package": (
        "captured.packages.nequip integrations.packages.nequip integrations.packages.nequip_layout "
        "models.packages.nequip"
    ),
    "models.nequip.patched": "integrations.blocks.nequip",
    "models.package": "models.packages.base",
    "models.padding": "captured.fields captured.padded_step captured.volumes",
    "models.radial": (
        "integrations.radial.cutoffs integrations.radial.folded integrations.radial.networks "
        "integrations.radial.take_over"
    ),
    "models.replace": (
        "integrations.convolution_block integrations.exchange integrations.packages.package_product "
        "integrations.replacement"
    ),
    "models.sevennet.package": (
        "captured.packages.sevennet integrations.packages.sevennet integrations.packages.sevennet_layout "
        "models.packages.sevennet"
    ),
    "models.sevennet.patched": "integrations.blocks.sevennet",
    "models.sevennet.train": "integrations.training.sevennet",
    "models.sevennet.use": "integrations.lammps.sevennet integrations.sevennet",
    "models.species": (
        "integrations.ir_mul.species integrations.ir_mul.species_product integrations.ir_mul.typed_product"
    ),
    "models.stand_ins": "integrations.acceleration integrations.ir_mul.stand_in integrations.stand_ins",
    "models.torch_sim": "integrations.torch_sim",
    "models.whole_model": "models.atoms models.catalogue models.packages.registry",
    "modules.base": "modules.sizes",
    "modules.convolution": "modules.tensor_product_conv modules.tuned_rows",
    "modules.harmonics": "modules.spherical_harmonics modules.spherical_harmonics_conv",
    "modules.product": (
        "modules.e3nn_interface.checkpoints modules.e3nn_interface.path_weights modules.e3nn_products "
        "modules.matrix_contraction modules.tensor_product"
    ),
    "modules.radial_convolution": "modules.radial.convolution modules.radial.tuned",
    "replay.fit": "replay.defaults.choices replay.defaults.comparisons replay.defaults.fit replay.defaults.studies",
    "replay.measured": "replay.defaults.measure",
    "replay.portability": "portability.check portability.kernels",
    "replay.samplers": "replay.record replay.recorded replay.run",
    "replay.untuned": (
        "replay.defaults.evaluate replay.defaults.peers replay.defaults.run replay.defaults.text "
        "replay.defaults.transfer"
    ),
    "report.charts": (
        "report.html.figures report.html.knobs report.html.samples report.html.suite_figures report.html.svg"
    ),
    "report.compare": "report.compare_page",
    "report.devices": "report.data.device_data report.data.devices",
    "report.kernels": (
        "report.sections.roofline report.sections.suite report.sections.suite_details report.sections.suite_summary"
    ),
    "report.models": "report.sections.first_screen.models report.sections.largest report.sections.models",
    "report.page": (
        "report.head report.sections.devices report.sections.first_screen.kernels "
        "report.sections.first_screen.reproduce report.sections.first_screen.screen report.sections.method"
    ),
    "report.picker": "report.html.bars",
    "report.render": "report.html.frame report.html.markup report.html.packed report.markup",
    "report.rows": "report.data.knob_importance report.data.model_rows report.data.suite_rows",
    "report.sources": "report.html.sources",
    "report.tuning": "report.sections.replays report.sections.search report.sections.tuned_rows",
    "search.loop": "search.pruning search.trial_steps",
    "search.shared": (
        "search.sharing.claims search.sharing.locks search.sharing.optuna_storage search.sharing.storage_access"
    ),
    "search.study": "search.ranking",
    "tune.model": "tune.from_model.run tune.from_model.table",
    "tune.model_passes": (
        "tune.from_model.before_and_after tune.from_model.needs tune.from_model.opened "
        "tune.from_model.passes tune.from_model.recorder"
    ),
    "tune.publish": "tune.recheck",
    "tune.run": "tune.budget tune.multi_device tune.studies tune.worker_pairs",
    "tune.settings": "tune.progress",
    "workload.config": "workload.config_tables",
    "workload.graphs": "workload.edge_lists workload.water",
    "workload.workload": "workload.graph_class workload.passes workload.restriction workload.tensors",
}
# By old name of a module, what is called otherwise in the new one.
RENAMED: dict[str, dict[str, str]] = {
    "bench.models.largest_rows": {"Cell": "StoredCell"},
    "compare.peers.edge_vectors": {"ADAPTERS": "VECTORS_ADAPTERS"},
    "compare.peers.spherical_harmonics": {"ADAPTERS": "HARMONICS_ADAPTERS"},
    "database.prediction.features": {"NAMES": "FEATURES", "WORK": "WORK_NAMES"},
    "database.prediction.work": {"NAMES": "WORK_NAMES"},
    "integrations.mace_backend.linear": {"Path": "LinearPath"},
    "integrations.mace_backend.skip": {"Path": "SpeciesPath"},
    "replay.defaults.choices": {"TRIED": "ANY_TRIAL"},
    "report.html.samples": {"WIDTH": "STRIPS_WIDTH", "LANE": "STRIP"},
    "report.html.suite_figures": {"LANE": "LANE_INCHES"},
    "report.sections.first_screen.kernels": {
        "sentence": "kernels_sentence",
        "choices": "kernel_choices",
        "AXES": "KERNEL_AXES",
        "first_of": "first_kernel_row",
        "STOCK": "STOCK_KERNELS",
    },
    "report.sections.first_screen.models": {
        "sentence": "models_sentence",
        "first_of": "first_model_row",
    },
}
_HERE = Path(__file__).parent
_OLD = {old for names in MOVED.values() for old in names.split()}
_OLD |= {old.rpartition(".")[0] for old in _OLD}
_OLD |= {old.rpartition(".")[0] for old in _OLD}


class _OldNames:
    """Knows old names only, so that ``import autotune`` does not load kernelgen."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != "autotune" or rest not in _OLD or (_HERE / rest.replace(".", "/") / "__init__.py").exists():
            return None
        from kernelgen.old_paths import OldPaths

        return OldPaths("autotune", MOVED, RENAMED).find_spec(name)


def install() -> None:
    """Let the old modules be imported."""
    sys.meta_path.insert(0, _OldNames())
