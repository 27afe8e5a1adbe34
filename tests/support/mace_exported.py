"""A small accelerated MACE model, compiled by AOTInductor with its energies and forces inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from ase import Atoms
from exported import ExportedModel, Tensors
from mace_cases import batch_of, model_of, numbers_in

from autotune import accelerate

NAMES = ("positions", "node_attrs", "edge_index", "shifts", "unit_shifts", "cell", "batch", "ptr", "head")
ATOMS, EDGES = {"positions": 0, "node_attrs": 0, "batch": 0}, {"edge_index": 1, "shifts": 0, "unit_shifts": 0}


def exported_mace(folder: Path, atoms: Atoms, device: str, dtype: torch.dtype) -> ExportedModel:
    """For any numbers of atoms and edges of the structure's elements."""
    model = model_of(numbers_in(atoms), dtype=dtype).eval().requires_grad_(False).to(device)
    accelerate(model)

    def inputs(atoms: Atoms) -> Mapping[str, torch.Tensor]:
        batch = batch_of(model, atoms)
        return {name: batch[name].to(device) for name in NAMES}

    def step(given: Mapping[str, torch.Tensor]) -> Tensors:
        out = model(dict(given), training=False, compute_force=True)
        return out["energy"], out["forces"]

    return ExportedModel(folder, step, inputs, atoms, ATOMS, EDGES)
