"""Models of each package in torch-sim with Equitune in them, captured and not: two systems in one batch.

MACE's class is torch-sim's own, that of NequIP and Allegro is NequIP's. SevenNet's are not here: torch-sim 0.3 imports
what sevenn 0.13 no longer has, and sevenn's own class wants a later torch-sim, which wants Python 3.12.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ase import Atoms
from calculator_cases import model_for
from captured_cases import in_a_box
from model_cases import CUTOFF, MODULES, imidazole, needs, symbols_in

pytest.importorskip("torch_sim", reason="torch-sim is not installed")

import torch_sim as ts

from autotune.models.torch_sim import accelerate_torch_sim
from kernelgen.errors import InputError

CPU, DTYPE, TOLERANCE = torch.device("cpu"), torch.float64, 1e-10
PACKAGES = [name for name in MODULES if name != "sevennet"]
of_all = pytest.mark.parametrize("package", [pytest.param(name, id=name, marks=needs(name)) for name in PACKAGES])
captured_too = pytest.mark.parametrize("capture", [False, True])


def wrapped(package: str) -> Any:
    """torch-sim's model around a stock one; the same weights each time."""
    model = model_for(package)
    if package == "mace":
        from torch_sim.models.mace import MaceModel

        return MaceModel(model, device=CPU, dtype=DTYPE)
    from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
    from nequip.integrations.torchsim import NequIPTorchSimCalc

    transforms = [ChemicalSpeciesToAtomTypeMapper(symbols_in(imidazole())), NeighborListTransform(r_max=CUTOFF)]
    return NequIPTorchSimCalc(model, CPU, transforms=transforms)


def systems() -> list[Atoms]:
    crystal = in_a_box()
    return [imidazole(), crystal[:20]]


def state_of(atoms: list[Atoms]) -> Any:
    return ts.io.atoms_to_state(atoms, device=CPU, dtype=DTYPE)


@of_all
@captured_too
def test_energies_forces_and_stress_are_stocks(package: str, capture: bool) -> None:
    """Of a batch that moves, and of other systems."""
    ours, stock = wrapped(package), wrapped(package)
    assert any(place.replaced for place in accelerate_torch_sim(ours, capture=capture).places)
    for atoms in (systems(), systems()[::-1], systems()[1:]):
        state = state_of(atoms)
        for _ in range(2):
            state.positions = state.positions + 0.02 * torch.sin(10 * state.positions)
            wanted, found = stock(state.clone()), ours(state.clone())
            assert set(found) == set(wanted) >= {"energy", "forces", "stress"}
            for name, value in wanted.items():
                scale = max(float(value.abs().max()), 1.0)
                assert float((found[name] - value).abs().max()) <= TOLERANCE * scale, name
    if capture:
        assert ours.model.replays == 6 and ours.model.eager_calls == 0


@of_all
@captured_too
def test_dynamics_and_relaxations_end_where_stocks_do(package: str, capture: bool) -> None:
    """By torch-sim's integrator and its optimizer, which drops what has converged from the batch."""
    ours, stock = wrapped(package), wrapped(package)
    accelerate_torch_sim(ours, capture=capture)
    ends: dict[str, list[torch.Tensor]] = {"moved": [], "relaxed": []}
    for model in (ours, stock):
        torch.manual_seed(0)
        steps = {"integrator": ts.integrators.nve, "n_steps": 5, "temperature": 300, "timestep": 0.001}
        ends["moved"].append(ts.integrate(system=systems(), model=model, **steps).positions)
        relaxed = ts.optimize(system=systems(), model=model, optimizer=ts.optimizers.fire, max_steps=7)
        ends["relaxed"].append(relaxed.positions)
    start = state_of(systems()).positions
    for name, (found, wanted) in ends.items():
        torch.testing.assert_close(found, wanted, rtol=0, atol=10 * TOLERANCE, msg=name)
        assert float((found - start).abs().max()) > 1e-4


@needs("mace")
def test_neighbors_are_searched_when_needed() -> None:
    """Of two systems: one moves little, the other by more than half the skin; then other cells, and other systems."""
    ours, stock = wrapped("mace"), wrapped("mace")
    accelerate_torch_sim(ours)
    kept, state = ours.neighbor_list_fn, state_of(systems())
    for way, searches in ((0.0, 2), (0.2, 2), (0.2, 3), (0.0, 3)):
        state.positions[0] += way
        assert_equal_energies(ours, stock, state)
        assert kept.searches == searches
    state.cell = state.cell * 1.01
    assert_equal_energies(ours, stock, state)
    assert kept.searches == 5
    for others in (systems()[::-1], systems()[:1], [imidazole()] * 3, systems()):
        assert_equal_energies(ours, stock, state_of(others))
    state.positions[1, 2] = torch.nan
    with pytest.raises(InputError, match="a coordinate is not finite"):
        ours(state)


def assert_equal_energies(ours: Any, stock: Any, state: Any) -> None:
    found, wanted = ours(state.clone())["energy"], stock(state.clone())["energy"]
    assert float((found - wanted).abs().max()) <= TOLERANCE * max(float(wanted.abs().max()), 1.0)


@of_all
def test_the_autobatcher_divides_systems(package: str) -> None:
    ours, stock = wrapped(package), wrapped(package)
    accelerate_torch_sim(ours)
    many = [*systems(), imidazole(), imidazole()[:6]]
    batcher = ts.BinningAutoBatcher(ours, memory_scales_with="n_atoms", max_memory_scaler=22)
    batcher.load_states(state_of(many))
    batches = list(batcher)
    assert len(batches) > 1
    found = torch.cat([ours(state.clone())["energy"] for state in batches])
    wanted = torch.cat([stock(state.clone())["energy"] for state in batches])
    scale = max(float(wanted.abs().max()), 1.0)
    assert float((found - wanted).abs().max()) <= TOLERANCE * scale


@of_all
def test_what_holds_no_model_is_an_input_error(package: str) -> None:
    with pytest.raises(InputError, match="expected a torch-sim model"):
        accelerate_torch_sim(torch.nn.Linear(2, 2))
    model = wrapped(package)
    accelerate_torch_sim(model, capture=True)
    with pytest.raises(InputError, match="captured model already"):
        accelerate_torch_sim(model)
