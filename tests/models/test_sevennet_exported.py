"""An accelerated SevenNet model, exported with its forces, gives the same from a C++ program without Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

pytest.importorskip("sevenn", reason="SevenNet is not installed")

import sevenn._keys as KEY
from ase import Atoms
from exported import ExportedModel, Tensors, check_without_python
from model_cases import CUTOFF, imidazole, two_molecules
from sevennet_cases import CASE

from autotune import accelerate
from autotune.captured.fields import Counts
from autotune.captured.package import package_for

SMALL = {KEY.NUM_CONVOLUTION: 2, KEY.IRREPS_MANUAL: ["8x0e", "8x0e+4x1e+2x2e", "8x0e"]}


def exported(folder: Path, device: str) -> ExportedModel:
    model = CASE.build(imidazole(), torch.float64, **SMALL).eval().requires_grad_(False).to(device)
    accelerate(model)
    package = package_for(model)

    def inputs(atoms: Atoms) -> Mapping[str, torch.Tensor]:
        batch = CASE.batch(model, atoms)
        there = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
        return {name: field.tensor for name, field in package.fields(model, there, CUTOFF)[0].items()}

    def step(given: Mapping[str, torch.Tensor]) -> Tensors:
        size = Counts(given["x"].shape[0], given["edge_vec"].shape[0], 1)
        out = package.compute(model, dict(given), size, {})
        return out["inferred_total_energy"], out["inferred_force"]

    edges = {"edge_index": 1, "edge_vec": 0}
    return ExportedModel(folder, step, inputs, imidazole(), {"x": 0, "batch": 0}, edges)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # AOTInductor takes one to two minutes of a core, and shares it with other tests
def test_energies_and_forces_of_a_program_without_python(tmp_path: Path) -> None:
    check_without_python(tmp_path, lambda: exported(tmp_path, "cpu"), (imidazole(), two_molecules()), 1e-9)


@pytest.mark.gpu
def test_a_program_without_python_on_a_gpu(tmp_path: Path) -> None:
    check_without_python(tmp_path, lambda: exported(tmp_path, "cuda:0"), (imidazole(), two_molecules()), 1e-9)
