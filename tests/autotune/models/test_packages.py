"""The real packages, where they are installed: small models, whose values repeat in float64 and in batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from autotune.models.capture import capture
from autotune.models.package import default_dtype
from autotune.models.whole_model import (
    PublishedModel,
    WholeModel,
    build_published,
    find_atoms,
    package_named,
    package_of,
    published_models,
)

SMALL: dict[str, dict[str, Any]] = {
    "mace-mp-0-medium": {"hidden_irreps": "4x0e + 4x1o", "max_ell": 2, "correlation": 2, "species": "1, 6-8"},
    "mace-mh-1": {"hidden_irreps": "8x0e + 8x1o", "edge_irreps": "4x0e + 4x1o", "max_ell": 2, "species": "1, 6-8"},
    "mace-omol-0": {
        "hidden_irreps": "8x0e + 8x1o",
        "edge_irreps": "4x0e + 4x1o",
        "num_interactions": 2,
        "max_ell": 2,
        "species": "1, 6-8",
        "embedding_specs": {
            "total_charge": {
                "type": "categorical",
                "per": "graph",
                "in_dim": 1,
                "emb_dim": 8,
                "num_classes": 9,
                "offset": 4,
            }
        },
    },
    "nequip-oam-l": {"num_layers": 2, "l_max": 1, "num_features": [4, 2], "species": "1, 6-8"},
    "allegro-oam-l": {
        "cutoff": 4.0,
        "num_layers": 2,
        "l_max": 2,
        "num_scalar_features": 8,
        "num_tensor_features": 2,
        "allegro_mlp_hidden_layers_width": 8,
        "readout_mlp_hidden_layers_width": 4,
        "radial_chemical_embed_dim": 8,
        "scalar_embed_mlp_hidden_layers_width": 8,
        "species": "1, 6-8",
    },
    "sevennet-0": {
        "channel": 4,
        "lmax": 1,
        "num_convolution_layer": 2,
        "irreps_manual": ["4x0e", "4x0e+2x1e", "4x0e"],
        "species": "1, 6-8",
    },
    "sevennet-mf-ompa": {
        "channel": 4,
        "lmax": 1,
        "num_convolution_layer": 2,
        "irreps_manual": ["4x0e", "4x0e+2x1o", "4x0e"],
        "species": "1, 6-8",
    },
}


def small(name: str, dtype: torch.dtype = torch.float32) -> WholeModel:
    """A published model with few channels; skips the test where its package is missing."""
    published = published_models()[name]
    for module in package_named(published.package).modules:
        pytest.importorskip(module)
    fewer = PublishedModel(name, published.package, published.source, published.parameters | SMALL[name])
    return build_published(fewer, dtype, seed=1)


@pytest.mark.parametrize("name", SMALL)
def test_a_model_is_its_packages(name: str) -> None:
    """Allegro's models are of a class of NequIP's."""
    model = small(name)
    assert package_of(model.module) is model.package and model.package.name in name


@pytest.mark.parametrize("name", SMALL)
def test_float32_and_float64_have_equal_weights_and_values(name: str) -> None:
    atoms = find_atoms("imidazole")
    single, double = small(name), small(name, torch.float64)
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    # MACE's readouts of several heads make their masks in torch's default dtype.
    with default_dtype(torch.float32):
        found = single.energies_and_forces(single.inputs([atoms]))
    with default_dtype(torch.float64):
        exact = double.energies_and_forces(double.inputs([atoms]))
    assert torch.allclose(found.energy.double(), exact.energy.double(), rtol=1e-5)
    assert (found.forces - exact.forces).abs().max() < 1e-4 * exact.forces.abs().max()


@pytest.mark.parametrize("name", SMALL)
def test_forces_are_the_slope_of_the_energy(name: str) -> None:
    model, step = small(name, torch.float64), 1e-5
    atoms = find_atoms("imidazole")
    forces = model.energies_and_forces(model.inputs([atoms])).forces
    energies = []
    for sign in (1, -1):
        moved = atoms.copy()
        moved.positions[2, 1] += sign * step
        energies.append(float(model.energies_and_forces(model.inputs([moved])).energy))
    assert (energies[1] - energies[0]) / (2 * step) == pytest.approx(float(forces[2, 1]), rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("name", SMALL)
def test_a_batch_has_the_values_of_its_structures_and_a_training_step_all_gradients(name: str) -> None:
    model, atoms = small(name, torch.float64), find_atoms("imidazole")
    alone = model.energies_and_forces(model.inputs([atoms]))
    inputs = model.inputs([atoms, atoms])
    both = model.energies_and_forces(inputs)
    assert torch.allclose(both.energy, alone.energy.expand(2), rtol=1e-10)
    assert model.edges(inputs).shape == (2, 2 * model.edges(model.inputs([atoms])).shape[1])
    model.training_step(inputs)
    trained = [weight for weight in model.module.parameters() if weight.requires_grad]
    assert trained and all(weight.grad is not None for weight in trained)


@pytest.mark.parametrize("name", SMALL)
def test_stress_is_given_for_a_crystal(name: str) -> None:
    model, atoms = small(name, torch.float64), find_atoms("carbon-small")[:8]
    stress = model.energies_and_forces(model.inputs([atoms]), stress=True).stress
    assert stress is not None and stress.shape == (1, 3, 3)
    assert torch.allclose(stress, stress.transpose(1, 2), rtol=1e-8, atol=1e-12) and stress.abs().max() > 0


@pytest.mark.parametrize(
    ("name", "info"),
    [
        ("mace-omol-0", {"total_charge": -2}),
        ("mace-mh-1", {"head": "omol"}),
        ("sevennet-mf-ompa", {"data_modality": "mpa"}),
    ],
)
def test_what_a_structure_says_of_itself_is_read_and_captured(name: str, info: dict[str, Any]) -> None:
    model, atoms = small(name, torch.float64), find_atoms("imidazole")
    said = atoms.copy()
    said.info |= info
    captured = model.with_module(capture(copy.deepcopy(model.module)))
    for structures in ([said], [atoms, said]):
        inputs = model.inputs(structures)
        wanted, found = model.energies_and_forces(inputs), captured.energies_and_forces(inputs)
        assert torch.allclose(found.energy, wanted.energy, rtol=1e-10)
        assert torch.allclose(found.forces, wanted.forces, atol=1e-10)
    assert (wanted.energy[0] - wanted.energy[1]).abs() > 1e-6
