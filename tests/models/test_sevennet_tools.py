"""SevenNet's calculator, trainer, parallel model and deployment with Equitune."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sevenn", reason="SevenNet is not installed")

import model_cases
import sevenn._keys as KEY
from e3nn.util.jit import script
from model_cases import assert_same, imidazole
from sevenn.atom_graph_data import AtomGraphData
from sevenn.calculator import SevenNetCalculator as Stock
from sevenn.model_build import build_E3_equivariant_model
from sevenn.train.dataload import unlabeled_atoms_to_graph
from sevenn.train.loss import get_loss_functions_from_config
from sevenn.train.trainer import Trainer
from sevennet_cases import CASE
from torch_geometric.loader import DataLoader

from autotune.models.accelerate import accelerate
from autotune.models.sevennet import train
from autotune.models.sevennet.use import SevenNetCalculator
from autotune.models.whole_model import open_model
from kernelgen.errors import InputError, UnsupportedError


def values_of(calculator: Any) -> model_cases.Results:
    atoms = imidazole()
    atoms.calc = calculator
    found = {"energy": [atoms.get_potential_energy()], "forces": atoms.get_forces(), "stress": atoms.get_stress()}
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in found.items()}


def test_the_calculator_gives_what_sevennets_gives() -> None:
    model = CASE.build(imidazole(), torch.float32)
    stock = Stock(copy.deepcopy(model), file_type="model_instance", device="cpu")
    fast = SevenNetCalculator(model, file_type="model_instance", device="cpu")
    assert model_cases.fused(fast.model) == 3
    assert_same(values_of(fast), values_of(stock))
    accelerate(stock)
    assert model_cases.fused(stock.model) == 3
    assert_same(values_of(stock), values_of(fast))


def checkpoint(folder: Path) -> Path:
    path = folder / "checkpoint.pth"
    model = CASE.build(imidazole(), torch.float32)
    configuration = CASE.configuration(imidazole()) | {"version": "0.13.0", KEY.MODEL_TYPE: "E3_equivariant_model"}
    torch.save({"model_state_dict": model.state_dict(), "config": configuration, "epoch": 1}, path)
    return path


def test_the_calculator_opens_a_checkpoint(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    assert_same(values_of(SevenNetCalculator(path, device="cpu")), values_of(Stock(path, device="cpu")))


def test_a_checkpoint_runs_in_float64(tmp_path: Path) -> None:
    """Its encoding of elements is float32 in every model."""
    path = str(checkpoint(tmp_path))
    outputs = []
    for dtype in ("float32", "float64"):
        model = open_model(path, dtype=dtype)
        outputs.append(model.energies_and_forces(model.inputs([imidazole()]), stress=True))
    assert outputs[1].forces.dtype == torch.float64
    for single, double in zip(vars(outputs[0]).values(), vars(outputs[1]).values(), strict=True):
        assert float((single - double).abs().max()) <= 1e-5 * float(double.abs().max())


@pytest.mark.parametrize("name", ["enable_cueq", "enable_flash", "enable_oeq"])
def test_another_acceleration_beside_equitune_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CASE.build(imidazole(), torch.float32)
    with pytest.raises(InputError, match=name):
        SevenNetCalculator(model, file_type="model_instance", device="cpu", **{name: True})
    monkeypatch.setenv(f"SEVENNET_{name.upper()}", "1")
    with pytest.raises(InputError, match=name):
        SevenNetCalculator(model, file_type="model_instance", device="cpu")


def test_the_training_command_accelerates_what_it_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the model: SevenNet's part, which trains it, gets its own arguments alone."""
    held = []

    def sevenn() -> None:
        assert sys.argv[1:] == ["train", "input.yaml"]
        held.append(train.train.build_E3_equivariant_model(CASE.configuration(imidazole())))

    monkeypatch.setattr(train.sevenn, "main", sevenn)
    monkeypatch.setattr(train.train, "build_E3_equivariant_model", build_E3_equivariant_model)
    monkeypatch.setattr(train, "Logger", lambda: SimpleNamespace(writeline=held.append))
    monkeypatch.setattr(sys, "argv", ["train.py", "train", "--equitune-precision=tf32", "input.yaml"])
    train.main()
    said, model = held
    assert model_cases.fused(model) == 3 and "3 of 3 convolutions" in said and "tf32 means nothing without" in said


