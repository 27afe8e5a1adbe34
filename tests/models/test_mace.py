"""An accelerated MACE gives what the stock one gives: energies, forces, stress and every training gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from ase import Atoms
from e3nn import o3
from mace_cases import PROTEIN, assert_same, batch_of, imidazole, model_of, mof, numbers_in, protein, results

from autotune.models.accelerate import accelerate, restore
from autotune.models.mace.package import MaceConvolution
from autotune.models.stand_ins import StandIn

needs_protein = pytest.mark.skipif(not PROTEIN.is_file(), reason="the protein is not in this checkout")
BLOCKS = (
    "RealAgnosticInteractionBlock",
    "RealAgnosticResidualInteractionBlock",
    "RealAgnosticDensityInteractionBlock",
    "RealAgnosticDensityResidualInteractionBlock",
    "RealAgnosticAttResidualInteractionBlock",
    "RealAgnosticResidualNonLinearInteractionBlock",
)


def assert_agrees(model: Any, *structures: Atoms) -> None:
    """Results of the stock model, of the accelerated one with all convolutions fused, and of the restored one."""
    batch = batch_of(model, *structures)
    wanted = results(model, batch)
    table = accelerate(model)
    assert all(place.replaced for place in table.places), str(table)
    assert all(isinstance(block.conv_tp, MaceConvolution) for block in model.interactions)
    assert_same(results(model, batch), wanted)
    assert restore(model) == len(table.places)
    assert not any(hasattr(block, "conv_fusion") for block in model.interactions)
    assert not any(isinstance(module, StandIn) for module in model.modules())
    assert_same(results(model, batch), wanted)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_interaction_block_agrees_with_stock(block: str) -> None:
    atoms = imidazole()
    assert_agrees(model_of(numbers_in(atoms), block=block), atoms)


SIZES: dict[str, dict[str, Any]] = {
    "l1, pairs, no scale": {"kind": "MACE", "max_ell": 1, "correlation": 1, "hidden": "2x0e+2x1o"},
    "l3, four bodies": {"max_ell": 3, "correlation": 3},
    "pseudo-scalars": {"max_ell": 1, "hidden": "4x0e+4x0o+4x1o"},
    "one layer": {"num_interactions": 1},
    "the cutoff in the weights": {"apply_cutoff": False, "pair_repulsion": True, "distance_transform": "Agnesi"},
    "fewer channels on edges": {"edge_irreps": o3.Irreps("2x0e+2x1o"), "use_edge_irreps_first": True},
    "energy and dipole": {"kind": "EnergyDipolesMACE"},
    "dipole": {"kind": "AtomicDipolesMACE"},
    "dipole and polarizability": {"kind": "AtomicDielectricMACE", "hidden": "4x0e+4x1o+4x2e"},
}


@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES)
def test_every_size_and_class_of_model_agrees_with_stock(options: dict[str, Any]) -> None:
    atoms = imidazole()
    assert_agrees(model_of(numbers_in(atoms), **options), atoms)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("structure", [mof, pytest.param(protein, marks=needs_protein)])
def test_crystal_and_protein_agree_with_stock(structure: Callable[[], Atoms], dtype: torch.dtype) -> None:
    atoms = structure()
    assert_agrees(model_of(numbers_in(atoms), dtype=dtype, hidden="2x0e+2x1o", max_ell=1), atoms)


def test_several_structures_in_one_batch_agree_with_stock_in_float32() -> None:
    one, two = imidazole(), imidazole()
    two.rattle(0.1, seed=1)
    assert_agrees(model_of(numbers_in(one), dtype=torch.float32), one, two)
