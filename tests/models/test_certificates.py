"""Certificates of the model packages' own models: Equitune's paths pass, and faults planted into a model are found."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calculator_cases import model_for
from model_cases import MODULES, imidazole, needs, two_molecules

from autotune.certification.certificate import FAIL, PASS, Certificate, certify
from autotune.models.accelerate import accelerate
from autotune.models.package import Outputs
from autotune.models.sevennet.package import SevenNet
from autotune.models.whole_model import WholeModel, open_made, package_of

of_all = pytest.mark.parametrize("package", [pytest.param(name, marks=needs(name)) for name in MODULES])


def open_cell() -> Any:
    atoms = imidazole()
    atoms.set_cell([[5.2, 0.3, 0.0], [1.0, 6.0, 0.4], [0.2, -0.8, 4.5]])
    return atoms


STRUCTURES = {"open cell": open_cell, "two molecules": two_molecules}


def whole(package: str) -> WholeModel:
    model = model_for(package, torch.float64)
    return WholeModel(package, model, package_of(model))


# Faults. By package: the weights of a path of the last convolution, as columns of a parameter; a parameter with a row
# for each element; what ends the first layer; and a linear layer of the last.

COUPLING: dict[str, tuple[str, slice]] = {
    "mace": ("interactions.1.conv_tp_weights.layer2.weight", slice(0, 4)),
    "nequip": ("model.func.layer1_convnet.conv.edge_mlp.mlp.2.weight", slice(0, 4)),
    "allegro": ("model.func.allegro.tps.0.weights", slice(0, 1)),
    "sevennet": ("1_convolution.weight_nn.layer2.weight", slice(0, 8)),
}
ELEMENTS = {
    "mace": "node_embedding.linear.weight",
    "nequip": "model.func.type_embed.embed_module.weight",
    "allegro": "model.func.radial_chemical_embed.type_embed.center_embed.weight",
    "sevennet": "onehot_to_feature_x.linear.weight",
}
FIRST_LAYER = {
    "mace": "products.0",
    "nequip": "model.func.layer0_convnet",
    "allegro": "model.func.allegro.latents.0",
    "sevennet": "0_equivariant_gate",
}
LINEAR = {
    "mace": "interactions.1.linear_up",
    "nequip": "model.func.layer1_convnet.conv.linear_1",
    "allegro": "model.func.allegro.latents.1",
    "sevennet": "1_self_interaction_1.linear",
}
Plant = Callable[[WholeModel], WholeModel]


def changed_weights(name: str, change: Callable[[torch.Tensor], Any]) -> Plant:
    """``change`` writes into the parameter."""

    def plant(model: WholeModel) -> WholeModel:
        with torch.no_grad():
            change(model.module.get_parameter(name))
        return model

    return plant


def after(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """``change`` is made to what a part gives, or to the node features in it."""

    def hook(module: Any, given: Any, out: Any) -> Any:
        if isinstance(out, dict):
            return {key: change(value) if key in ("x", "node_features") else value for key, value in out.items()}
        return change(out)

    def plant(model: WholeModel) -> WholeModel:
        model.module.get_submodule(name).register_forward_hook(hook)
        return model

    return plant


def tensor_float32(values: torch.Tensor) -> torch.Tensor:
    """Rounded to ten bits, with the gradient of the unrounded."""
    fraction, exponent = torch.frexp(values.detach())
    return values + (torch.ldexp(torch.round(fraction * 2**11) / 2**11, exponent) - values.detach())


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


def half_precision_forces(right: Any, inputs: dict[str, Any]) -> Outputs:
    out = right(inputs)
    return dataclasses.replace(out, forces=out.forces.half().to(out.forces.dtype))


def faults(package: str) -> dict[str, Plant]:
    weights, columns = COUPLING[package]
    return {
        "a coupling's sign": changed_weights(weights, lambda weight: weight[:, columns].mul_(-1.0)),
        "a dropped path": changed_weights(weights, lambda weight: weight[:, columns].zero_()),
        "a stale graph": stale,
        "a wrong species weight": changed_weights(
            ELEMENTS[package], lambda weight: weight.view(3, -1)[1].mul_(1 + 1e-5)
        ),
        "forces without one layer's gradient": after(FIRST_LAYER[package], torch.Tensor.detach),
        "TF32": after(LINEAR[package], tensor_float32),
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


@pytest.mark.slow
@of_all
def test_equitunes_paths_pass(package: str, certificates: dict[str, Certificate]) -> None:
    found = certificate_of(package, certificates)
    for path in ("stock", "equitune", "captured"):
        row = found.path(path, "float64")
        assert row["verdict"] == PASS, f"{path}: {row['reason']}"
        assert {"energy", "node energies", "forces", "stress", "force Jacobian", "NVE drift"} <= set(row["checks"])


# As slow as the test above: quick ones run later, and a module's certificates would be made twice.
@pytest.mark.slow
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


@needs("sevennet")
def test_a_sevennet_file_in_float64_has_couplings_of_float64() -> None:
    """Couplings that are cast from float32 are some 1e-8 off; this small model then differs by 9e-13 from ours."""
    from sevennet_cases import SevenNetCase

    model = SevenNet().build({"species": "1, 6-7", **SevenNetCase.options}, seed=0)
    assert next(model.parameters()).dtype == torch.float32
    exact = open_made("small", model, dtype="float64")
    ours = exact.with_module(copy.deepcopy(exact.module))
    assert accelerate(ours.module).replaced > 0
    inputs = exact.inputs([open_cell()])
    found, wanted = (one.energies_and_forces(inputs, stress=True) for one in (ours, exact))
    assert wanted.forces.dtype == torch.float64
    assert (found.forces - wanted.forces).abs().max() <= 1e-13 * wanted.forces.abs().max()
