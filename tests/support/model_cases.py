"""What the tests of Equitune inside a package's models share: structures, and comparisons with the stock model.

A ``Case`` says how a package builds and runs a model; ``case_of`` gives a package's.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from abc import ABC, abstractmethod
from typing import Any

import ase.io
import pytest
import torch
from ase import Atoms
from places import ROOT

from autotune.models.accelerate import accelerate
from autotune.models.stand_ins import AcceleratedConvolution, StandIn
from autotune.models.whole_model import find_atoms

# The largest relative difference that the tests allow.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
CUTOFF = 4.0
DTYPES = (torch.float64, torch.float32)
PROTEIN = ROOT / "autotune" / "models" / "structures" / "dhfr_1u72_1502.xyz.gz"

Results = dict[str, torch.Tensor]


def imidazole() -> Atoms:
    """Nine atoms in a box that is larger than they need, so that the stress is defined."""
    positions = [
        *((-0.4792, -1.1308, 0.0004), (1.2288, 0.1708, -0.0003), (0.1325, 0.9984, 0.0001), (-0.9578, 0.1517, 0.0011)),
        *((0.8389, -1.1519, 0.0), (-1.9303, 0.4319, -0.0003), (-1.132, -1.9944, -0.0001), (2.274, 0.4509, -0.0006)),
        (0.0251, 2.0735, -0.0006),
    ]
    return Atoms("C3N2H4", positions, cell=[12.0] * 3, pbc=True)


def two_molecules() -> Atoms:
    """Two of them beside each other."""
    one, other = imidazole(), imidazole()
    other.translate((3.0, 0.3, 0.2))
    return one + other


def mof() -> Atoms:
    """The metal-organic framework of ``configs/graphs.toml``, displaced, because its forces would be zero."""
    return find_atoms("mof")


def protein() -> Atoms:
    """A protein without its water, in a box, so that the stress is defined."""
    if not PROTEIN.is_file():
        pytest.skip(f"{PROTEIN.name} is not there")
    atoms = ase.io.read(PROTEIN)
    assert isinstance(atoms, Atoms)
    atoms.center(vacuum=CUTOFF)
    atoms.pbc = True
    return atoms


def symbols_in(atoms: Atoms) -> list[str]:
    return sorted(set(atoms.get_chemical_symbols()))


class Case(ABC):
    """How the models of one package are built and run."""

    @abstractmethod
    def build(self, atoms: Atoms, dtype: torch.dtype = torch.float64, **more: Any) -> torch.nn.Module:
        """A small model with random weights, the same at every call; ``more`` are the package's own options."""

    @abstractmethod
    def batch(self, model: Any, *structures: Atoms) -> dict[str, Any]:
        """What the model takes, in its dtype."""

    @abstractmethod
    def predict(self, model: Any, batch: dict[str, Any]) -> Results:
        """``energy``, ``forces`` and ``stress``, differentiable; of MACE all that it gives."""

    def results(self, model: Any, batch: dict[str, Any]) -> Results:
        """Those, and the gradient of a loss on all three by every parameter."""
        found = self.predict(model, batch)
        found |= gradients(loss_of(found), model)
        return {name: value.detach() for name, value in found.items()}


# By package the module that is there where it is installed. Where it is not, what imports it cannot be imported.
MODULES = {"mace": "mace", "nequip": "nequip", "allegro": "allegro", "sevennet": "sevenn"}
# Options of models that are as small as a test of their parts allows.
SMALL: dict[str, dict[str, Any]] = {
    "mace": {},
    "nequip": {"num_layers": 2},
    "allegro": {},
    "sevennet": {"num_convolution_layer": 2, "irreps_manual": ["8x0e", "8x0e+4x1e", "8x0e"], "lmax": 1},
}


def case_of(package: str) -> Case:
    """The case of ``mace_cases`` and its like."""
    return importlib.import_module(f"{package}_cases").CASE


def small_model(package: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """For the elements of :func:`imidazole`."""
    return case_of(package).build(imidazole(), dtype, **SMALL[package])


def needs(package: str) -> pytest.MarkDecorator:
    """The mark of a test's parameter: skipped where the package is not installed."""
    is_missing = importlib.util.find_spec(MODULES[package]) is None
    return pytest.mark.skipif(is_missing, reason=f"{package} is not installed")


def loss_of(found: Results) -> torch.Tensor:
    """Parts of one size, so that an error in one is no smaller part of the gradients than in another."""
    return sum(((value / value.detach().abs().max()).square().sum() for value in found.values()), torch.tensor(0.0))


def gradients(loss: torch.Tensor, model: torch.nn.Module) -> Results:
    """By parameter's name; those that the loss does not depend on are left out."""
    given = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(given, found, strict=True) if gradient is not None}


def assert_same(found: Results, wanted: Results, tolerance: float | None = None, zeros: bool = False) -> None:
    """Every result within the tolerance, relative to its largest element; ``zeros``, where allowed, to that of all."""
    assert list(found) == list(wanted)
    largest = max(float(value.abs().max()) for value in wanted.values())
    for name, value in wanted.items():
        size = float(value.abs().max())
        assert size > 0 or zeros, f"{name} is zero, which shows nothing"
        error = float((found[name] - value).abs().max()) / (size or largest)
        assert error <= (tolerance or TOLERANCE[value.dtype]), f"{name} differs by {error:.1e}"


def accelerated(stock: torch.nn.Module, convolutions: int) -> torch.nn.Module:
    """A copy with Equitune at every place, and so many fused convolutions."""
    model = copy.deepcopy(stock)
    table = accelerate(model)
    kept = [place for place in table.places if not place.replaced]
    assert not kept, str(table)
    assert fused(model) == convolutions, str(table)
    layouts = {module.layout for module in model.modules() if isinstance(module, AcceleratedConvolution)}
    assert layouts == ({"ir_mul"} if convolutions else set()) and table.note == "", str(table)
    return model


def fused(model: torch.nn.Module) -> int:
    """Number of convolutions of Equitune in a model."""
    return sum(isinstance(module, AcceleratedConvolution) for module in model.modules())


def stand_ins(model: torch.nn.Module) -> int:
    return sum(isinstance(module, StandIn) for module in model.modules())
