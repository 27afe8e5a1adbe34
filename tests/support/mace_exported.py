"""A small accelerated MACE model, compiled by AOTInductor with its energies and forces inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from exported import Tensors, export
from mace_cases import batch_of, model_of, numbers_in

from autotune import accelerate

NAMES = ("positions", "node_attrs", "edge_index", "shifts", "unit_shifts", "cell", "batch", "ptr", "head")
ATOMS, EDGES = ("positions", "node_attrs", "batch"), {"edge_index": 1, "shifts": 0, "unit_shifts": 0}


class ExportedMace:
    """``path``: the package, for any numbers of atoms and edges of the structure's elements."""

    def __init__(self, folder: Path, atoms: Atoms, device: str, dtype: torch.dtype) -> None:
        self.device = device
        self.model: Any = model_of(numbers_in(atoms), dtype=dtype).eval().requires_grad_(False).to(device)
        accelerate(self.model)
        of_atoms, of_edges = torch.export.Dim("atoms", min=2), torch.export.Dim("edges", min=2)
        shapes = [
            {0: of_atoms} if name in ATOMS else {EDGES[name]: of_edges} if name in EDGES else {} for name in NAMES
        ]
        self.path = folder / "model.pt2"
        export(self.step, self.inputs(atoms), shapes, self.path)

    def inputs(self, atoms: Atoms) -> Tensors:
        batch = batch_of(self.model, atoms)
        return tuple(batch[name].detach().to(self.device) for name in NAMES)

    def step(self, *tensors: torch.Tensor) -> Tensors:
        """Energy [1] and forces [atoms, 3]."""
        out = self.model(dict(zip(NAMES, tensors, strict=True)), training=False, compute_force=True)
        return out["energy"], out["forces"]
