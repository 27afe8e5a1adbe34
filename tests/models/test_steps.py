"""Calculators whose inputs stay on the device between steps, beside their packages' own."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.lj import LennardJones
from ase.calculators.mixing import SumCalculator
from calculator_cases import calculators, model_for, quick_calculator, stock_calculator
from captured_cases import slanted
from model_cases import MODULES, imidazole, needs

from autotune.models import neighbors, step
from autotune.models.accelerate import accelerate, restore
from autotune.models.capture import CapturedModel
from autotune.models.launch import OneLaunch
from autotune.models.package import default_dtype
from kernelgen.errors import InputError, ToolMissingError

of_all = pytest.mark.parametrize("package", [pytest.param(name, id=name, marks=needs(name)) for name in MODULES])
ways = pytest.mark.parametrize("captured", [False, True], ids=["model", "captured"])
# SevenNet's calculator is of float32.
TOLERANCE = {"mace": 1e-10, "nequip": 1e-10, "allegro": 1e-10, "sevennet": 2e-5}


@pytest.fixture(autouse=True)
def dtype_of_nequips_data(request: pytest.FixtureRequest) -> Iterator[None]:
    """NequIP's own programs set torch's default dtype to float64, in which its calculators then make data."""
    nequips = any(name in request.node.name for name in ("nequip", "allegro"))
    with default_dtype(torch.float64 if nequips else torch.float32):
        yield


def captured_model_of(calculator: Any) -> Any:
    (model,) = getattr(calculator, "models", None) or [calculator.model]
    return model


def results_of(calculator: Any, atoms: Atoms) -> dict[str, Any]:
    at = atoms.copy()
    at.calc = calculator
    at.get_potential_energy(), at.get_forces()
    return dict(calculator.results)


def assert_agree(package: str, quick: Any, stock: Any, atoms: Atoms) -> None:
    """All results, in shape, kind and value; forces of up to 1 eV/angstrom are small ones."""
    found, wanted = results_of(quick, atoms), results_of(stock, atoms)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert type(found[name]) is type(value), name
        assert np.shape(found[name]) == np.shape(value) and np.asarray(found[name]).dtype == np.asarray(value).dtype
        assert np.array_equal(np.isnan(found[name]), np.isnan(value)), name  # stress of a molecule without a cell
        scale = max(float(np.nan_to_num(np.abs(value)).max(initial=0.0)), 1.0)
        difference = np.nan_to_num(np.abs(np.asarray(found[name]) - np.asarray(value)))
        error = float(difference.max(initial=0.0)) / scale
        assert error <= TOLERANCE[package], f"{name} differs by {error:.1e}"


def single_atom() -> Atoms:
    """Whose only neighbours are its images."""
    return Atoms("C", cell=[2.1, 2.4, 2.7], pbc=True)


def left_handed() -> Atoms:
    atoms = imidazole()
    atoms.set_cell([[2.0, 5.5, 0.0], [6.5, 0.0, 0.0], [0.5, 1.0, 9.0]])
    return atoms


def molecule() -> Atoms:
    return Atoms(imidazole().symbols, imidazole().positions)


STRUCTURES = {"box": imidazole, "slab": slanted, "one": single_atom, "left": left_handed, "molecule": molecule}


def walk(atoms: Atoms, frames: int, width: float) -> Iterator[Atoms]:
    random = np.random.default_rng(0)
    for _ in range(frames):
        atoms.positions += width * random.normal(size=atoms.positions.shape)
        yield atoms


def pair(package: str, captured: bool) -> tuple[Any, Any]:
    """Stock and quick; on a CPU a captured model computes what one launch would, step by step."""
    return stock_calculator(package), quick_calculator(package, capture=captured)


@pytest.mark.covering(2)
@of_all
@ways
@pytest.mark.parametrize("structure", list(STRUCTURES))
def test_moving_atoms_have_stocks_results(package: str, structure: str, captured: bool) -> None:
    stock, quick = pair(package, captured)
    for atoms in walk(STRUCTURES[structure](), frames=12, width=0.04):
        assert_agree(package, quick, stock, atoms)
    kept = quick.kept_inputs()
    assert kept.makes == 1 and 1 <= kept.searches <= 4


@pytest.mark.gpu
@of_all
@pytest.mark.parametrize("capture", [None, False, True])
@pytest.mark.parametrize("structure", list(STRUCTURES))
def test_steps_on_a_gpu_have_stocks_results(package: str, structure: str, capture: bool | None) -> None:
    stock = stock_calculator(package, device="cuda")
    quick = quick_calculator(package, device="cuda", capture=capture)
    for atoms in walk(STRUCTURES[structure](), frames=step.PATIENCE + 4 if capture is None else 6, width=0.04):
        assert_agree(package, quick, stock, atoms)
    how = "" if capture is False else ", one launch each"
    assert quick.step == f"inputs kept on cuda, neighbors by vesin there{how}" and quick.kept_inputs().makes == 1


def said_of_steps(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, but for what accelerating the model said."""
    lines = [record.message for record in caplog.records if record.name == "equitune"]
    return [line for line in lines if not line.endswith("replaced")]


