"""MACE's calculator, its training command and its interface to LAMMPS, with Equitune in the model."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

import ase.io
from mace.calculators import MACECalculator as StockCalculator
from mace.calculators.lammps_mliap_mace import LAMMPS_MLIAP_MACE
from mace.tools.compile import prepare
from mace.tools.scripts_utils import extract_model
from mace_cases import REPLACED, assert_same, batch_of, default_dtype, gradients, imidazole, model_of, numbers_in
from places import ROOT
from reference import float64

from autotune.models.accelerate import accelerate, restore
from autotune.models.mace.use import MACECalculator
from autotune.models.stand_ins import StandIn


def replaced_in(model: torch.nn.Module) -> int:
    return sum(isinstance(module, StandIn) for module in model.modules())


def model(dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    return model_of(numbers_in(imidazole()), dtype=dtype, **more)


def predictions(calculator: Any) -> list[np.ndarray]:
    atoms = imidazole()
    atoms.calc = calculator
    return [np.asarray(atoms.get_potential_energy()), atoms.get_forces(), atoms.get_stress()]


def assert_equal(found: list[np.ndarray], wanted: list[np.ndarray], tolerance: float = 1e-10) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize("dtypes", [("float64", ""), ("float32", "float64"), ("float64", "float32")])
def test_the_calculator_takes_a_file_and_any_dtype(tmp_path: Path, dtypes: tuple[str, str]) -> None:
    stored, asked = dtypes
    torch.save(model(getattr(torch, stored)), tmp_path / "a.model")
    wanted = predictions(StockCalculator(model_paths=str(tmp_path / "a.model"), default_dtype=asked))
    fast = MACECalculator(model_paths=str(tmp_path / "a.model"), default_dtype=asked)
    assert replaced_in(fast.models[0]) == fast.acceleration.replaced == REPLACED
    assert_equal(predictions(fast), wanted, 1e-10 if (stored, asked) == ("float64", "") else 1e-5)


def test_a_committee_and_an_existing_calculator_are_accelerated() -> None:
    one, two = model(), model()
    with torch.no_grad():
        for parameter in two.parameters():
            parameter.mul_(1.1)
    plain = StockCalculator(models=copy.deepcopy([one, two]))
    wanted = [*predictions(plain), plain.results["energies"], plain.results["forces_comm"]]
    fast = MACECalculator(models=[one, two])
    assert_equal([*predictions(fast), fast.results["energies"], fast.results["forces_comm"]], wanted)
    assert accelerate(plain).replaced == 2 * REPLACED
    plain.reset()
    assert_equal([*predictions(plain), plain.results["energies"], plain.results["forces_comm"]], wanted)
    assert restore(plain) == 2 * REPLACED


def test_the_calculator_keeps_cuequivariances_other_parts() -> None:
    pytest.importorskip("cuequivariance_torch", reason="cuEquivariance is not installed")
    wanted = predictions(StockCalculator(models=model()))
    fast = MACECalculator(models=model(), enable_cueq=True)
    assert str(fast.acceleration).startswith("2 of 2 convolutions")
    assert type(fast.models[0].products[0].symmetric_contractions).__module__.startswith("cuequivariance_torch")
    assert_equal(predictions(fast), wanted)


def test_the_calculator_warns_if_no_convolution_is_equitunes() -> None:
    stock = model(num_interactions=1)
    stock.interactions[0].conv_tp.right = None  # it has a method of its own
    with pytest.warns(UserWarning, match="(?s)no convolution of the model is Equitune's: .*TensorProduct has a right"):
        calculator = MACECalculator(models=stock)
    assert str(calculator.acceleration).startswith("0 of 1 convolutions, 1 of 1 symmetric contractions")


SMALL: dict[str, Any] = {"num_interactions": 1, "max_ell": 1, "correlation": 1, "hidden": "2x0e+2x1o"}


@pytest.mark.slow
def test_a_compiled_model_agrees_with_stock() -> None:
    """MACE's own way: it rebuilds the model without TorchScript and compiles energies and forces at the first call."""
    with float64():  # MACE rebuilds the model in torch's default dtype
        wanted = predictions(StockCalculator(models=model(**SMALL)))[:2]
        fast = MACECalculator(models=model(**SMALL), compile_mode="default")
        assert replaced_in(fast.models[0]) == fast.acceleration.replaced == 12
        atoms = imidazole()
        atoms.calc = fast
        assert_equal([np.asarray(atoms.get_potential_energy()), atoms.get_forces()], wanted)


def test_a_compiled_training_step_gives_stocks_gradients() -> None:
    """By MACE's ``prepare``; the stock model that was not prepared fails under dynamo too."""
    stock = model(**SMALL)
    batch = batch_of(stock, imidazole())
    for name in ("positions", "node_attrs"):
        batch[name] = batch[name].detach().requires_grad_()
    wanted = step(stock, batch)
    with default_dtype(torch.float64):
        fast = prepare(extract_model)(model=stock, map_location="cpu")
    assert accelerate(fast).replaced == 12
    found = step(torch.compile(fast, backend="aot_eager", fullgraph=True), batch)
    assert_same({name.removeprefix("_orig_mod."): value for name, value in found.items()}, wanted)


