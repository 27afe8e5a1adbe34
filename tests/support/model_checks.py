"""What a model with Equitune inside goes through, the same for every package's ``Case``: each function is a test."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ase import Atoms
from emulated_radial import EmulatedKernel, emulate_modules
from fixed_kernels import take_few_edges, watched_launches
from model_cases import Case, accelerated, assert_same, fused, imidazole, stand_ins
from places import ROOT, SUPPORT
from torch.optim import swa_utils

from autotune.models import linear, species
from autotune.models.accelerate import accelerate, restore
from autotune.models.package import default_dtype
from autotune.modules import convolution
from kernelgen.ops import node_kernels


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
    for option in ({"memory": "low"}, {}, {"edge_weights": "fused"}):
        assert accelerate(model, **option).note == ""
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


def check_tf32(case: Case, device: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Values, and the gradient of each parameter on its own, have errors of the class that was asked for; on a CPU by
    emulated kernels. Errors far above float32's show that it is in use.
    """
    atoms = imidazole()
    exact, model = (case.build(atoms, dtype, **more) for dtype in (torch.float64, torch.float32))
    model.load_state_dict(exact.state_dict())
    wanted = case.results(exact, case.batch(exact, atoms))
    model.to(device)
    take_few_edges(monkeypatch, device)
    if device == "cpu":
        monkeypatch.setattr(node_kernels, "takes", lambda features, in_tf32: in_tf32)
    for module in (linear, species):
        monkeypatch.setattr(module, "LEAST_IN_TF32", 1)  # these models are small
    errors = {}
    for precision in ("float32", "tf32"):
        done, given = accelerate(model, precision=precision), case.batch(model, atoms).items()
        batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given}
        found = case.results(model, batch)
        assert list(found) == list(wanted)
        errors[precision] = {
            name: float((found[name].cpu().double() - value).abs().max() / value.abs().max())
            for name, value in wanted.items()
            if float(value.abs().max()) > 0
        }
        said = "tf32 in " if device == "cuda" else "tf32 means nothing"
        assert (said in done.line) is (precision == "tf32") and restore(model) > 0
    assert max(errors["float32"].values()) < 2e-5, errors["float32"]
    for name, error in errors["tf32"].items():
        most = 3e-2 if name not in ("energy", "forces", "stress") else 5e-3
        assert 1e-5 < error < most and error > 10 * errors["float32"][name], (name, error, errors["float32"][name])


def check_network_in_one_kernel(case: Case, convolutions: int, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Hidden layers of radial networks in one kernel, on a CPU emulated; energies and forces."""
    atoms = imidazole()
    exact, model = (case.build(atoms, dtype, **more) for dtype in (torch.float64, torch.float32))
    model.load_state_dict(exact.state_dict())
    wanted = case.predict(exact, case.batch(exact, atoms))
    take_few_edges(monkeypatch, "cpu")
    launches = watched_launches(monkeypatch)
    model.requires_grad_(False).eval()
    for edge_network, count in (("fused", convolutions), ("layers", 0)):
        accelerate(model, edge_network=edge_network, check=False)
        launches.clear()
        found = case.predict(model, case.batch(model, atoms))
        assert launches.count("edge_network_value") == count
        assert launches.count("edge_network_gradient") == count
        assert_same({name: value.detach().double() for name, value in found.items()}, wanted, 2e-5)
        check_no_number_is_read([part for part in model.modules() if part.__dict__.get("in_one_kernel")], monkeypatch)
        restore(model)
        assert not any("in_one_kernel" in part.__dict__ for part in model.modules())


def check_no_number_is_read(networks: list[torch.nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """A radial network does not wait for a number on the device: a captured step may not."""
    given: list[torch.Tensor] = []

    def read(tensor: torch.Tensor) -> float:
        given.append(tensor)
        return 1.0

    with monkeypatch.context() as patch:
        for name in ("__float__", "item"):
            patch.setattr(torch.Tensor, name, read)
        for network in networks:
            network(torch.ones(20, next(network.parameters()).shape[0]))
    assert not given


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
