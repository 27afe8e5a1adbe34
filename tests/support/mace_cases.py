"""Small MACE models and their results, for the tests of Equitune inside MACE, and what all packages' tests share."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import model_cases
import numpy as np
import torch
from ase import Atoms
from e3nn import o3
from mace import data, modules, tools
from mace.tools import torch_geometric
from model_cases import (
    CUTOFF,
    PROTEIN,
    TOLERANCE,
    Case,
    Results,
    gradients,
    imidazole,
    loss_of,
    mof,
    protein,
)

from autotune.models.package import default_dtype

warnings.filterwarnings("ignore", "The TorchScript type system doesn't support instance-level annotations")

# What tests of MACE take from here.
__all__ = [
    "CASE",
    "PROTEIN",
    "REPLACED",
    "TOLERANCE",
    "assert_same",
    "batch_of",
    "default_dtype",
    "gradients",
    "imidazole",
    "model_of",
    "mof",
    "numbers_in",
    "protein",
    "results",
]

# Number of modules that accelerate replaces in a model of two layers.
REPLACED = 22
# Models of dipoles alone.
WITHOUT_FORCES = ("AtomicDipolesMACE", "AtomicDielectricMACE")


def model_of(
    numbers: list[int],
    *,
    block: str = "RealAgnosticResidualInteractionBlock",
    kind: str = "ScaleShiftMACE",
    hidden: str = "4x0e+4x1o",
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> torch.nn.Module:
    """A model of MACE with random weights, the same at every call; ``more`` goes to the model."""
    options: dict[str, Any] = {
        "r_max": CUTOFF,
        "num_bessel": 4,
        "num_polynomial_cutoff": 5,
        "max_ell": 2,
        "interaction_cls": getattr(modules.blocks, block),
        "interaction_cls_first": getattr(modules.blocks, block),
        "num_interactions": 2,
        "num_elements": len(numbers),
        "hidden_irreps": o3.Irreps(hidden),
        "MLP_irreps": o3.Irreps("4x0e"),
        "atomic_energies": np.linspace(-1.0, 1.0, len(numbers)),
        "avg_num_neighbors": 8.0,
        "atomic_numbers": numbers,
        "correlation": 2,
        "gate": torch.nn.functional.silu,
        "radial_MLP": [8, 8],
    }
    if kind == "ScaleShiftMACE":  # the others take no scale
        options |= {"atomic_inter_scale": 1.5, "atomic_inter_shift": 0.1}
    if kind in WITHOUT_FORCES:
        options["atomic_energies"] = None
    # Of float64 first: cuequivariance keeps couplings of the dtype in which a process asked for them first.
    for built in dict.fromkeys((torch.float64, dtype)):
        with default_dtype(built):
            torch.manual_seed(0)
            model = getattr(modules, kind)(**(options | more))
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any():  # it would hide the gradients of what it multiplies
            torch.nn.init.constant_(parameter, 0.5)
    return model


def numbers_in(atoms: Atoms) -> list[int]:
    return sorted({int(number) for number in atoms.numbers})


def batch_of(model: Any, *structures: Atoms) -> dict[str, torch.Tensor]:
    """The dictionary that a model takes, in its dtype."""
    table = tools.AtomicNumberTable([int(number) for number in model.atomic_numbers])
    with default_dtype(next(model.parameters()).dtype):
        graphs = [
            data.AtomicData.from_config(data.config_from_atoms(atoms), z_table=table, cutoff=float(model.r_max))
            for atoms in structures
        ]
        batch = next(iter(torch_geometric.dataloader.DataLoader(graphs, batch_size=len(graphs)))).to_dict()
        return batch | {"charges": torch.zeros(len(batch["positions"]))}


def results(model: Any, batch: dict[str, torch.Tensor], *, training: bool = True) -> Results:
    """What the model predicts; when training also the gradients of a loss on all of it."""
    # A model writes into its dictionary, and into the tensors that they need gradients.
    given = {name: value.detach().clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    forces = type(model).__name__ not in WITHOUT_FORCES
    out = model(given, training=training, compute_force=forces, compute_stress=forces)
    names = ("energy", "forces", "stress", "dipole", "polarizability")
    found = {name: out[name] for name in names if out.get(name) is not None}
    if training:
        found |= gradients(loss_of(found), model)
    return {name: value.detach() for name, value in found.items()}


# A gradient of these models may be zero.
assert_same = functools.partial(model_cases.assert_same, zeros=True)


class MaceCase(Case):
    """The same models in the form that all packages share."""

    def build(self, atoms: Atoms, dtype: torch.dtype = torch.float64, **more: Any) -> torch.nn.Module:
        return model_of(numbers_in(atoms), dtype=dtype, **more)

    def batch(self, model: Any, *structures: Atoms) -> dict[str, Any]:
        batch = batch_of(model, *structures)
        return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}

    def predict(self, model: Any, batch: dict[str, Any], **options: Any) -> Results:
        out = model(dict(batch), **({"compute_stress": True} | options))
        return {name: value for name, value in out.items() if value is not None}

    def results(self, model: Any, batch: dict[str, Any]) -> Results:
        return results(model, batch)


CASE = MaceCase()
