"""Models of each package in torch-sim with Equitune in them, captured and not: two systems in one batch.

MACE's class is torch-sim 0.3's or, with a later torch-sim, MACE's own; those of NequIP, Allegro and SevenNet are the
packages' own. SevenNet's wants a later torch-sim, which wants Python 3.12.
"""

from __future__ import annotations

import copy
import pickle
from importlib.metadata import version
from typing import Any

import pytest
import torch
from ase import Atoms
from calculator_cases import model_for
from captured_cases import in_a_box, on_devices
from model_cases import CUTOFF, MODULES, imidazole, needs, symbols_in

pytest.importorskip("torch_sim", reason="torch-sim is not installed")

import torch_sim as ts

from autotune.models.torch_sim import accelerate_torch_sim
from kernelgen.errors import InputError

IS_NEW = tuple(map(int, version("torch-sim-atomistic").split(".")[:2])) > (0, 3)
PACKAGES = [name for name in MODULES if IS_NEW or name != "sevennet"]
of_all = pytest.mark.parametrize("package", [pytest.param(name, id=name, marks=needs(name)) for name in PACKAGES])
captured_too = pytest.mark.parametrize("capture", [False, True])


def dtype_of(package: str) -> torch.dtype:
    """SevenNet's class takes no other."""
    return torch.float32 if package == "sevennet" else torch.float64


def tolerance(package: str) -> float:
    return 1e-5 if package == "sevennet" else 1e-10


def wrapped(package: str, device: str = "cpu") -> Any:
    """torch-sim's model around a stock one; the same weights each time."""
    model, there = model_for(package, dtype_of(package)).to(device), torch.device(device)
    if package == "mace":
        from torch_sim.models.mace import MaceModel

        return MaceModel(model, device=there, dtype=torch.float64)
    if package == "sevennet":
        from sevenn.torchsim import SevenNetModel

        return SevenNetModel(model, device=there)
    from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
    from nequip.integrations.torchsim import NequIPTorchSimCalc

    transforms = [ChemicalSpeciesToAtomTypeMapper(symbols_in(imidazole())), NeighborListTransform(r_max=CUTOFF)]
    return NequIPTorchSimCalc(model, there, transforms=transforms)


def systems() -> list[Atoms]:
    crystal = in_a_box()
    return [imidazole(), crystal[:20]]


def state_of(atoms: list[Atoms], package: str, device: str = "cpu") -> Any:
    return ts.io.atoms_to_state(atoms, device=torch.device(device), dtype=dtype_of(package))


def assert_equal_values(ours: Any, stock: Any, state: Any, package: str) -> None:
    found, wanted = ours(state.clone()), stock(state.clone())
    assert set(found) == set(wanted) >= {"energy", "forces", "stress"}
    for name, value in wanted.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype, name
        scale = max(float(value.abs().max()), 1.0)
        assert float((found[name] - value).abs().max()) <= tolerance(package) * scale, name


@of_all
@captured_too
@on_devices
def test_energies_forces_and_stress_are_stocks(package: str, capture: bool, device: str) -> None:
    """Of a batch that moves, and of other systems."""
    ours, stock = wrapped(package, device), wrapped(package, device)
    assert any(place.replaced for place in accelerate_torch_sim(ours, capture=capture).places)
    for atoms in (systems(), systems()[::-1], systems()[1:]):
        state = state_of(atoms, package, device)
        for _ in range(2):
            state.positions = state.positions + 0.02 * torch.sin(10 * state.positions)
            assert_equal_values(ours, stock, state, package)
    assert ours.step == f"inputs kept on {device}"
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
        integrator, optimizer = (
            (ts.Integrator.nve, ts.Optimizer.fire) if IS_NEW else (ts.integrators.nve, ts.optimizers.fire)
        )
        steps = {"integrator": integrator, "n_steps": 5, "temperature": 300, "timestep": 0.001}
        ends["moved"].append(ts.integrate(system=systems(), model=model, **steps).positions)
        relaxed = ts.optimize(system=systems(), model=model, optimizer=optimizer, max_steps=7)
        ends["relaxed"].append(relaxed.positions)
    start = state_of(systems(), package).positions
    for name, (found, wanted) in ends.items():
        torch.testing.assert_close(found, wanted, rtol=0, atol=10 * tolerance(package), msg=name)
        assert float((found - start).abs().max()) > 1e-4


