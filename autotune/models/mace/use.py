"""MACE with Equitune: the ASE calculator, and files for LAMMPS."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes
from ase.data import chemical_symbols
from ase.stress import full_3x3_to_voigt_6_stress
from mace.calculators import MACECalculator as Stock
from mace.modules import models
from torch import Tensor

from autotune.models.accelerate import accelerate
from autotune.models.lammps import TYPICAL_SIZE, RankGraph, compile_energies, ready_copy
from autotune.models.mace.package import PACKAGE
from autotune.models.mace.patched import forward_for_lammps
from autotune.models.package import quietly, require_device
from autotune.models.padding import triple_product
from autotune.models.step import KeptInputs, QuickSteps, changes_since, in_dtype, to_host
from kernelgen.errors import InputError

# MACE's ASE calculator with Equitune in its models.
#
# Change ``from mace.calculators import MACECalculator`` to ``from autotune.models.mace.use import MACECalculator`` and
# nothing else. For ``mace_mp`` and ``mace_off``, which download a model: ``accelerate(mace_mp(...))``.


class MACECalculator(Stock, QuickSteps):
    """Takes the arguments of MACE's class, and accelerates each model as the last step.

    So it follows what these arguments do to the models: ``default_dtype`` converts them, ``compile_mode`` compiles them
    at their first call, and with ``enable_cueq`` cuEquivariance computes what Equitune does not, such as the symmetric
    contraction. ``enable_oeq`` brings nothing: it exchanges convolutions alone. Warns if all convolutions stay MACE's.
    What a simulation does not change stays on the device between steps (see ``autotune.models.step``), but with
    ``compile_mode`` and padding, for which MACE makes the inputs.

    capture: on a GPU each step of energies, forces and stress is one launch (see :func:`autotune.capture`). None: after
    ten steps of the same atoms; True: at once; False: never. On a CPU no step is: True only pads it.
    InputError together with ``compile_mode``.

    acceleration: the table of what was replaced. step: how inputs are made.
    """

    models: list[Any]
    check_state = changes_since

    def __init__(self, *arguments: Any, capture: bool | None = None, **options: Any) -> None:
        if capture and options.get("compile_mode"):
            raise InputError("capture and compile_mode are both given; expected one of them")
        require_device(*arguments, options.get("device"))
        with quietly():
            super().__init__(*arguments, **options)
        self.be_quick(accelerate(self), capture)
        self.acceleration.warn_without_convolutions()

    def why_stock(self) -> str:
        if self.use_compile:
            return "compile_mode pads them"
        return "pad_num_atoms or pad_num_edges is given" if self.pad_num_atoms > 0 or self.pad_num_edges > 0 else ""

    def model_cutoff(self) -> float:
        return self.r_max

    def _atoms_to_batch(self, atoms: Atoms) -> Any:
        """MACE's batch of one structure; all of MACE's calculator takes its inputs from here."""
        return self._quick_batch(atoms) if self.steps_quickly() else super()._atoms_to_batch(atoms)

    def _quick_batch(self, atoms: Atoms) -> Any:
        """The kept batch with what moved."""
        kept, graph = self.kept_inputs().of(atoms, self._depends_on(atoms), lambda: self._stocks_batch(atoms))
        batch = copy.copy(kept)
        dtype, moving = batch.positions.dtype, PACKAGE.moving(self.models[0], graph)
        for name, value in in_dtype(moving, dtype).items():
            setattr(batch, name, value)
        cell, volume = moving["cell"], triple_product(moving["cell"])
        # Zeros where a cell has no volume, as MACE does.
        reciprocal = 2 * torch.pi * torch.linalg.cross(cell[[1, 2, 0]], cell[[2, 0, 1]]) / volume
        batch.rcell = torch.where(volume != 0, reciprocal, 0.0).to(dtype)
        batch.volume = volume.to(dtype).reshape(batch.volume.shape)
        return batch

    def _stocks_batch(self, atoms: Atoms) -> Any:
        return super()._atoms_to_batch(atoms)

    def _depends_on(self, atoms: Atoms) -> tuple[Any, ...]:
        """All that MACE makes a batch of, beside positions, cell and species."""
        self.arrays_keys.update({self.charges_key: "charges"})  # as MACE does
        return (
            *(self.head, self.default_dtype, self.info_keys, self.arrays_keys, self.z_table.zs),
            [atoms.info.get(key) for key in self.info_keys.values()],
            [atoms.arrays.get(key) for key in self.arrays_keys.values()],
        )

    def calculate(self, atoms: Any = None, properties: Any = None, system_changes: Any = all_changes) -> None:
        """MACE's results; those of models of energies come from the device by one copy."""
        if self.model_type != "MACE" or self.compute_atomic_stresses or not self.steps_quickly():
            return super().calculate(atoms, properties, system_changes)
        Calculator.calculate(self, atoms)
        options = {"compute_stress": True, "training": False}
        options |= {"compute_edge_forces": False, "compute_atomic_stresses": False}
        kept = self.kept_inputs()
        outputs = kept.launched(
            self.models,
            atoms,
            self._depends_on(atoms),
            lambda: self._stocks_batch(atoms),
            names=tuple(_UNITS),
            **options,
        )
        if outputs is None:
            batch = self._quick_batch(atoms).to_dict()
            outputs = [model({name: _own(value) for name, value in batch.items()}, **options) for model in self.models]
        names = [name for name in _UNITS if outputs[0].get(name) is not None]
        on_host = to_host(*(torch.stack([output[name].detach() for output in outputs]) for name in names))
        alone = self._energies_alone(kept)
        self.results = self._results_of(dict(zip(names, on_host, strict=True)), alone)

    def _energies_alone(self, kept: KeptInputs[Any]) -> np.ndarray:
        """The energies [atoms] that the atoms would have without neighbors; asked anew if they may have changed."""
        module = self.models[0].atomic_energies_fn
        energies = module.atomic_energies
        known, version, alone = kept.derived.get("alone", (None, 0, None))
        if known is not energies or energies.is_inference() or version != energies._version:
            batch = kept.inputs
            heads = batch["head"][batch["batch"]]
            alone = module(batch["node_attrs"]).gather(1, heads[:, None]).squeeze(1).detach().cpu().numpy()
            kept.derived["alone"] = (energies, 0 if energies.is_inference() else energies._version, alone)
        return alone

    def _results_of(self, of_models: dict[str, Tensor], alone: np.ndarray) -> dict[str, Any]:
        """ASE's results of values [models, ...] of each name, and the energies of isolated atoms [atoms].

        Variances are in squares of the units. MACE 0.3.16 gives other powers of the factors, by device.
        """
        results: dict[str, Any] = {}
        for name, values in of_models.items():
            power_of_energy, power_of_length = _UNITS[name]
            unit = self.energy_units_to_eV**power_of_energy * self.length_units_to_A**power_of_length
            values = values[:, 0] if name in _OF_STRUCTURES else values
            results[name] = _numbers(values.mean(dim=0) if len(values) > 1 else values[0]) * unit
            if len(values) > 1 and name in ("energy", "forces", "stress", "dipole"):
                results[f"{name}_comm"] = values.numpy() * unit
                results[f"{name}_var"] = _numbers(values.var(dim=0, unbiased=False)) * unit**2
        if "energy" in results:
            results["free_energy"] = results["energy"]
        if "node_energy" in results:
            results["energies"] = results["node_energy"].copy()
            results["node_energy"] -= alone
        if "stress" in results:
            results["stress"] = full_3x3_to_voigt_6_stress(results["stress"])
        return results


