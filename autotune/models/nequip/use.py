"""NequIP's ASE calculator, for models of NequIP and Allegro, with Equitune in its model."""

from __future__ import annotations

from typing import Any

import torch
from ase import Atoms
from nequip.data import AtomicDataDict as Data
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.integrations.ase import NequIPCalculator as Stock

from autotune.models.accelerate import accelerate
from autotune.models.capture import capture as captured
from autotune.models.step import QuickSteps

# Change ``from nequip.integrations.ase import NequIPCalculator`` to ``from autotune.models.nequip.use import
# NequIPCalculator`` and nothing else.


class NequIPCalculator(Stock, QuickSteps):
    """Takes the arguments of NequIP's class, and accelerates the model, in place, as the last step.

    What a simulation does not change stays on the device between steps (see ``autotune.models.step``), unless the data
    pass through transforms that are not those of NequIP's own calculators. A compiled model stays as it is.

    capture: on a GPU each step of energies, forces and stress is one launch (see :func:`autotune.capture`), which is
    faster for small systems.

    acceleration: the table of what was replaced. step: how inputs are made.
    """

    model: Any

    def __init__(self, *arguments: Any, capture: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.acceleration = accelerate(self)
        self.acceleration.warn_without_convolutions()
        if capture:
            self.model = captured(self.model)

    def why_stock(self) -> str:
        kinds = sorted(type(transform).__name__ for transform in self.transforms)
        own = sorted(kind.__name__ for kind in (ChemicalSpeciesToAtomTypeMapper, NeighborListTransform))
        return "" if kinds == own else f"the data pass through {', '.join(kinds)}"

    def model_cutoff(self) -> float:
        return float(self._neighbor_list().r_max)

    def _neighbor_list(self) -> NeighborListTransform:
        return next(transform for transform in self.transforms if isinstance(transform, NeighborListTransform))

    def atoms_to_data(self, atoms: Atoms) -> dict[str, torch.Tensor]:
        """NequIP's data of one structure; all of its calculator takes its inputs from here."""
        if not self.steps_quickly():
            return super().atoms_to_data(atoms)
        # Whatever else ``from_ase`` takes from the atoms, no model of energies reads.
        kept, graph = self.kept_inputs().of(
            atoms, depends_on=(), make=lambda: super(NequIPCalculator, self).atoms_to_data(atoms)
        )
        dtype = kept[Data.POSITIONS_KEY].dtype
        data = dict(kept)
        data[Data.POSITIONS_KEY] = graph.positions.to(dtype)
        data[Data.CELL_KEY] = graph.cell.to(dtype)[None]
        data[Data.EDGE_INDEX_KEY] = torch.stack((graph.centers, graph.neighbors))
        data[Data.EDGE_CELL_SHIFT_KEY] = graph.unit_shifts.to(dtype)
        prune = self._neighbor_list()._pruner
        return data if prune is None else prune(data)
