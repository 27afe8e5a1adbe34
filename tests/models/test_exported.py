"""An accelerated model of each package, exported with its forces, gives the same from a C++ program without Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ase import Atoms
from exported import (
    Dimensions,
    ExportedModel,
    Tensors,
    check_errors_are_said,
    check_without_python,
    have_the_compiler_link_its_own_library,
)
from model_cases import CUTOFF, case_of, imidazole, needs, two_molecules

from autotune.models.accelerate import accelerate
from autotune.models.capture import package_for
from autotune.models.package import default_dtype
from autotune.models.padding import Counts

Given = Mapping[str, torch.Tensor]


def of_mace(model: Any, given: Given) -> Tensors:
    out = model(dict(given), training=False, compute_force=True)
    return out["energy"], out["forces"]


def of_nequip(model: Any, given: Given) -> Tensors:
    with default_dtype(torch.float64):
        out = model(dict(given))
    return out["total_energy"], out["forces"]


def of_sevennet(model: Any, given: Given) -> Tensors:
    size = Counts(given["x"].shape[0], given["edge_vec"].shape[0], 1)
    out = package_for(model).compute(model, dict(given), size, {})
    return out["inferred_total_energy"], out["inferred_force"]


def some(*names: str) -> Callable[[Any, Mapping[str, Any]], Given]:
    """What an exported model takes: these tensors of a batch."""
    return lambda model, batch: {name: batch[name] for name in names}


def as_captured(model: Any, batch: Mapping[str, Any]) -> Given:
    """What a captured step takes."""
    return {name: field.tensor for name, field in package_for(model).fields(model, batch, CUTOFF)[0].items()}


@dataclass(frozen=True)
class Package:
    """How a package's model is exported: its options, the energies and forces, and the inputs as the program has them.

    atoms, edges: the axis of some inputs that has atoms, or edges.
    """

    options: dict[str, Any]
    step: Callable[[Any, Given], Tensors]
    inputs: Callable[[Any, Mapping[str, Any]], Given]
    atoms: Dimensions
    edges: Dimensions


PACKAGES = {
    "mace": Package(
        {},
        of_mace,
        some("positions", "node_attrs", "edge_index", "shifts", "unit_shifts", "cell", "batch", "ptr", "head"),
        {"positions": 0, "node_attrs": 0, "batch": 0},
        {"edge_index": 1, "shifts": 0, "unit_shifts": 0},
    ),
    "nequip": Package(
        {"num_layers": 2},
        of_nequip,
        some("pos", "atom_types", "edge_index", "edge_cell_shift", "cell"),
        {"pos": 0, "atom_types": 0},
        {"edge_index": 1, "edge_cell_shift": 0},
    ),
    "sevennet": Package(
        {"num_convolution_layer": 2, "irreps_manual": ["8x0e", "8x0e+4x1e+2x2e", "8x0e"]},
        of_sevennet,
        as_captured,
        {"x": 0, "batch": 0},
        {"edge_index": 1, "edge_vec": 0},
    ),
}


def exported(name: str, folder: Path, device: str, dtype: torch.dtype) -> ExportedModel:
    """A package's small model, compiled for any numbers of atoms and edges."""
    case, package = case_of(name), PACKAGES[name]
    model = case.build(imidazole(), dtype, **package.options).eval().requires_grad_(False).to(device)
    accelerate(model)

    def inputs(atoms: Atoms) -> Given:
        batch = case.batch(model, atoms)
        there = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
        return package.inputs(model, there)

    return ExportedModel(folder, partial(package.step, model), inputs, imidazole(), package.atoms, package.edges)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # AOTInductor takes one to two minutes of a core, and shares it with other tests
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in PACKAGES])
def test_energies_and_forces_of_a_program_without_python(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MACE's by a compiler that links its own C++ library; NequIP's and SevenNet's are built with the system's."""
    if name == "mace":
        have_the_compiler_link_its_own_library(tmp_path, monkeypatch)
    export = partial(exported, name, tmp_path, "cpu", torch.float64)
    check_without_python(tmp_path, export, (imidazole(), two_molecules()), 1e-9)
    if name == "mace":
        check_errors_are_said(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(pytest.param(name, torch.float64, marks=needs(name)) for name in PACKAGES),
        pytest.param("mace", torch.float32, marks=needs("mace")),
    ],
    ids=str,
)
def test_a_program_without_python_on_a_gpu(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    export = partial(exported, name, tmp_path, "cuda:0", dtype)
    check_without_python(tmp_path, export, (imidazole(), two_molecules()), 1e-9 if dtype is torch.float64 else 1e-6)
