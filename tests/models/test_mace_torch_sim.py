"""MACE in torch-sim with Equitune in it, captured and not: two crystals in one batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")
pytest.importorskip("torch_sim", reason="torch-sim is not installed")

import torch_sim as ts
from ase import Atoms
from ase.build import bulk
from mace_cases import model_of
from torch_sim.models.mace import MaceModel

from autotune.models.torch_sim import accelerate_torch_sim
from kernelgen.errors import InputError


def crystals() -> list[Atoms]:
    """Diamond, 16 atoms, and silicon, 2 atoms; displaced."""
    found = [bulk("C", "diamond", a=3.57).repeat(2), bulk("Si", "diamond", a=5.4)]
    for seed, atoms in enumerate(found):
        atoms.rattle(0.05, seed=seed)
    return found


@pytest.fixture
def both() -> tuple[Any, Any]:
    """torch-sim's model twice, with the same weights."""
    mace, options = model_of([6, 14]), {"device": torch.device("cpu"), "dtype": torch.float64}
    return MaceModel(copy.deepcopy(mace), **options), MaceModel(mace, **options)


@pytest.mark.parametrize("capture", [False, True])
def test_energies_forces_and_stress_are_stocks(capture: bool, both: tuple[Any, Any]) -> None:
    """Of a batch that moves, and of other systems."""
    ours, stock = both
    assert any(place.replaced for place in accelerate_torch_sim(ours, capture=capture).places)
    for systems in (crystals(), crystals()[::-1], crystals()[1:]):
        state = ts.io.atoms_to_state(systems, device=torch.device("cpu"), dtype=torch.float64)
        for _ in range(2):
            state.positions = state.positions + 0.02 * torch.sin(10 * state.positions)
            wanted, found = stock(state.clone()), ours(state.clone())
            assert set(found) == set(wanted) == {"energy", "forces", "stress"}
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-11 * float(value.abs().max()))
    if capture:
        assert ours.model.replays == 6 and ours.model.eager_calls == 0


@pytest.mark.parametrize("capture", [False, True])
def test_dynamics_end_where_stocks_do(capture: bool, both: tuple[Any, Any]) -> None:
    (ours, stock), ended = both, []
    accelerate_torch_sim(ours, capture=capture)
    for model in (ours, stock):
        torch.manual_seed(0)
        steps = {"integrator": ts.integrators.nve, "n_steps": 5, "temperature": 300, "timestep": 0.001}
        ended.append(ts.integrate(system=crystals(), model=model, **steps).positions)
    torch.testing.assert_close(*ended, rtol=0, atol=1e-11)
    state = ts.io.atoms_to_state(crystals(), device=torch.device("cpu"), dtype=torch.float64)
    assert float((ended[0] - state.positions).abs().max()) > 1e-4


def test_what_holds_no_model_is_an_input_error(both: tuple[Any, Any]) -> None:
    with pytest.raises(InputError, match="expected a torch-sim model"):
        accelerate_torch_sim(torch.nn.Linear(2, 2))
    accelerate_torch_sim(both[0], capture=True)
    with pytest.raises(InputError, match="captured model already"):
        accelerate_torch_sim(both[0])
