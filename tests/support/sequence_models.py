"""The models and inputs of sequences of actions: stock, accelerated and captured copies of a package's small model."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from ase import Atoms
from model_cases import case_of, imidazole, small_model
from torch import Tensor

from autotune.models.accelerate import accelerate
from autotune.models.capture import CapturedModel, capture

# Largest relative error in float64.
TOLERANCE = 1e-9
KINDS = ("stock", "accelerated", "captured")

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Package:
    """What actions need to know of a package.

    module: of the package. read: the tensors of an input that a model may read.
    """

    module: str
    read: tuple[str, ...]
    call: Callable[..., Results]


def _call_mace(model: Any, given: dict[str, Tensor], energy_alone: bool = False, **options: Any) -> Results:
    options = {"compute_force": not energy_alone, "compute_stress": not energy_alone} | options
    out = model(given, **options)
    return {name: out[name] for name in ("energy", "forces", "stress") if out.get(name) is not None}


def _call_sevennet(model: Any, given: dict[str, Tensor], **_: Any) -> Results:
    out = model(given)
    names = {"energy": "inferred_total_energy", "forces": "inferred_force", "stress": "inferred_stress"}
    return {name: out[theirs] for name, theirs in names.items()}


def _call_nequip(model: Any, given: dict[str, Tensor], **_: Any) -> Results:
    out = model(given)
    names = {"energy": "total_energy", "forces": "forces", "stress": "stress"}
    return {name: out[theirs] for name, theirs in names.items()}


_MACE_READS = ("positions", "node_attrs", "batch", "edge_index", "shifts", "unit_shifts", "cell", "ptr", "head")
_SEVENNET_READS = ("x", "atomic_numbers", "batch", "edge_index", "edge_vec", "cell_volume", "num_atoms")
_NEQUIP_READS = ("pos", "atom_types", "batch", "edge_index", "edge_cell_shift", "cell", "num_atoms")
PACKAGES = {
    "mace": Package("mace", _MACE_READS, _call_mace),
    "sevennet": Package("sevenn", _SEVENNET_READS, _call_sevennet),
    "nequip": Package("nequip", _NEQUIP_READS, _call_nequip),
    "allegro": Package("allegro", _NEQUIP_READS, _call_nequip),
}


def structures() -> list[list[Atoms]]:
    """Inputs of several sizes; the first three have equally many atoms, but other edges or elements."""
    atoms = imidazole()
    moved, swapped, grown, slanted, lonely = (atoms.copy() for _ in range(5))
    moved.rattle(0.1, seed=1)
    swapped.numbers = swapped.numbers[::-1].copy()
    grown += Atoms("H", [[3.0, 3.0, 3.0]])
    slanted.set_cell([[6.0, 0.0, 0.0], [2.0, 5.5, 0.0], [0.5, 1.0, 9.0]])
    lonely.positions[0] += [4.5, 0.0, 4.5]
    return [[atoms], [moved], [swapped], [grown], [atoms[:5]], [slanted], [lonely], [atoms, slanted, atoms[:4]]]


@dataclass
class Subject:
    """One copy of a model, and what its user holds beside it. outer: what is called, a CapturedModel or the model."""

    kind: str
    package: Package
    outer: Any
    batches: list[dict[str, Tensor]]
    tolerance: float = TOLERANCE
    optimizer: torch.optim.Optimizer | None = None
    average: dict[str, Tensor] = field(default_factory=dict)
    stored: dict[str, Tensor] = field(default_factory=dict)
    originals: list[Any] = field(default_factory=list)

    @property
    def model(self) -> Any:
        return self.outer.model if isinstance(self.outer, CapturedModel) else self.outer

    @property
    def is_fast(self) -> bool:
        return self.kind != "stock"

    @property
    def device(self) -> torch.device:
        return self.batches[0]["edge_index"].device

    def either(self, draw: random.Random) -> Any:
        """The model, or for a captured one what holds it."""
        return draw.choice((self.outer, self.model))

    def call(self, batch: dict[str, Tensor], model: Any = None, **options: Any) -> Results:
        # A model writes into its dictionary, and has tensors need gradients.
        given = {name: value.detach() if torch.is_tensor(value) else value for name, value in batch.items()}
        return self.package.call(self.outer if model is None else model, given, **options)


@functools.cache
def _prepared(name: str, device: str) -> tuple[dict[str, torch.nn.Module], list[dict[str, Tensor]]]:
    """By kind a package's models, and inputs."""
    stock = small_model(name).eval().to(device)
    batches = [_moved(case_of(name).batch(stock, *atoms), device) for atoms in structures()]
    models = {kind: copy.deepcopy(stock) for kind in KINDS}
    for kind in KINDS[1:]:
        assert accelerate(models[kind]).replaced, "else nothing would be compared"
    return models, batches


def _moved(batch: dict[str, Any], device: str) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in batch.items() if torch.is_tensor(value)}


def subject_of(name: str, kind: str, device: str = "cpu", is_last: bool = False) -> Subject:
    """A new copy; is_last: the process uses it for one sequence and ends, so that no copy is needed."""
    models, batches = _prepared(name, device)
    model = models[kind] if is_last else copy.deepcopy(models[kind])
    own = [{name: value.clone() for name, value in batch.items()} for batch in batches]
    return Subject(kind, PACKAGES[name], capture(model) if kind == "captured" else model, own)
