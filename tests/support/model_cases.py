"""What the tests of Equitune inside a package's models share: structures, comparisons, and what a model goes through.

A ``Case`` says how a package builds and runs a model; the functions below it put the same questions to every package.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import ase.io
import pytest
import torch
from ase import Atoms
from emulated_radial import EmulatedKernel, emulate_modules
from places import ROOT, SUPPORT
from torch.optim import swa_utils

from autotune import accelerate, restore
from autotune.integrations.stand_ins import AcceleratedConvolution, StandIn
from autotune.models.atoms import find_atoms
from autotune.models.packages.base import default_dtype
from autotune.modules.radial import convolution

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
        """``energy``, ``forces`` and ``stress``, differentiable."""

    def results(self, model: Any, batch: dict[str, Any]) -> Results:
        """Those, and the gradient of a loss on all three by every parameter."""
        found = self.predict(model, batch)
        found |= gradients(loss_of(found), model)
        return {name: value.detach() for name, value in found.items()}


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


def check_values(case: Case, atoms: Atoms, dtype: torch.dtype, convolutions: int, **more: Any) -> None:
    """Equal to stock within the tolerance; the stock model again after ``restore``."""
    stock = case.build(atoms, dtype, **more)
    batch = case.batch(stock, atoms)
    model = accelerated(stock, convolutions)
    wanted = case.results(stock, batch)
    assert_same(case.results(model, batch), wanted)
    assert restore(model) > 0
    assert stand_ins(model) == 0
    assert repr(model) == repr(stock)
    assert_same(case.results(model, batch), wanted)


def check_checkpoints(case: Case, convolutions: int) -> None:
    """State dictionaries have the same names and load both ways; parameters stay the same objects."""
    atoms = imidazole()
    stock, other = case.build(atoms), case.build(atoms)
    batch = case.batch(stock, atoms)
    before = dict(other.named_parameters())
    accelerate(other)
    assert fused(other) == convolutions
    assert list(other.state_dict()) == list(stock.state_dict())
    assert all(parameter is before[name] for name, parameter in other.named_parameters())
    _disturb(stock)
    other.load_state_dict(stock.state_dict())
    assert_same(case.results(other, batch), case.results(stock, batch))
    _disturb(other)
    stock.load_state_dict(other.state_dict())
    assert_same(case.results(stock, batch), case.results(other, batch))


def _disturb(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.rand(parameter.shape, generator=generator).to(parameter)


def check_copies(case: Case, convolutions: int, folder: Path) -> None:
    """deepcopy, pickle and torch.save keep Equitune in place; a second call of ``accelerate`` changes nothing."""
    atoms = imidazole()
    model = case.build(atoms)
    batch = case.batch(model, atoms)
    accelerate(model)
    wanted, places = case.results(model, batch), stand_ins(model)
    assert accelerate(model).places == ()
    path = folder / "model.pt"
    torch.save(model, path)
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(path, weights_only=False))
    for found in copies:
        assert fused(found) == convolutions
        assert stand_ins(found) == places
        assert_same(case.results(found, batch), wanted)
        assert restore(found) == places
        assert stand_ins(found) == 0


def check_a_fresh_process(case: Case, module: str, folder: Path) -> None:
    """A process that loads a saved model computes the same; ``module``: where it finds ``CASE``."""
    atoms = imidazole()
    model = case.build(atoms)
    batch = case.batch(model, atoms)
    accelerate(model)
    found = {name: value.detach() for name, value in case.predict(model, batch).items()}
    path = folder / "model.pt"
    torch.save({"model": model, "batch": batch, "found": found}, path)
    program = (
        f"import torch; import {module} as cases; from model_cases import assert_same, fused\n"
        f"saved = torch.load({str(path)!r}, weights_only=False)\n"
        "found = cases.CASE.predict(saved['model'], saved['batch'])\n"
        "assert_same({name: value.detach() for name, value in found.items()}, saved['found'])\n"
        "print(fused(saved['model']))"
    )
    paths = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(SUPPORT)!r}]\n"
    done = subprocess.run([sys.executable, "-c", paths + program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) == fused(model) > 0


def check_streamed(case: Case, convolutions: int, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Every convolution forms its edges' weights part by part, of a few edges; copies and files do too."""
    monkeypatch.setattr(convolution, "PART_BYTES", {"cpu": 4096})
    atoms = imidazole().repeat((2, 1, 1))
    stock = case.build(atoms, **more)
    batch, model = case.batch(stock, atoms), copy.deepcopy(stock)
    wanted = case.results(stock, batch)
    for option in ("streamed", "auto", "fused"):
        assert accelerate(model, edge_weights=option).note == ""
        for found in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            streaming = [part for part in found.modules() if "radial" in part.__dict__]
            assert len(streaming) == convolutions
            assert all(part.__dict__["radial"] in list(found.modules()) for part in streaming)
            assert_same(case.results(found, batch), wanted)
        assert list(model.state_dict()) == list(stock.state_dict())
        restore(model)
        assert repr(model) == repr(stock)
        assert not any(type(part).__module__.startswith("autotune") for part in model.modules())
        assert_same(case.results(model, batch), wanted)