@of_all
@captured_too
@on_devices
def test_a_system_is_searched_again_when_needed(package: str, capture: bool, device: str) -> None:
    """Of two systems one moves, first little, then by more than half the skin; then cells change, and systems."""
    ours, stock = wrapped(package, device), wrapped(package, device)
    accelerate_torch_sim(ours, capture=capture)
    state = state_of(systems(), package, device)
    for way, searches in ((0.0, 2), (0.2, 2), (0.2, 3), (0.0, 3)):
        state.positions[0] += way
        assert_equal_values(ours, stock, state, package)
        assert ours.neighbors.searches == searches
    for stretch, searches in ((1.001, 3), (1.3, 5)):
        state.cell = state.cell * stretch
        state.positions = state.positions * torch.where(state.system_idx == 1, stretch, 1.0)[:, None].to(state.dtype)
        assert_equal_values(ours, stock, state, package)
        assert ours.neighbors.searches == searches
    for others in (systems()[::-1], systems()[:1], [imidazole()] * 3, systems(), [imidazole(), in_a_box()[:19]]):
        assert_equal_values(ours, stock, state_of(others, package, device), package)
        searches = ours.neighbors.searches
        assert_equal_values(ours, stock, state_of(others, package, device), package)
        assert ours.neighbors.searches == searches
    state = state_of(systems(), package, device)
    assert_equal_values(ours, stock, state, package)
    state.positions[1, 2] = torch.nan
    with pytest.raises(InputError, match="a coordinate of atom 1 is not finite"):
        ours(state)
    state = state_of(systems(), package, device)
    # Of the system that was served when the other one's search failed: the last atom comes to the first one.
    state.positions[-1] = state.positions[len(imidazole())] + torch.tensor([0.0, 0.9, 0.0]).to(state.positions)
    assert_equal_values(ours, stock, state, package)


@of_all
@captured_too
def test_other_species_of_as_many_atoms_are_noticed(package: str, capture: bool) -> None:
    """Of another state, and written into the same tensor."""
    ours, stock = wrapped(package), wrapped(package)
    accelerate_torch_sim(ours, capture=capture)
    other = imidazole()
    other.numbers = other.numbers[::-1]
    state = state_of([imidazole()], package)
    for atoms in (imidazole(), other):
        assert_equal_values(ours, stock, state_of([atoms], package), package)
    for numbers in (imidazole().numbers, other.numbers):
        state.atomic_numbers.copy_(torch.from_numpy(numbers))
        torch.testing.assert_close(ours(state)["energy"], stock(state.clone())["energy"])


@of_all
def test_what_is_not_known_goes_the_stock_way(package: str) -> None:
    """And says so."""
    ours, stock = wrapped(package), wrapped(package)
    accelerate_torch_sim(ours)
    for model in (ours, stock):
        model._compute_stress = False
    state = state_of(systems(), package)
    found, wanted = ours(state.clone()), stock(state.clone())
    assert ours.step == "the class's own, because it does not compute forces and stress"
    assert set(found) == set(wanted)
    assert torch.allclose(found["forces"], wanted["forces"], rtol=0, atol=tolerance(package))


@of_all
def test_the_autobatcher_divides_systems(package: str) -> None:
    ours, stock = wrapped(package), wrapped(package)
    accelerate_torch_sim(ours)
    many = [*systems(), imidazole(), imidazole()[:6]]
    batcher = ts.BinningAutoBatcher(ours, memory_scales_with="n_atoms", max_memory_scaler=22)
    batcher.load_states(state_of(many, package))
    batches = [state[0] if isinstance(state, tuple) else state for state in batcher]
    assert len(batches) > 1
    for state in batches:
        assert_equal_values(ours, stock, state, package)


@of_all
def test_what_holds_no_model_is_an_input_error(package: str) -> None:
    with pytest.raises(InputError, match="expected a torch-sim model"):
        accelerate_torch_sim(torch.nn.Linear(2, 2))
    model = wrapped(package)
    accelerate_torch_sim(model, capture=True)
    with pytest.raises(InputError, match="captured model already"):
        accelerate_torch_sim(model)


@of_all
def test_copies_and_a_second_call_change_nothing(package: str) -> None:
    ours, stock = wrapped(package), wrapped(package)
    accelerate_torch_sim(ours)
    accelerate_torch_sim(ours)
    state = state_of(systems(), package)
    assert_equal_values(ours, stock, state, package)
    if package == "mace" and not IS_NEW:
        return  # torch-sim 0.3's class holds a function of TorchScript, which cannot be copied
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_equal_values(copied, stock, state, package)
        assert copied.step == "inputs kept on cpu" and copied.neighbors.searches == 2
