"""An accelerated NequIP model, exported with its forces, gives the same from a C++ program without Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

pytest.importorskip("nequip", reason="NequIP is not installed")

from ase import Atoms
from exported import ExportedModel, Tensors, check_without_python
from model_cases import imidazole, two_molecules
from nequip_cases import CASE

from autotune import accelerate
from autotune.models.packages.base import default_dtype

NAMES = ("pos", "atom_types", "edge_index", "edge_cell_shift", "cell")


def exported(folder: Path, device: str) -> ExportedModel:
    model = CASE.build(imidazole(), torch.float64, num_layers=2).eval().requires_grad_(False).to(device)
    accelerate(model)

    def inputs(atoms: Atoms) -> Mapping[str, torch.Tensor]:
        batch = CASE.batch(model, atoms)
        return {name: batch[name].to(device) for name in NAMES}

    def step(given: Mapping[str, torch.Tensor]) -> Tensors:
        with default_dtype(torch.float64):
            out = model(dict(given))
        return out["total_energy"], out["forces"]

    edges = {"edge_index": 1, "edge_cell_shift": 0}
    return ExportedModel(folder, step, inputs, imidazole(), {"pos": 0, "atom_types": 0}, edges)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # AOTInductor takes one to two minutes of a core, and shares it with other tests
def test_energies_and_forces_of_a_program_without_python(tmp_path: Path) -> None:
    check_without_python(tmp_path, lambda: exported(tmp_path, "cpu"), (imidazole(), two_molecules()), 1e-9)


@pytest.mark.gpu
def test_a_program_without_python_on_a_gpu(tmp_path: Path) -> None:
    check_without_python(tmp_path, lambda: exported(tmp_path, "cuda:0"), (imidazole(), two_molecules()), 1e-9)
