"""Small MACE models, structures and their results, for the tests of Equitune inside MACE."""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ase.io
import numpy as np
import torch
from ase import Atoms
from e3nn import o3
from mace import data, modules, tools
from mace.tools import torch_geometric
from places import ROOT

warnings.filterwarnings("ignore", "The TorchScript type system doesn't support instance-level annotations")

CUTOFF = 4.0
# The largest relative difference that the tests allow.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
# Number of modules that accelerate replaces in a model of two layers.
REPLACED = 21
# Models of dipoles alone.
WITHOUT_FORCES = ("AtomicDipolesMACE", "AtomicDielectricMACE")
PROTEIN = ROOT / "autotune" / "models" / "structures" / "dhfr_1u72_1502.xyz.gz"

Results = dict[str, torch.Tensor]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """MACE builds its models and batches in torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def imidazole() -> Atoms:
    """Nine atoms in a box that is larger than they need, so that the stress is defined."""
    positions = [
        *((-0.4792, -1.1308, 0.0004), (1.2288, 0.1708, -0.0003), (0.1325, 0.9984, 0.0001), (-0.9578, 0.1517, 0.0011)),
        *((0.8389, -1.1519, 0.0), (-1.9303, 0.4319, -0.0003), (-1.132, -1.9944, -0.0001), (2.274, 0.4509, -0.0006)),
        (0.0251, 2.0735, -0.0006),
    ]
    return Atoms("C3N2H4", positions, cell=[12.0] * 3, pbc=True)


def mof() -> Atoms:
    """The metal-organic framework of ``configs/graphs.toml``, displaced, because its forces would be zero."""
    from autotune.workload.config_tables import load_graphs

    atoms = load_graphs()["mof"].source.atoms()
    atoms.rattle(0.05, seed=0)
    return atoms


def protein() -> Atoms:
    """1,502 atoms, without a cell."""
    with gzip.open(PROTEIN, "rt") as file:
        return ase.io.read(file, format="extxyz")


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
    with default_dtype(dtype):
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
        # Parts of one size, so that an error in one is no smaller part of the gradients than in another.
        loss = sum((value / value.detach().abs().max()).square().sum() for value in found.values())
        found |= gradients(loss, model)
    return {name: value.detach() for name, value in found.items()}


def gradients(loss: Any, model: torch.nn.Module) -> Results:
    """By parameter's name; those that the loss does not depend on are left out."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    names, parameters = zip(*trained, strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}


def assert_same(found: Results, wanted: Results, tolerance: float | None = None) -> None:
    """Every result within the tolerance, relative to its largest element; zeros, to the largest of all results."""
    assert list(found) == list(wanted)
    largest = max(float(value.abs().max()) for value in wanted.values())
    for name, value in wanted.items():
        error = float((found[name] - value).abs().max()) / (float(value.abs().max()) or largest)
        assert error <= (tolerance or TOLERANCE[value.dtype]), f"{name} differs by {error:.1e}"