def step(one: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = one(dict(batch), training=True, compute_force=True)
    loss = out["energy"].square().sum() + out["forces"].square().sum()
    return {"forces": out["forces"].detach(), **gradients(loss, one)}


class Exchange:
    """As LAMMPS gives them to ML-IAP: the first atoms are real, the others are images of real ones."""

    def __init__(self, atoms: Any, numbers: list[int], image_of: np.ndarray) -> None:
        every = np.concatenate([np.arange(len(atoms)), image_of])
        batch = batch_of(model(), atoms)
        sender, receiver = batch["edge_index"].numpy()
        vectors = atoms.positions[receiver] - atoms.positions[sender]
        # Half of the edges get their sender from the images.
        images = {real: len(atoms) + number for number, real in enumerate(image_of)}
        swapped = [images.get(int(one), one) if edge % 2 else one for edge, one in enumerate(sender)]
        self.elems = np.array([numbers.index(int(number)) for number in atoms.numbers[every]])
        self.pair_i, self.pair_j, self.rij = receiver, np.array(swapped), vectors
        self.nlocal, self.ntotal, self.npairs = len(atoms), len(every), len(receiver)
        self.image_of, self.eatoms, self.energy = torch.as_tensor(image_of), np.zeros(len(atoms)), 0.0

    def forward_exchange(self, features: torch.Tensor, out: torch.Tensor, _: int) -> None:
        out.copy_(features)
        out[self.nlocal :] = features[self.image_of]

    def reverse_exchange(self, gradient: torch.Tensor, out: torch.Tensor, _: int) -> None:
        out.copy_(gradient)
        out[self.nlocal :] = 0
        out.index_add_(0, self.image_of, gradient[self.nlocal :])

    def update_pair_forces_gpu(self, forces: torch.Tensor) -> None:
        self.forces = forces.detach().clone()


def test_the_interface_to_lammps_is_pickled_with_equitune_and_agrees_on_real_atoms(tmp_path: Path) -> None:
    atoms = imidazole()
    found = []
    for fast in (False, True):
        made = LAMMPS_MLIAP_MACE(model())
        if fast:
            assert accelerate(made).replaced == REPLACED
        torch.save(made, tmp_path / "mliap.pt")
        loaded = torch.load(tmp_path / "mliap.pt", weights_only=False)
        assert replaced_in(loaded.model) == (REPLACED if fast else 0)
        data = Exchange(atoms, numbers_in(atoms), np.arange(5))
        loaded.compute_forces(data)
        found.append([np.asarray(data.energy), data.eatoms, data.forces.numpy()])
    assert_equal(found[1], found[0])
    # The images change nothing: they are the real atoms.
    whole = predictions(StockCalculator(models=model()))
    assert abs(found[0][0] - whole[0]) <= 1e-10 * abs(whole[0])


TRAINING: dict[str, object] = {
    **{
        "name": "tiny",
        "r_max": 4.0,
        "hidden_irreps": "4x0e + 4x1o",
        "MLP_irreps": "4x0e",
        "max_ell": 2,
        "correlation": 2,
    },
    **{"num_radial_basis": 4, "radial_MLP": "[8, 8]", "valid_fraction": 0.34, "batch_size": 2, "valid_batch_size": 2},
    **{"max_num_epochs": 2, "seed": 1, "device": "cpu", "default_dtype": "float64", "num_workers": 0, "plot": False},
}


def train(folder: Path, module: str, *more: str) -> tuple[list[dict[str, Any]], Path]:
    """What MACE logs of two epochs, and the model that it saves."""
    atoms = imidazole()
    generator = np.random.default_rng(0)
    frames = []
    for seed in range(6):
        frame = atoms.copy()
        frame.rattle(0.05, seed=seed)
        frame.info["REF_energy"] = float(generator.normal())
        frame.arrays["REF_forces"] = generator.normal(size=(len(atoms), 3))
        frames.append(frame)
    folder.mkdir()
    ase.io.write(folder / "train.xyz", frames)
    options = TRAINING | {"train_file": "train.xyz", "E0s": "{1: -1.0, 6: 0.0, 7: 1.0}"}
    arguments = ["--ema", *(f"--{name}={value}" for name, value in options.items()), *more]
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = folder.glob("results/*_train.txt")
    return [json.loads(line) for line in log.read_text().splitlines()], folder / "tiny.model"


def test_the_training_command_gives_stocks_losses_and_saves_a_stock_model(tmp_path: Path) -> None:
    wanted, stock = train(tmp_path / "stock", "mace.cli.run_train")
    found, saved = train(tmp_path / "fast", "autotune.models.mace.train", "--equitune-precision=tf32")
    logged = "".join(path.read_text() for path in (tmp_path / "fast" / "logs").glob("*.log"))
    assert "2 of 2 convolutions, 2 of 2 symmetric contractions, 2 of 2 tensor products" in logged
    assert "tf32 means nothing for a model in float64" in logged
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (found, wanted)]
    assert len(losses[0]) >= 6
    assert_equal([np.array(losses[0])], [np.array(losses[1])], 1e-8)
    trained, one = (torch.load(path, weights_only=False) for path in (saved, stock))
    assert replaced_in(trained) == 0
    for name, value in one.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], value, rtol=1e-7, atol=1e-9)