def check_fused(case: Case, convolutions: int, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Convolutions form their edges' weights in kernels' registers, here emulated; gradients of parameters stream."""
    atoms = imidazole()
    exact, model = (case.build(atoms, dtype, **more) for dtype in (torch.float64, torch.float32))
    model.load_state_dict(exact.state_dict())
    wanted = case.results(exact, case.batch(exact, atoms))
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    emulate_modules(monkeypatch)
    for product, tolerance in (("float32", 2e-5), ("tf32", 1e-2)):
        assert accelerate(model, edge_weights="fused", edge_product=product, check=False).note == ""
        EmulatedKernel.ran.clear()
        found = case.results(model, case.batch(model, atoms))
        assert sum(direction == "forward:->g" for direction in EmulatedKernel.ran) == convolutions
        assert_same({name: value.double() for name, value in found.items()}, wanted, tolerance)
        EmulatedKernel.ran.clear()
        forces = case.predict(model.requires_grad_(False), case.batch(model, atoms))["forces"].detach()
        assert sum("backward" in direction for direction in EmulatedKernel.ran) == convolutions
        assert_same({"forces": forces.double()}, {"forces": wanted["forces"]}, tolerance)
        restore(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])


def check_fused_on_a_gpu(case: Case, **more: Any) -> None:
    """The same with the kernels themselves."""
    atoms = imidazole()
    exact, model = (case.build(atoms, dtype, **more) for dtype in (torch.float64, torch.float32))
    model.load_state_dict(exact.state_dict())
    wanted = case.results(exact, case.batch(exact, atoms))
    model.cuda()
    given = case.batch(model, atoms).items()
    batch = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in given}
    for product, tolerance in (("float32", 2e-5), ("tf32", 1e-2)):
        assert accelerate(model, edge_weights="fused", edge_product=product).note == ""
        for found in (case.results(model, batch), case.predict(model, batch)):
            values = {name: value.detach().cpu().double() for name, value in found.items()}
            assert_same(values, {name: wanted[name] for name in values}, tolerance)
        restore(model)


def check_conversions(case: Case) -> None:
    """``.double()`` and ``.float()`` of an accelerated model equal those of the stock one."""
    atoms = imidazole()
    stock = case.build(atoms, torch.float32)
    model = copy.deepcopy(stock)
    accelerate(model)
    with default_dtype(torch.float64):
        stock.double()
        model.double()
        batch = case.batch(stock, atoms)
        # e3nn's constants were rounded to float32 when the stock model was built; Equitune's were not.
        wanted, found = case.results(stock, batch), case.results(model, batch)
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name
    stock.float()
    model.float()
    batch = case.batch(stock, atoms)
    assert_same(case.results(model, batch), case.results(stock, batch))


def check_training(case: Case) -> None:
    """Steps of Adam with an average of weights, ``eval`` in between, a restore half way: all as in the stock model."""
    atoms = imidazole()
    stock = case.build(atoms)
    model = copy.deepcopy(stock)
    batch = case.batch(stock, atoms)
    losses = {}
    for name, trained in (("stock", stock), ("equitune", model)):
        optimizer = torch.optim.Adam(trained.parameters(), lr=1e-3)
        if trained is model:
            accelerate(trained)
        average = swa_utils.AveragedModel(trained, multi_avg_fn=swa_utils.get_ema_multi_avg_fn())
        losses[name] = []
        target = {key: 0.9 * value.detach() for key, value in case.predict(trained, batch).items()}
        for step in range(4):
            if trained is model and step == 2:
                restore(trained)
                accelerate(trained)
            found = case.predict(trained.train(), batch)
            loss = sum(((found[key] - value).square().sum() for key, value in target.items()), torch.tensor(0.0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(trained)
            evaluated = case.predict(trained.eval(), batch)["energy"]
            averaged = case.predict(average.module.eval(), batch)["energy"]
            losses[name] += [float(loss.detach()), float(evaluated.sum().detach()), float(averaged.sum().detach())]
    assert losses["equitune"] == pytest.approx(losses["stock"], rel=1e-8)
    assert losses["stock"][0] > losses["stock"][-3]