def with_patience(package: str, patience: int) -> tuple[Any, Any]:
    """Of a calculator on a CPU, which by itself has none."""
    stock, quick = calculators(package)
    quick.kept_inputs().patience = patience
    return stock, quick


@of_all
def test_models_of_atoms_that_stay_are_captured(package: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="equitune"):
        stock, quick = with_patience(package, 3)
        for number, atoms in enumerate(walk(imidazole(), frames=6, width=0.04)):
            assert_agree(package, quick, stock, atoms)
            assert quick.kept_inputs().launches == (number >= 3)
    assert not isinstance(captured_model_of(quick), CapturedModel), "the calculator's model is the user's"
    first = f"{type(quick).__name__}: steps with inputs kept on cpu, neighbors there"
    assert said_of_steps(caplog) == [first, f"{first}, one launch each"]
    for copied in (copy.deepcopy(quick), pickle.loads(pickle.dumps(quick))):
        assert_agree(package, copied, stock, slanted())


@of_all
def test_what_cannot_be_captured_is_not_and_says_why(package: str) -> None:
    """A model with a hook of its own; and one whose capture fails later, on the device."""
    stock, quick = with_patience(package, 2)
    captured_model_of(quick).register_forward_hook(lambda *_: None)
    for atoms in walk(imidazole(), frames=4, width=0.04):
        assert_agree(package, quick, stock, atoms)
    assert "one launch each, because" in quick.step and "has hooks of its own" in quick.step

    stock, quick = with_patience(package, 2)
    with patch.object(OneLaunch, "end", side_effect=torch.cuda.OutOfMemoryError):
        for atoms in walk(imidazole(), frames=4, width=0.04):
            assert_agree(package, quick, stock, atoms)
    assert quick.step.endswith("not one launch each, because the device has no memory for it")
    given = quick_calculator(package, capture=True)
    failing = patch.object(OneLaunch, "end", side_effect=torch.cuda.OutOfMemoryError)
    with failing, pytest.raises(torch.cuda.OutOfMemoryError):
        results_of(given, imidazole())


@of_all
@ways
def test_a_cell_that_changes_is_followed(package: str, captured: bool) -> None:
    """It shrinks by a fifth, then doubles; atoms move with it or stay."""
    stock, quick = pair(package, captured)
    atoms = slanted()
    for factor in (0.99, 0.95, 0.85, 1.0, 2.0, 2.0, 0.5):
        atoms.set_cell(atoms.cell * factor, scale_atoms=factor < 1)
        assert_agree(package, quick, stock, atoms)
    strained = np.eye(3) + 0.05 * np.random.default_rng(1).normal(size=(3, 3))
    atoms.set_cell(atoms.cell @ strained, scale_atoms=True)
    assert_agree(package, quick, stock, atoms)


@of_all
@ways
def test_other_atoms_are_never_served_stale(package: str, captured: bool) -> None:
    stock, quick = pair(package, captured)
    first = imidazole()
    swapped, fewer, open_box = first.copy(), first[:6], first.copy()
    swapped.numbers = swapped.numbers[::-1].copy()
    open_box.set_cell([5.0, 5.5, 6.0])  # whose images are neighbours
    closed = open_box.copy()
    open_box.pbc = [False, True, False]
    for atoms in (first, swapped, fewer, first, closed, open_box, closed):
        assert_agree(package, quick, stock, atoms)


@of_all
@ways
def test_a_gas_has_no_edges_at_times(package: str, captured: bool) -> None:
    stock, quick = pair(package, captured)
    atoms = Atoms("CH", [[0, 0, 0], [0, 0, 2.0]], cell=[30.0] * 3, pbc=True)
    for distance in (2.0, 3.9, 4.1, 9.0, 3.0):
        atoms.positions[1, 2] = distance
        assert_agree(package, quick, stock, atoms)


