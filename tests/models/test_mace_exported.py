"""An accelerated MACE model, exported with its forces, gives the same from a C++ program without Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from exported import Program
from mace_cases import imidazole
from mace_exported import ExportedMace


def check_a_program_without_python(folder: Path, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """tolerance: of the largest energy, and of the largest force."""
    small = imidazole()
    other = small.copy()
    other.translate((3.0, 0.3, 0.2))
    exported, program = ExportedMace(folder, small, device, dtype), Program(folder)
    for structure in (small, small + other):
        inputs = exported.inputs(structure)
        found = program.run(exported.path, inputs)
        for name, a, b in zip(("energy", "forces"), found, exported.step(*inputs), strict=True):
            error = float((a - b.cpu()).abs().max() / b.abs().max())
            print(f"{device} {dtype} {len(structure)} atoms: {name} differs by {error:.1e}")
            assert error <= tolerance, name


@pytest.mark.slow
@pytest.mark.timeout(1800)  # AOTInductor takes one to two minutes of a core, and shares it with other tests
def test_energies_and_forces_of_a_program_without_python(tmp_path: Path) -> None:
    check_a_program_without_python(tmp_path, "cpu", torch.float64, 1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_program_without_python_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    check_a_program_without_python(tmp_path, "cuda:0", dtype, 1e-9 if dtype is torch.float64 else 1e-6)
