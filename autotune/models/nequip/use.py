"""NequIP and Allegro with Equitune: the ASE calculator, and files for LAMMPS."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from ase.calculators.calculator import all_changes
from nequip.data import AtomicDataDict as Data
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.integrations.ase import NequIPCalculator as Stock
from nequip.model.modify_utils import get_all_modifiers, modify
from torch import Tensor

from autotune.models.accelerate import accelerate
from autotune.models.lammps import TYPICAL_SIZE, RankGraph, compile_energies, ready_copy
from autotune.models.nequip.package import PACKAGE
from autotune.models.package import require_device
from autotune.models.step import QuickSteps, changes_since, in_dtype
from kernelgen.errors import InputError

# Change ``from nequip.integrations.ase import NequIPCalculator`` to ``from autotune.models.nequip.use import
# NequIPCalculator`` and nothing else.


# What its calculator takes from a model's output.
_RESULTS = (Data.TOTAL_ENERGY_KEY, Data.PER_ATOM_ENERGY_KEY, Data.FORCE_KEY, Data.STRESS_KEY)


class NequIPCalculator(Stock, QuickSteps):
    """Takes the arguments of NequIP's class, and accelerates the model, in place, as the last step.

    What a simulation does not change stays on the device between steps (see ``autotune.models.step``), unless the data
    pass through transforms that are not those of NequIP's own calculators. A compiled model stays as it is.

    capture: on a GPU each step of energies, forces and stress is one launch (see :func:`autotune.capture`). None: after
    ten steps of the same atoms; True: at once; False: never. On a CPU no step is: True only pads it.

    acceleration: the table of what was replaced. step: how inputs are made.
    """

    model: Any
    check_state = changes_since
    # The output of the step that is being calculated.
    _launched: dict[str, Tensor] | None = None

    def __init__(self, *arguments: Any, capture: bool | None = None, **options: Any) -> None:
        require_device(*arguments, options.get("device"))
        super().__init__(*arguments, **options)
        self.be_quick(accelerate(self), capture)
        self.acceleration.warn_without_convolutions()

    def why_stock(self) -> str:
        kinds = sorted(type(transform).__name__ for transform in self.transforms)
        own = sorted(kind.__name__ for kind in (ChemicalSpeciesToAtomTypeMapper, NeighborListTransform))
        return "" if kinds == own else f"the data pass through {', '.join(kinds)}"

    def model_cutoff(self) -> float:
        return float(self._neighbor_list().r_max)

    def _neighbor_list(self) -> NeighborListTransform:
        return next(transform for transform in self.transforms if isinstance(transform, NeighborListTransform))

    def calculate(self, atoms: Any = None, properties: Any = ("energy",), system_changes: Any = all_changes) -> None:
        """NequIP's results; those of a captured model by one launch."""
        self._launched = None if atoms is None else self._by_one_launch(atoms)
        try:
            super().calculate(atoms, properties, system_changes)
        finally:
            self._launched = None

    def _by_one_launch(self, atoms: Atoms) -> dict[str, Tensor] | None:
        """A captured model's output; None for other models, and where more of it is read than NequIP's class does."""
        reads_more = type(self).save_extra_outputs is not Stock.save_extra_outputs
        if reads_more or not self.steps_quickly() or self._neighbor_list()._pruner is not None:
            return None
        found = self.kept_inputs().launched([self.model], atoms, (), lambda: self._stocks_data(atoms), names=_RESULTS)
        return None if found is None else found[0]

    def _stocks_data(self, atoms: Atoms) -> dict[str, Tensor]:
        return super().atoms_to_data(atoms)

    def atoms_to_data(self, atoms: Atoms) -> dict[str, Tensor]:
        """NequIP's data of one structure; all of its calculator takes its inputs from here."""
        if self._launched is not None:
            return {}
        if not self.steps_quickly():
            return super().atoms_to_data(atoms)
        # Whatever else ``from_ase`` takes from the atoms, no model of energies reads.
        kept, graph = self.kept_inputs().of(atoms, (), lambda: self._stocks_data(atoms))
        data = kept | in_dtype(PACKAGE.moving(self.model, graph), kept[Data.POSITIONS_KEY].dtype)
        prune = self._neighbor_list()._pruner
        return data if prune is None else prune(data)

    def call_model(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().call_model(data) if self._launched is None else self._launched


# NequIP's and Allegro's models for LAMMPS. Read in nequip 0.19.1, ``nequip/integrations/lammps_mliap``.

_EXCHANGE, _NO_FORCES = "enable_LAMMPSMLIAPGhostExchange", "disable_ForceStressOutput"


def compile_for_lammps(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    size: tuple[int, int] = TYPICAL_SIZE,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model for LAMMPS on any number of ranks, without Python, by ``kernelgen/packs/cpp/pair_equitune.cpp``.

    As of MACE (:func:`autotune.models.mace.use.compile_for_lammps`); Allegro needs no features of ghosts. InputError
    for another model than NequIP's of energies whose types are elements, or one that takes more than positions and
    types.
    """
    _check(model)
    ready: Any = ready_copy(model, device)
    modifiers = [{"modifier": name} for name in (_EXCHANGE, _NO_FORCES) if name in get_all_modifiers(ready)]
    ready = modify(ready, modifiers)
    accelerate(ready)

    def energies(graph: RankGraph) -> Tensor:
        data = {
            Data.EDGE_VECTORS_KEY: graph.vectors,
            Data.EDGE_INDEX_KEY: torch.stack((graph.receiver, graph.sender)),
            Data.ATOM_TYPE_KEY: graph.elements,
            Data.LMP_MLIAP_DATA_KEY: graph.exchange(),
        }
        # Models without exchange give energies of ghosts too.
        return ready(data)[Data.PER_ATOM_ENERGY_KEY][: graph.atoms]

    return compile_energies(
        energies, float(ready.metadata["r_max"]), ready.type_names, path, device=device, size=size, options=options
    )


def _check(model: Any) -> None:
    if not getattr(model, "is_graph_model", False) or _NO_FORCES not in get_all_modifiers(model):
        kind = type(model).__name__
        raise InputError(f"model is a {kind}; expected a GraphModel of NequIP's with energies and forces")
    if any(len(getattr(module, "categorical_graph_field_embed_modules", ())) for module in model.modules()):
        raise InputError("the model embeds fields of a graph, which LAMMPS does not have; expected one of types alone")