@of_all
@ways
def test_a_failed_step_leaves_nothing_behind(package: str, captured: bool) -> None:
    stock, quick = pair(package, captured)
    atoms = imidazole()
    assert_agree(package, quick, stock, atoms)
    lost, unknown = atoms.copy(), atoms.copy()
    lost.positions[4, 1] = np.nan
    with pytest.raises(InputError, match="a coordinate of atom 4 is not finite"):
        results_of(quick, lost)
    unknown.numbers[2] = 79
    with pytest.raises(Exception):  # noqa: B017 - each package has its own
        results_of(quick, unknown)
    atoms.positions[0, 0] += 0.1
    assert_agree(package, quick, stock, atoms)


@of_all
def test_accelerate_makes_a_stock_calculator_quick(package: str) -> None:
    stock, quick = stock_calculator(package), stock_calculator(package)
    kind = type(quick)
    acceleration = accelerate(quick)
    assert acceleration.step == quick.step == "inputs kept on cpu, neighbors there"
    assert "\nsteps     inputs kept on cpu" in str(acceleration)
    assert isinstance(quick, kind) and type(quick) is not kind
    assert_agree(package, quick, stock, imidazole())
    for copied in (copy.deepcopy(quick), pickle.loads(pickle.dumps(quick))):
        assert_agree(package, copied, stock, slanted())
    restore(quick)
    assert type(quick) is kind and not hasattr(quick, "_kept")
    assert_agree(package, quick, stock, imidazole())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@of_all
def test_a_gpu_that_is_not_there_is_an_error_with_advice(package: str, tmp_path: Path) -> None:
    with pytest.raises(ToolMissingError, match="a CUDA device was asked for, but torch sees none; .* or use cpu"):
        quick_calculator(package, device="cuda")
    if package != "mace":
        return
    from autotune.models.mace.use import compile_for_lammps

    with pytest.raises(ToolMissingError, match="a CUDA device was asked for, but torch sees none; .* or use cpu"):
        compile_for_lammps(model_for("mace"), tmp_path / "model.pt2", device="cuda")


@of_all
@ways
def test_restore_makes_equitunes_calculator_its_packages(package: str, captured: bool) -> None:
    stock, quick = pair(package, captured)
    results_of(quick, imidazole())
    assert restore(quick) > 0 and type(quick) is type(stock)
    assert not {"step", "acceleration", "captures", "_kept"} & set(vars(quick))
    assert type(captured_model_of(quick)) is type(captured_model_of(stock))
    assert_agree(package, quick, stock, slanted())


@of_all
def test_a_sum_of_calculators_is_taken_apart(package: str) -> None:
    stock, inner = stock_calculator(package), stock_calculator(package)
    both = SumCalculator([inner, LennardJones(epsilon=0.01, sigma=1.0, rc=3.0)])
    plain = SumCalculator([stock, LennardJones(epsilon=0.01, sigma=1.0, rc=3.0)])
    assert accelerate(both).replaced > 0 and inner.step
    found, wanted = forces_of(both, imidazole()), forces_of(plain, imidazole())
    assert np.abs(found - wanted).max() <= TOLERANCE[package] * max(1.0, np.abs(wanted).max())


def forces_of(calculator: Any, atoms: Atoms) -> np.ndarray:
    atoms.calc = calculator
    return atoms.get_forces()


@of_all
def test_without_a_neighbor_search_steps_are_stocks(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(neighbors.SEARCHES, "cpu", ("no_such_module", "no-such-package"))
    with caplog.at_level(logging.INFO, logger="equitune"):
        stock, quick = calculators(package)
        for atoms in walk(imidazole(), frames=3, width=0.1):
            assert_agree(package, quick, stock, atoms)
    assert quick.step == "the package's own, because no-such-package is not installed: pip install no-such-package"
    assert said_of_steps(caplog) == [f"{type(quick).__name__}: steps with {quick.step}"]
    assert quick._kept is None


@of_all
def test_captured_models_take_kept_inputs(package: str) -> None:
    stock, quick = stock_calculator(package), quick_calculator(package, capture=True)
    how = "inputs kept on cpu, neighbors there, padded, not one launch each, because a CPU has no graphs"
    assert quick.step == quick.acceleration.step == how
    for atoms in walk(slanted(), frames=6, width=0.04):
        assert_agree(package, quick, stock, atoms)
    model = captured_model_of(quick)
    assert (model.replays, model.eager_calls, quick.kept_inputs().makes) == (6, 0, 1)


@needs("mace")
def test_a_mace_committee_and_its_other_results() -> None:
    from mace.calculators import MACECalculator as Stock

    from autotune.models.mace.use import MACECalculator

    models = [model_for("mace"), model_for("mace")]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.05)
    stock = Stock(models=copy.deepcopy(models))
    quick = MACECalculator(models=copy.deepcopy(models))
    for atoms in walk(imidazole(), frames=3, width=0.05):
        assert_agree("mace", quick, stock, atoms)
    assert {"energy_var", "forces_comm", "stress_var"} <= set(quick.results)
    for function in ("get_descriptors", "get_hessian"):
        found, wanted = (getattr(calculator, function)(imidazole()) for calculator in (quick, stock))
        for a, b in zip(found, wanted, strict=True):
            assert np.abs(a - b).max() <= 1e-10 * np.abs(b).max()


