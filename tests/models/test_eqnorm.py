"""Eqnorm with random weights, by the generic path. It needs torch-scatter, so no environment of CI has it.

pip install torch torch-scatter --no-build-isolation; pip install --no-deps eqnorm e3nn vesin torch-geometric
"""

from __future__ import annotations

import importlib
import importlib.resources
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("eqnorm", reason="Eqnorm is not installed")
pytest.importorskip("torch_scatter", reason="torch-scatter is not installed")

import vesin
from ase.build import bulk
from eqnorm.config import LoadConfig

from autotune.models.accelerate import accelerate


def random_model() -> tuple[Any, float]:
    """The published eqnorm-mptrj, with random weights; and its cutoff."""
    settings = importlib.resources.files("eqnorm.model_settings") / "eqnorm-mptrj.yaml"
    options = LoadConfig(yaml_path=str(settings)).load_args()
    torch.manual_seed(0)
    of_species = {"unique_elements": torch.arange(1, 90), "shift": torch.zeros(89), "scale": torch.tensor(1.0)}
    model = importlib.import_module("eqnorm.eqnorm-mptrj").HDNNP(args=options, **of_species).eval()
    return model.requires_grad_(False), options.r_cutoff


def test_its_results_are_those_of_stock() -> None:
    """In float32, to which it casts its inputs itself."""
    model, cutoff = random_model()
    atoms = bulk("C", "diamond", a=3.57, cubic=True)
    atoms.numbers[::3] = 8
    atoms.rattle(0.05, seed=0)
    neighbors = vesin.NeighborList(cutoff=cutoff, full_list=True, sorted=False)
    first, second, shifts = neighbors.compute(atoms.positions, atoms.cell.array, periodic=True, quantities="ijS")
    data = {
        "pos": torch.tensor(atoms.positions, dtype=torch.float32),
        "edge_index": torch.tensor(np.stack([first, second]).astype(np.int64)),
        "atomic_numbers": torch.tensor(atoms.numbers),
        "shifts": torch.tensor(shifts),
        "cell": torch.tensor(atoms.cell.array, dtype=torch.float32)[None],
        "batch": torch.zeros(len(atoms), dtype=torch.long),
    }
    wanted = model(dict(data), training=False)[:3]
    assert accelerate(model).replaced == 13  # products of convolutions and gates, and the harmonics
    for value, found in zip(wanted, model(dict(data), training=False), strict=False):
        assert (found - value).abs().max() <= 5e-6 * value.abs().max()
