"""NequIP's own commands with the modifier ``enable_Equitune``: training, packages, compilation, the calculator.

The commands run in processes of their own, where NequIP finds Equitune by the entry point that ``pyproject.toml``
declares.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("nequip", reason="NequIP is not installed")

from exported import Program
from places import ROOT

from autotune.workload.toml_tables import read_toml

MODEL = {
    "_target_": "nequip.model.NequIPGNNModel",
    **{"seed": 1, "model_dtype": "float64", "type_names": ["Cu"], "r_max": 4.0},
    **{"l_max": 1, "parity": True, "num_layers": 2, "num_features": 4, "radial_mlp_width": 8},
    **{"avg_num_neighbors": 12.0, "per_type_energy_shifts": 0.1, "per_type_energy_scales": 1.0},
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes an interpreter see Equitune as installed, with its entry points."""
    folder = tmp_path_factory.mktemp("installed")
    facts = folder / "equitune-0.dist-info"
    facts.mkdir()
    lines = []
    for group, points in read_toml(ROOT / "pyproject.toml")["project"]["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (facts / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: equitune\nVersion: 0\n")
    return folder


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{installed}"}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def configuration(model: dict[str, Any]) -> dict[str, Any]:
    """An epoch on four frames of copper."""
    coefficients = {"total_energy_mae": 1.0, "forces_mae": 1.0, "stress_mae": 1.0}
    metrics = {"_target_": "nequip.train.EnergyForceStressMetrics", "coeffs": coefficients}
    transforms = [
        {"_target_": "nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper", "model_type_names": ["Cu"]},
        {"_target_": "nequip.data.transforms.NeighborListTransform", "r_max": 4.0},
    ]
    frames = {"supercell": [2, 2, 2], "seed": 1, "num_frames": 6, "element": "Cu"}
    dataset = {"_target_": "nequip.data.dataset.EMTTestDataset", "transforms": transforms, **frames}
    loader = {"_target_": "torch.utils.data.DataLoader", "batch_size": 2}
    trainer = {"_target_": "lightning.Trainer", "max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False}
    saved = {"dirpath": ".", "filename": "best", "monitor": "val0_epoch/weighted_sum"}
    trainer |= {
        "logger": {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "."},
        "log_every_n_steps": 1,
        "callbacks": [{"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", **saved}],
    }
    loss = {"total_energy": 1.0, "forces": 1.0, "stress": 1.0}
    return {
        "run": ["train"],
        "data": {
            "_target_": "nequip.data.datamodule.NequIPDataModule",
            "seed": 1,
            "split_dataset": {"dataset": dataset, "train": 4, "val": 2},
            "train_dataloader": loader,
            "val_dataloader": loader,
        },
        "trainer": trainer,
        "training_module": {
            "_target_": "nequip.train.EMALightningModule",
            "loss": {"_target_": "nequip.train.EnergyForceStressLoss", "per_atom_energy": True, "coeffs": loss},
            "val_metrics": metrics,
            "train_metrics": metrics,
            "test_metrics": metrics,
            "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01},
            "model": model,
        },
    }


def train(installed: Path, folder: Path, model: dict[str, Any]) -> list[dict[str, str]]:
    """The metrics of a training run; its checkpoint is ``best.ckpt``."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.dump(configuration(model)))
    where = ("-cp", str(folder), "-cn", "config", f"hydra.run.dir={folder}")
    done = run(installed, folder, "-m", "nequip.scripts.train", *where)
    assert done.returncode == 0, done.stderr
    with next(folder.rglob("metrics.csv")).open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def trained(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training run with the modifier, and its metrics compared with those of a run without."""
    folder = tmp_path_factory.mktemp("trained")
    wanted = train(installed, folder / "stock", MODEL)
    modifier = {"modifier": "enable_Equitune", "precision": "tf32"}
    modified = {"_target_": "nequip.model.modify", "modifiers": [modifier], "model": MODEL}
    found = train(installed, folder / "equitune", modified)
    assert len(found) == len(wanted) > 0
    for ours, theirs in zip(found, wanted, strict=True):
        for name, value in theirs.items():
            assert ours[name] == value or float(ours[name]) == pytest.approx(float(value), rel=1e-8), name
    return folder / "equitune"


def test_training_with_the_modifier_loses_the_same(trained: Path) -> None:
    assert (trained / "best.ckpt").is_file()
    (line,) = (line for line in (trained / "train.log").read_text().splitlines() if "[equitune]" in line)
    assert "GraphModel: 2 of 2 convolutions" in line and "tf32 means nothing" in line


CALCULATE = """
import sys
from ase.build import bulk
from nequip.integrations.ase import NequIPCalculator
from nequip.model import modify
from autotune import accelerate
from autotune.models.stand_ins import AcceleratedConvolution
def forces(calculator):
    atoms = bulk("Cu", cubic=True) * (2, 2, 2)
    atoms.rattle(0.1, seed=0)
    atoms.calc = calculator
    return atoms.get_forces()
stock = NequIPCalculator._from_saved_model(sys.argv[1])
for way in (accelerate, lambda calculator: modify(calculator.model, [{"modifier": "enable_Equitune"}])):
    fast = NequIPCalculator._from_saved_model(sys.argv[1])
    way(fast)
    assert sum(isinstance(module, AcceleratedConvolution) for module in fast.model.modules()) == 2
    difference = abs(forces(fast) - forces(stock)).max() / abs(forces(stock)).max()
    assert difference < 1e-10, difference
print("agrees", type(fast.model).__module__)
"""


def test_checkpoints_and_packages_are_accelerated(installed: Path, trained: Path) -> None:
    done = run(installed, trained, "-c", CALCULATE, "best.ckpt")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["agrees", "nequip.nn.graph_model"]
    package = ("-m", "nequip.scripts.package", "build", "best.ckpt", "model.nequip.zip")
    done = run(installed, trained, *package)
    assert done.returncode == 0, done.stderr
    done = run(installed, trained, "-c", CALCULATE, "model.nequip.zip")
    assert done.returncode == 0, done.stderr
    assert "torch_package" in done.stdout.split()[-1]


COMPILED = """
import sys
import torch
from ase.build import bulk
from nequip.integrations.ase import NequIPCalculator
atoms = bulk("Cu", cubic=True) * (2, 2, 2)
atoms.rattle(0.1, seed=0)
found = []
for calculator in (
    NequIPCalculator._from_saved_model(sys.argv[1]),
    NequIPCalculator.from_compiled_model(sys.argv[2], device="cpu"),
):
    atoms.calc = calculator
    found.append((atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()))
for a, b in zip(*found):
    assert abs(a - b).max() < 1e-10 * abs(a).max(), (a, b)
data, model = calculator.atoms_to_data(atoms), calculator.model
wanted = model(data)
torch.save([[data[key] for key in model.input_keys], [wanted[key] for key in model.output_keys]], "given.pt")
print("agrees")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # AOTInductor takes a minute of a core
def test_compiled_files_run_in_python_and_without(installed: Path, trained: Path) -> None:
    options = ("--mode", "aotinductor", "--device", "cpu", "--target", "ase", "--modifiers", "enable_Equitune")
    done = run(installed, trained, "-m", "nequip.scripts.compile", "best.ckpt", "model.nequip.pt2", *options)
    assert done.returncode == 0, done.stderr
    done = run(installed, trained, "-c", COMPILED, "best.ckpt", "model.nequip.pt2")
    assert done.returncode == 0 and done.stdout.endswith("agrees\n"), done.stderr
    given, wanted = torch.load(trained / "given.pt")
    found = Program(trained).run(trained / "model.nequip.pt2", given)
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) <= 1e-10 * float(b.abs().max())