@needs("mace")
def test_maces_stress_of_atoms_units_and_padding() -> None:
    stock, quick = calculators("mace", compute_atomic_stresses=True)
    assert_agree("mace", quick, stock, slanted())
    assert "stresses" in quick.results and quick.kept_inputs().makes == 1
    units = {"energy_units_to_eV": 2.0, "length_units_to_A": 0.5}
    assert_agree("mace", quick_calculator("mace", **units), stock_calculator("mace", **units), slanted())
    padded = quick_calculator("mace", pad_num_atoms=20, pad_num_edges=2000)
    assert_agree("mace", padded, stock_calculator("mace"), imidazole())
    assert padded.step == "the package's own, because pad_num_atoms or pad_num_edges is given"


@needs("nequip")
def test_other_transforms_of_nequips_are_followed() -> None:
    """A list sorted for OpenEquivariance, and cutoffs for pairs of species."""
    from nequip.data.transforms import (
        ChemicalSpeciesToAtomTypeMapper,
        NeighborListTransform,
        SortedNeighborListTransform,
    )

    mapper = ChemicalSpeciesToAtomTypeMapper(["C", "H", "N"])
    cutoffs = {"per_edge_type_cutoff": {"H": 2.0, "C": {"H": 3.0}}, "type_names": ["C", "H", "N"]}
    for transform, kept in ((SortedNeighborListTransform(4.0), False), (NeighborListTransform(4.0, **cutoffs), True)):
        transforms = [mapper, transform]
        quick = quick_calculator("nequip", transforms=copy.deepcopy(transforms))
        stock = stock_calculator("nequip", transforms=transforms)
        for atoms in walk(imidazole(), frames=3, width=0.05):
            assert_agree("nequip", quick, stock, atoms)
        assert (quick._kept is not None) == kept, quick.step


@of_all
def test_edges_that_outgrow_a_launch_are_repaired_in_the_same_step(package: str) -> None:
    """A crystal is compressed: the same candidates, and twice as many edges."""
    stock, quick = pair(package, captured=True)
    crystal = bulk("C", "diamond", a=3.9, cubic=True)
    model = captured_model_of(quick)
    for factor, captures in ((1.0, 1), (0.82, 2), (1.0, 2), (0.82, 2)):
        atoms = crystal.copy()
        atoms.set_cell(crystal.cell * factor, scale_atoms=True)
        assert_agree(package, quick, stock, atoms)
        assert (model.captures, quick.kept_inputs().searches) == (captures, 1)
    assert model.replays == 4


@of_all
def test_a_gas_that_condenses_is_captured_at_two_sizes(package: str) -> None:
    stock, quick = pair(package, captured=True)
    dilute = imidazole()
    dilute.set_cell(dilute.cell * 3, scale_atoms=True)
    for atoms in (dilute, imidazole(), dilute, imidazole()):
        assert_agree(package, quick, stock, atoms)
    model = captured_model_of(quick)
    assert (model.captures, model.replays, quick.kept_inputs().makes) == (2, 4, 1)


@of_all
def test_a_model_that_changes_between_launches_is_followed(package: str) -> None:
    """Values written in place, other memory, another mode of torch's."""
    stock, quick = pair(package, captured=True)
    atoms = imidazole()
    assert_agree(package, quick, stock, atoms)
    inner = captured_model_of(quick).model
    before = results_of(quick, atoms)["energy"]

    def change(double: Any) -> None:
        """Weights of both models, in the layout of each: a factor that all of them get."""
        for model in (inner, captured_stock):
            for parameter in model.parameters():
                double(parameter)

    captured_stock = getattr(stock, "models", None)
    captured_stock = captured_stock[0] if captured_stock else stock.model
    with torch.no_grad():
        change(lambda parameter: parameter.mul_(1.02))
    results_of(quick, imidazole())
    assert_agree(package, quick, stock, slanted())
    with torch.no_grad():
        change(lambda parameter: setattr(parameter, "data", parameter.data * 1.02))
    assert_agree(package, quick, stock, imidazole())
    assert results_of(quick, atoms)["energy"] != before
    torch.use_deterministic_algorithms(True)
    try:
        assert_agree(package, quick, stock, imidazole())
    finally:
        torch.use_deterministic_algorithms(False)
    assert captured_model_of(quick).captures == 3
