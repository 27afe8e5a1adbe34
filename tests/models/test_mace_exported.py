"""An accelerated MACE model, exported with its forces, gives the same from a C++ program without Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from ase import Atoms
from exported import Program, export
from mace_cases import batch_of, imidazole, model_of, numbers_in

from autotune import accelerate

NAMES = ("positions", "node_attrs", "edge_index", "shifts", "unit_shifts", "cell", "batch", "ptr", "head")
ATOMS, EDGES = ("positions", "node_attrs", "batch"), {"edge_index": 1, "shifts": 0, "unit_shifts": 0}


def check_a_program_without_python(folder: Path, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """tolerance: of the largest energy, and of the largest force."""
    small = imidazole()
    other = small.copy()
    other.translate((3.0, 0.3, 0.2))
    large = small + other
    model = model_of(numbers_in(small), dtype=dtype).eval().requires_grad_(False).to(device)
    accelerate(model)

    def inputs(atoms: Atoms) -> tuple[torch.Tensor, ...]:
        batch = batch_of(model, atoms)
        return tuple(batch[name].detach().to(device) for name in NAMES)

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = model(dict(zip(NAMES, tensors, strict=True)), training=False, compute_force=True)
        return out["energy"], out["forces"]

    atoms, edges = torch.export.Dim("atoms", min=2), torch.export.Dim("edges", min=2)
    shapes = [{0: atoms} if name in ATOMS else {EDGES[name]: edges} if name in EDGES else {} for name in NAMES]
    path = folder / "model.pt2"
    export(step, inputs(small), shapes, path)
    program = Program(folder)
    for structure in (small, large):
        found = program.run(path, inputs(structure))
        for name, a, b in zip(("energy", "forces"), found, step(*inputs(structure)), strict=True):
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
