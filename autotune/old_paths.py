"""Old names of modules, which stay importable for one version: see ``kernelgen.old_paths``.

Only of those whose classes pickles and checkpoints of models name, and whose commands and entry points users type.
"""

from __future__ import annotations

# By module, the names that it had, without the package.
MOVED: dict[str, str] = {
    "models.accelerate": "integrations.accelerate",
    "models.capture": "captured.capture captured.model_state captured.package models.capture_training",
    "models.lammps": "integrations.lammps.compiled",
    "models.layout": (
        "integrations.ir_mul.features integrations.ir_mul.gate integrations.ir_mul.model "
        "integrations.ir_mul.outline integrations.ir_mul.transposed models.gate"
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
    "models.nequip.extension": "integrations.nequip_extension",
    "models.nequip.package": (
        "captured.packages.nequip integrations.packages.allegro integrations.packages.nequip "
        "integrations.packages.nequip_layout models.nequip.allegro models.packages.allegro models.packages.nequip"
    ),
    "models.nequip.patched": "integrations.blocks.nequip",
    "models.nequip.use": "integrations.lammps.nequip models.nequip.lammps",
    "models.package": "models.packages.base",
    "models.padding": "captured.fields captured.padded_step captured.volumes",
    "models.radial": (
        "integrations.blocks.e3nn integrations.radial.cutoffs integrations.radial.folded "
        "integrations.radial.networks integrations.radial.take_over models.e3nn_network"
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
    "models.step": "models.one_launch",
    "models.torch_sim": "integrations.torch_sim",
    "models.whole_model": "models.atoms models.catalogue models.packages.registry",
    "modules.base": "modules.sizes",
    "modules.convolution": (
        "modules.radial.convolution modules.radial.tuned modules.radial_convolution modules.tensor_product_conv"
    ),
    "modules.product": (
        "modules.e3nn_interface.checkpoints modules.e3nn_interface.path_weights modules.e3nn_products "
        "modules.matrix_contraction modules.tensor_product"
    ),
    "modules.rows": (
        "modules.harmonics modules.spherical_harmonics modules.spherical_harmonics_conv "
        "modules.symmetric_contraction modules.tuned_rows"
    ),
    "workload.config": "workload.config_tables",
    "workload.kind": "workload.kinds.base",
    "workload.known_kinds": (
        "workload.kinds.harmonics workload.kinds.radial_convolution workload.kinds.registry "
        "workload.kinds.symmetric_contraction workload.kinds.tensor_product"
    ),
    "workload.graphs": "workload.edge_lists workload.water",
    "workload.workload": "workload.graph_class workload.passes workload.restriction workload.tensors",
}
# By old name of a module, what is called otherwise in the new one.
RENAMED: dict[str, dict[str, str]] = {
    "captured.packages.mace": {"CapturableMace": "Mace"},
    "captured.packages.nequip": {"CapturableNequIP": "NequIP"},
    "captured.packages.sevennet": {"CapturableSevenNet": "SevenNet"},
    "integrations.mace_backend.linear": {"Path": "LinearPath"},
    "integrations.mace_backend.skip": {"Path": "SpeciesPath"},
    "workload.kinds.radial_convolution": {"OPERATION": "RADIAL"},
    "workload.kinds.symmetric_contraction": {"OPERATION": "CONTRACTION"},
}
