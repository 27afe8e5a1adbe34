"""Small NequIP models for the tests of Equitune inside NequIP."""

from __future__ import annotations

from typing import Any

import torch
from ase import Atoms
from model_cases import CUTOFF, Case, Results, symbols_in
from nequip.data import AtomicDataDict, from_ase
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.model import NequIPGNNModel
from nequip.utils.global_state import set_global_state

from autotune.models.package import default_dtype


class NequIPCase(Case):
    """Models of a builder of NequIP's, by default three layers up to l = 2 of both parities."""

    options: dict[str, Any] = {
        "num_layers": 3,
        "l_max": 2,
        "parity": True,
        "num_features": 4,
        "radial_mlp_width": 8,
        "avg_num_neighbors": 12.0,
    }
    builder: Any = staticmethod(NequIPGNNModel)

    def build(self, atoms: Atoms, dtype: torch.dtype = torch.float64, **more: Any) -> torch.nn.Module:
        with default_dtype(torch.get_default_dtype()):
            set_global_state()  # makes float64 torch's default dtype, in which NequIP keeps positions
        kinds = symbols_in(atoms)
        return self.builder(
            seed=1,
            model_dtype=str(dtype).removeprefix("torch."),
            r_max=CUTOFF,
            type_names=kinds,
            per_type_energy_scales=1.0,
            per_type_energy_shifts={kind: 0.1 * place for place, kind in enumerate(kinds)},
            **{**self.options, **more},
        )

    def batch(self, model: Any, *structures: Atoms) -> dict[str, Any]:
        steps = (ChemicalSpeciesToAtomTypeMapper(model.type_names), NeighborListTransform(r_max=CUTOFF))
        with default_dtype(torch.float64):
            frames = [from_ase(atoms) for atoms in structures]
            for step in steps:
                frames = [step(frame) for frame in frames]
            return frames[0] if len(frames) == 1 else AtomicDataDict.batched_from_list(frames)

    def predict(self, model: Any, batch: dict[str, Any]) -> Results:
        with default_dtype(torch.float64):
            out = model(dict(batch))
        # NequIP returns float64 whatever the model's dtype is.
        return {
            name: out[key].to(model.model_dtype)
            for name, key in (("energy", "total_energy"), ("forces", "forces"), ("stress", "stress"))
        }


CASE = NequIPCase()