# Powers of the units of energy and length that MACE converts results by.
_UNITS = {
    "energy": (1, 0),
    "node_energy": (1, 0),
    "forces": (1, -1),
    "stress": (1, -3),
    "dipole": (0, 0),
    "charges": (0, 0),
    "polarizability": (0, 0),
    "polarizability_sh": (0, 0),
}
_OF_STRUCTURES = ("energy", "stress", "dipole", "polarizability", "polarizability_sh")


def _numbers(values: Tensor) -> Any:
    return values.item() if values.ndim == 0 else values.numpy()


def _own(value: Any) -> Any:
    """For one model, which asks for gradients of some of its inputs."""
    return value.detach() if isinstance(value, Tensor) else value


# MACE's models for LAMMPS.


def compile_for_lammps(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    head: int = 0,
    device: torch.device | str = "cpu",
    size: tuple[int, int] = TYPICAL_SIZE,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model for LAMMPS on any number of ranks, without Python, by ``kernelgen/packs/cpp/pair_equitune.cpp``.

    The model is copied, accelerated, traced with its forces inside and compiled by AOTInductor, for a CPU and one
    thread a rank, or for this machine's GPU. What is compiled calls MACE as LAMMPS's ML-IAP does: each rank computes
    its atoms, and ghosts' features come from other ranks. ``equitune pack`` makes the pack of its kernels. path: of the
    ``.pt2`` file. head: index of the model's head. device: a GPU, or the CPU. size: edges and atoms of a rank, for
    which a GPU's schedules are chosen. options: of torch's compiler. InputError for another model than MACE's of
    energies, or one whose features include charges or spins.
    """
    if not isinstance(model, models.MACE) or hasattr(model, "joint_embedding"):
        kind = type(model).__name__
        raise InputError(f"model is a {kind}; expected a MACE or ScaleShiftMACE of positions and elements alone")
    ready = ready_copy(model, device)
    accelerate(ready)
    elements = [chemical_symbols[int(number)] for number in model.atomic_numbers]
    dtype, kinds = next(ready.parameters()).dtype, torch.arange(len(elements), device=device)
    forward = forward_for_lammps(ready)

    def energies(graph: RankGraph) -> Tensor:
        data = {
            "vectors": -graph.vectors.to(dtype),
            "node_attrs": (graph.elements[:, None] == kinds).to(dtype),
            "edge_index": torch.stack((graph.sender, graph.receiver)),
            "batch": graph.zeros,
            "head": torch.tensor([head], device=device),
            "natoms": (graph.atoms, graph.ghosts),
            "lammps_class": graph.exchange(),
        }
        return forward(data, training=False, compute_force=False, lammps_mliap=True)["node_energy"]

    return compile_energies(energies, float(model.r_max), elements, path, device=device, size=size, options=options)
