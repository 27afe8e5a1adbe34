"""Certificates of the model packages' own models: Equitune's paths pass, and faults planted into a model are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calculator_cases import model_for
from model_cases import MODULES, imidazole, needs, two_molecules

from autotune.certification.certificate import FAIL, PASS, Certificate, certify
from autotune.models.package import Outputs
from autotune.models.whole_model import WholeModel, package_of

of_all = pytest.mark.parametrize("package", [pytest.param(name, marks=needs(name)) for name in MODULES])


def molecule() -> Any:
    return imidazole()[:6]


def open_cell() -> Any:
    atoms = imidazole()
    atoms.set_cell([[5.2, 0.3, 0.0], [1.0, 6.0, 0.4], [0.2, -0.8, 4.5]])
    return atoms


STRUCTURES = {"open cell": open_cell, "two molecules": two_molecules}


def whole(package: str) -> WholeModel:
    model = model_for(package, torch.float64)
    return WholeModel(package, model, package_of(model))


# Faults by the names of the parts of each package's model.


def _weights(model: torch.nn.Module, word: str) -> torch.nn.Parameter:
    """The largest parameter with a word in its name."""
    found = [(weight.numel(), name, weight) for name, weight in model.named_parameters() if word in name]
    assert found, (word, [name for name, _ in model.named_parameters()])
    return max(found, key=lambda one: one[0])[2]


def changed_weights(word: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[WholeModel], WholeModel]:
    def plant(model: WholeModel) -> WholeModel:
        weights = _weights(model.module, word)
        with torch.no_grad():
            weights.copy_(change(weights.clone()))
        return model

    return plant


def one_path(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The columns of a radial network's last layer that belong to the first path."""

    def change(weights: torch.Tensor) -> torch.Tensor:
        width = weights.shape[-1] // 4 if weights.dim() == 2 else weights.numel() // 4
        weights.reshape(-1, weights.shape[-1])[:, :width] *= factor
        return weights

    return change


def around(change: Callable[..., Outputs]) -> Callable[[WholeModel], WholeModel]:
    """``change(evaluate, inputs)`` takes the place of the package's evaluation."""

    def plant(model: WholeModel) -> WholeModel:
        kind: Any = type(model.package)

        class Changed(kind):  # type: ignore[misc]
            def evaluate(self, module: Any, inputs: dict[str, Any], **options: Any) -> Outputs:
                return change(lambda given: kind.evaluate(self, module, given, **options), inputs)

        return dataclasses.replace(model, package=Changed())

    return plant


def stale(model: WholeModel) -> WholeModel:
    """The edges of a structure are kept by its number of atoms."""
    kept: dict[int, dict[str, Any]] = {}

    def change(right: Any, inputs: dict[str, Any]) -> Outputs:
        edges = model.package.edges(inputs)
        count = int(inputs[next(name for name in ("positions", "pos") if name in inputs)].shape[0])
        names = [name for name, value in inputs.items() if torch.is_tensor(value) and edges.shape[1] in value.shape]
        kept.setdefault(count, {name: inputs[name] for name in names})
        return right(inputs | kept[count])

    return around(change)(model)


RADIAL = {"mace": "conv_tp_weights", "nequip": "edge_mlp", "allegro": "env", "sevennet": "weight_nn"}
SPECIES = {"mace": "node_embedding", "nequip": "type_embed", "allegro": "type_embed", "sevennet": "onehot_to_feature"}


def half_precision_forces(right: Any, inputs: dict[str, Any]) -> Outputs:
    out = right(inputs)
    return dataclasses.replace(out, forces=out.forces.half().to(out.forces.dtype))


def faults(package: str) -> dict[str, Callable[[WholeModel], WholeModel]]:
    return {
        "a coupling's sign": changed_weights(RADIAL[package], one_path(-1.0)),
        "a dropped path": changed_weights(RADIAL[package], one_path(0.0)),
        "a wrong weight": changed_weights("", lambda weights: weights * (1 + 1e-6)),
        "a stale graph": stale,
        "forces of half precision": around(half_precision_forces),
    }


@pytest.fixture(scope="module")
def certificates() -> dict[str, Certificate]:
    return {}


def certificate_of(package: str, certificates: dict[str, Certificate]) -> Certificate:
    if package not in certificates:
        structures = {name: make() for name, make in STRUCTURES.items()}
        paths: dict[str, Any] = {"equitune": None, "captured": None} | faults(package)
        certificates[package] = certify(whole(package), structures, paths=paths, dtypes=("float64",), effort="quick")
    return certificates[package]


@of_all
def test_equitunes_paths_pass(package: str, certificates: dict[str, Certificate]) -> None:
    found = certificate_of(package, certificates)
    for path in ("stock", "equitune", "captured"):
        row = found.path(path, "float64")
        assert row["verdict"] == PASS, f"{path}: {row['reason']}"
        assert {"energy", "node energies", "forces", "stress", "force Jacobian", "NVE drift"} <= set(row["checks"])


@of_all
@pytest.mark.parametrize("fault", list(faults("mace")))
def test_a_planted_fault_is_found(package: str, fault: str, certificates: dict[str, Certificate]) -> None:
    row = certificate_of(package, certificates).path(fault, "float64")
    assert row["verdict"] == FAIL and not row["failed"], row
    assert "is wrong on" in row["reason"]


@needs("mace")
def test_a_mace_file_is_certified_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "small.model"
    torch.save(model_for("mace", torch.float32), path)
    structures = {"open cell": open_cell()}
    found = certify(str(path), structures, paths=("equitune", "cuequivariance"), effort="quick")
    assert found.passed, str(found)
    assert found.record["model"]["file"] == "small.model" and len(found.record["model"]["sha256"]) == 64
    row = found.path("cuequivariance", "float64")
    assert row["verdict"] == "refused" and row["reason"] == "its kernels need a CUDA device"
