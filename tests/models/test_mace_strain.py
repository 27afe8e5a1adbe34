"""MACE's strain in accelerated models: the same energies, stress and derivatives; no sum of all edges one by one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from ase import Atoms
from edge_products import EdgeProducts
from mace.modules import models
from mace.modules.utils import get_symmetric_displacement
from mace.tools.scripts_utils import extract_model
from mace_cases import assert_same, batch_of, imidazole, model_of, results

from autotune.models.accelerate import accelerate, restore
from autotune.models.linear import rows_of
from autotune.models.mace import patched as strained_models
from autotune.models.mace.patched import strained
from kernelgen.errors import InputError

NUMBERS = [1, 6, 7]


def in_a_box() -> Atoms:
    """72 atoms with some thousand edges."""
    atoms = imidazole()
    atoms.set_cell([5.0, 5.5, 6.0])
    atoms.set_pbc(True)
    return atoms.repeat(2)


@pytest.mark.parametrize("count, length", [(1, 700), (3, 700), (3, 256), (2, 1), (4, 0), (1, 0)])
def test_rows_and_their_derivatives(count: int, length: int) -> None:
    generator = torch.Generator().manual_seed(count)
    table = torch.randn(count, 3, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    index = torch.randint(count, (length,), generator=generator)
    g = torch.randn(length, 3, 3, dtype=torch.float64, generator=generator, requires_grad=True)

    def derivatives(rows: Callable) -> list[torch.Tensor]:
        found = rows(table, index)
        (first,) = torch.autograd.grad((found.sin() * g).sum(), table, create_graph=True)
        return [found, first, *torch.autograd.grad(first.square().sum(), (table, g))]

    for found, wanted in zip(derivatives(rows_of), derivatives(lambda table, index: table[index]), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("count", [1, 2])
def test_numbers_of_structures_in_a_column_are_refused(count: int) -> None:
    """As MACE does; with one structure they were not looked at."""
    model = model_of(NUMBERS)
    batch = {key: value for key, value in batch_of(model, *[imidazole()] * count).items() if torch.is_tensor(value)}
    for change in (lambda model: None, accelerate):
        change(model)
        with pytest.raises(RuntimeError):
            model(batch | {"batch": batch["batch"][:, None]}, compute_stress=True)
    with pytest.raises(InputError, match=r"batch has shape \(\d+, 1\); expected the structure of each atom"):
        model(batch | {"batch": batch["batch"][:, None]}, compute_stress=True)


@pytest.mark.parametrize("given", [False, True], ids=["own displacement", "given displacement"])
@pytest.mark.parametrize("has_cell", [True, False])
def test_the_strain_is_maces(has_cell: bool, given: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    batch, edges = torch.arange(12) // 4, torch.randint(12, (2, 600), generator=generator)
    positions, shifts = draw(12, 3).requires_grad_(), torch.randint(-1, 2, (600, 3), generator=generator).double()
    cell = draw(9, 3) if has_cell else None
    displacement = draw(3, 3, 3).requires_grad_() if given else None
    found, wanted = (
        one(positions, shifts, cell, edges, 3, batch, displacement) for one in (strained, get_symmetric_displacement)
    )
    weights = [draw(*part.shape) for part in wanted]

    def gradients(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        value = sum((part.sin() * weight).sum() for part, weight in zip(parts, weights, strict=True))
        return torch.autograd.grad(value, (positions, parts[2]))

    for one, other in zip((*found, *gradients(found)), (*wanted, *gradients(wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["ScaleShiftMACE", "MACE", "EnergyDipolesMACE"])
def test_stress_and_training_gradients_of_periodic_graphs(kind: str, count: int) -> None:
    model = model_of(NUMBERS, kind=kind)
    batch = batch_of(model, *[in_a_box()] * count)
    wanted = results(model, batch)
    assert wanted["forces"].any() and ("stress" not in wanted or wanted["stress"].any())
    accelerate(model)
    with EdgeProducts() as seen:
        found = results(model, batch)
    assert_same(found, wanted)
    assert seen.most <= 256 and seen.batch <= count
    restore(model)
    with EdgeProducts() as seen:
        assert_same(results(model, batch), wanted)
    edges = batch["edge_index"].shape[1]
    assert seen.most == edges / count > 256, "MACE sums all edges of a graph one by one"
    assert seen.batch == edges


def test_the_class_is_a_subclass_of_maces_by_its_name_and_goes_again() -> None:
    model = model_of(NUMBERS)
    accelerate(model)
    assert type(model) is strained_models.ScaleShiftMACE and type(model).__name__ == "ScaleShiftMACE"
    assert isinstance(model, models.ScaleShiftMACE)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other) is type(model)
        restore(other)
        assert type(other) is models.ScaleShiftMACE
    assert type(model) is strained_models.ScaleShiftMACE
    assert type(extract_model(model, map_location="cpu")) is models.ScaleShiftMACE, "as MACE rebuilds it"
    restore(model)
    assert type(model) is models.ScaleShiftMACE
