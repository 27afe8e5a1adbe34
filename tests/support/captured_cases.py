"""What the tests of captured models share: structures, packages, and what is asked in more than one file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from model_cases import CUTOFF, Results, case_of, imidazole, small_model, symbols_in
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.models.accelerate import accelerate
from autotune.models.capture import CapturedModel, capture
from autotune.models.padding import PaddedStep

# Parameters of a test that runs on the GPU too, where there is one.
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# The padded sums are the same, of the same numbers; a matrix product may add in another order.
TOLERANCE = 1e-12


def in_a_box() -> Atoms:
    """72 atoms whose images are neighbours, displaced."""
    atoms = imidazole()
    atoms.set_cell([5.0, 5.5, 6.0])
    atoms = atoms.repeat(2)
    atoms.rattle(0.05, seed=1)
    return atoms


def slanted() -> Atoms:
    """A cell without right angles, periodic in two directions."""
    atoms = imidazole()
    atoms.set_cell([[6.0, 0.0, 0.0], [2.0, 5.5, 0.0], [0.5, 1.0, 9.0]])
    atoms.set_pbc([True, True, False])
    return atoms


def steps_of_size() -> list[list[Atoms]]:
    """Batches that grow and shrink, in periodic cells, one with all elements and one with an atom without edges."""
    atoms = imidazole()
    lonely = atoms.copy()
    lonely.positions[0] += [4.5, 0.0, 4.5]
    return [[atoms], [in_a_box()], [atoms[:5]], [slanted()], [lonely], [atoms, slanted(), atoms[:4]], [atoms]]


def assert_close(found: Results, wanted: Results, tolerance: float = TOLERANCE) -> None:
    assert set(wanted) <= set(found)
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        assert torch.isfinite(found[name]).all(), name
        error = float((found[name] - value).abs().max()) / max(float(value.abs().max()), 1e-30)
        assert error <= tolerance, f"{name} differs by {error:.1e}"


# Calculators: a captured one, a stock one, and the captured models.
Calculators = tuple[Any, Any, list[CapturedModel]]


def mace_calculators(device: str = "cpu") -> Calculators:
    from mace.calculators import MACECalculator as Stock

    from autotune.models.mace.use import MACECalculator

    stock, fast = (small_model("mace").to(device) for _ in range(2))
    captured = MACECalculator(models=fast, device=device, capture=True)
    assert captured.acceleration.replaced > 0
    return captured, Stock(models=stock, device=device), captured.models


def nequip_calculators(name: str) -> Calculators:
    from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
    from nequip.integrations.ase import NequIPCalculator

    steps = [ChemicalSpeciesToAtomTypeMapper(symbols_in(imidazole())), NeighborListTransform(r_max=CUTOFF)]
    fast, stock = (NequIPCalculator(small_model(name).eval(), "cpu", transforms=steps) for _ in range(2))
    assert accelerate(fast).replaced > 0
    fast.model = capture(fast.model)
    return fast, stock, [fast.model]


def sevennet_calculators() -> Calculators:
    from sevenn.calculator import SevenNetCalculator as Stock

    from autotune.models.sevennet.use import SevenNetCalculator

    model = small_model("sevennet", torch.float32)
    stock = Stock(copy.deepcopy(model), file_type="model_instance", device="cpu")
    captured = SevenNetCalculator(model, file_type="model_instance", device="cpu", capture=True)
    assert captured.acceleration.replaced > 0
    return captured, stock, [captured.model]


@dataclass(frozen=True)
class Package:
    """How a package's small models are made, fed and called, and what the tests need to know of them.

    calculators: of a model in ``dtype``, whose dynamics are compared for some steps. options: of a call that gives the
    stress. optional: an input that may have too few rows. dictionaries: of a model, a module that gives the model's
    results in a dictionary; None where none does.
    """

    name: str
    calculators: Callable[[], Calculators]
    steps: int = 50
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    optional: str = ""
    dictionaries: Any = None

    def model(self, dtype: torch.dtype = torch.float64) -> Any:
        """With Equitune inside."""
        model = small_model(self.name, dtype).eval()
        accelerate(model)
        return model

    def inputs(self, model: Any, *structures: Atoms) -> dict[str, Any]:
        """What a model takes, on its device."""
        device = next(model.parameters()).device
        batch = case_of(self.name).batch(model, *structures)
        return {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}

    def call(self, model: Any, batch: dict[str, Any], **options: Any) -> Results:
        """Its results, detached. A model may write into its dictionary, here into a copy."""
        given = {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}
        found = case_of(self.name).predict(model, given, **options)
        return {name: value.detach() for name, value in found.items()}

    def predict(self, model: Any, *structures: Atoms, **options: Any) -> Results:
        return self.call(model, self.inputs(model, *structures), **options)


def _nequips(name: str) -> Package:
    return Package(name, partial(nequip_calculators, name), optional="cell", dictionaries=lambda model: model.model)


_SEVENNET = Package(
    "sevennet", sevennet_calculators, dtype=torch.float32, optional="x", dictionaries=lambda model: model[-3]
)
PACKAGES = {
    "mace": Package("mace", mace_calculators, steps=60, options={"compute_stress": True}),
    "nequip": _nequips("nequip"),
    "allegro": _nequips("allegro"),
    "sevennet": _SEVENNET,
}


class _NoNumbers(TorchDispatchMode):
    """No number of a tensor comes to the host: on a GPU that ends a capture."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero"), f"{name} waits for the device"
        return function(*args, **kwargs or {})


@contextmanager
def nothing_waits() -> Iterator[None]:
    """A step of captured size, which a CPU computes in each call, would wait for no GPU.

    torch's ``one_hot`` looks at its indices on a CPU alone.
    """
    computed = PaddedStep._computed

    def watched(step: PaddedStep) -> dict[str, Any]:
        with _NoNumbers():
            return computed(step)

    def one_hot(numbers: torch.Tensor, classes: int) -> torch.Tensor:
        return (numbers[..., None] == torch.arange(classes, device=numbers.device)).long()

    with patch.object(PaddedStep, "_computed", watched), patch.object(torch.nn.functional, "one_hot", one_hot):
        yield


def check_padded_equals_unpadded(package: Package, model: torch.nn.Module, batches: list[list[Atoms]]) -> None:
    captured = capture(model)
    for batch in batches:
        with nothing_waits():
            found = package.predict(captured, *batch)
        assert_close(found, package.predict(model, *batch))
    assert captured.replays == len(batches) and captured.eager_calls == 0
    assert 1 < captured.captures <= len(batches)


def check_dynamics(calculators: Calculators, steps: int, tolerance: float) -> None:
    """The same trajectory by two calculators; edges come and go."""
    captured, stock, models = calculators
    frames = []
    for calculator in (captured, stock):
        atoms = imidazole()
        atoms.calc = calculator
        MaxwellBoltzmannDistribution(atoms, temperature_K=2000, rng=np.random.default_rng(0))
        dynamics, found = VelocityVerlet(atoms, 1.0 * units.fs), []
        for _ in range(steps):
            dynamics.run(1)
            found.append((atoms.positions.copy(), np.array([atoms.get_potential_energy()]), atoms.get_stress()))
        frames.append(found)
    for one, other in zip(*frames, strict=True):
        for a, b in zip(one, other, strict=True):
            assert np.isfinite(a).all()
            assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-6)
    for model in models:
        assert model.replays == steps + 1 and model.eager_calls == 0
        assert model.captures <= 3, "steps of size serve many steps of dynamics"
    assert captured.results.keys() >= stock.results.keys()