def test_an_epoch_of_its_trainer_loses_the_same() -> None:
    configuration = CASE.configuration(imidazole(), **{KEY.IS_TRAIN_STRESS: True}) | {
        KEY.FORCE_WEIGHT: 1.0,
        KEY.STRESS_WEIGHT: 1.0,
        KEY.LOSS: "mse",
        KEY.LOSS_PARAM: {},
    }
    graphs = []
    for seed in range(3):
        atoms = imidazole()
        atoms.rattle(0.05, seed=seed)
        graph = AtomGraphData.from_numpy_dict(unlabeled_atoms_to_graph(atoms, model_cases.CUTOFF))
        graph[KEY.ENERGY] = graph[KEY.PER_ATOM_ENERGY] = torch.tensor(float(seed))
        graph[KEY.FORCE] = torch.zeros(len(atoms), 3)
        graph[KEY.STRESS] = torch.zeros(1, 6)
        graphs.append(graph)
    weights = []
    for fast in (False, True):
        model = CASE.build(imidazole(), torch.float32)
        if fast:
            accelerate(model)
        losses = get_loss_functions_from_config(configuration)
        trainer = Trainer(model, losses, torch.optim.Adam, {"lr": 1e-3}, device="cpu")
        before = copy.deepcopy(dict(model.named_parameters()))
        for _ in range(2):
            trainer.run_one_epoch(DataLoader(graphs, batch_size=2), is_train=True)
        moved = {name: value - before[name] for name, value in model.named_parameters() if value.requires_grad}
        weights.append(torch.cat([value.detach().flatten() for value in moved.values()]))
    assert (weights[0] - weights[1]).abs().max() <= 1e-2 * weights[0].abs().max()


def test_a_parallel_model_with_ghost_atoms() -> None:
    """Each part alone, on the features that the part before it left: as in LAMMPS, without its communication."""
    atoms = imidazole()
    torch.manual_seed(0)
    parts: Any = build_E3_equivariant_model(CASE.configuration(atoms), parallel=True)
    fast = copy.deepcopy(parts)
    assert [accelerate(part).replaced > 0 for part in fast] == [True] * 3
    results = []
    for model in (parts, fast):
        data = _with_ghosts(CASE.batch(model[0], atoms), local=5)
        found = []
        for part in model:
            part.set_is_batch_data(False)
            data = part(data)
            x = data[KEY.NODE_FEATURE]
            found.append(x)
            data[KEY.NODE_FEATURE_GHOST] = 0.5 * x[torch.tensor([0, 1, 2, 3])]
        results.append({str(place): value.detach() for place, value in enumerate(found)})
    assert_same(results[1], results[0])


def _with_ghosts(data: dict[str, Any], local: int) -> dict[str, Any]:
    """The first atoms are of this rank, the others of another; only edges that end at the former are kept."""
    kinds = data[KEY.NODE_FEATURE] if KEY.NODE_FEATURE in data else data[KEY.ATOMIC_NUMBERS]
    places = {number: place for place, number in enumerate(sorted(set(kinds.tolist())))}
    onehot = torch.tensor([places[number] for number in kinds.tolist()])
    kept = data[KEY.EDGE_IDX][0] < local
    return data | {
        KEY.NODE_FEATURE: onehot[:local],
        KEY.NODE_FEATURE_GHOST: onehot[local:],
        KEY.NLOCAL: torch.tensor([local]),
        KEY.EDGE_IDX: data[KEY.EDGE_IDX][:, kept],
        KEY.EDGE_VEC: data[KEY.EDGE_VEC][kept],
    }


def test_deployment_with_torchscript_is_refused() -> None:
    model = CASE.build(imidazole(), torch.float32)
    model._modules["onehot_idx_to_onehot"]._forward_hooks.clear()
    accelerate(model)
    with pytest.raises(UnsupportedError, match="TorchScript"):
        script(model)
