"""MACE with Equitune: the ASE calculator, and files for LAMMPS."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ase.data import chemical_symbols
from mace.calculators import MACECalculator as Stock
from mace.modules import models
from torch import Tensor

from autotune.models.accelerate import accelerate
from autotune.models.capture import capture as captured
from autotune.models.lammps import RankGraph, compile_energies, ready_copy
from autotune.models.mace.patched import forward_for_lammps
from autotune.models.stand_ins import CONVOLUTIONS
from kernelgen.errors import InputError

# MACE's ASE calculator with Equitune in its models.
#
# Change ``from mace.calculators import MACECalculator`` to ``from autotune.models.mace.use import MACECalculator`` and
# nothing else. For ``mace_mp`` and ``mace_off``, which download a model: ``accelerate(mace_mp(...))``.


class MACECalculator(Stock):
    """Takes the arguments of MACE's class, and accelerates each model as the last step.

    So it follows what these arguments do to the models: ``default_dtype`` converts them, ``compile_mode`` compiles them
    at their first call, and with ``enable_cueq`` cuEquivariance computes what Equitune does not, such as the symmetric
    contraction. ``enable_oeq`` brings nothing: it exchanges convolutions alone. Warns if no convolution is Equitune's.

    capture: on a GPU each step of energies, forces and stress is one launch (see :func:`autotune.capture`), which is
    faster for small systems. InputError together with ``compile_mode``.

    acceleration: the table of what was replaced.
    """

    models: list[Any]

    def __init__(self, *arguments: Any, capture: bool = False, **options: Any) -> None:
        if capture and options.get("compile_mode"):
            raise InputError("capture and compile_mode are both given; expected one of them")
        super().__init__(*arguments, **options)
        self.acceleration = accelerate(self)
        if capture:
            self.models = [captured(model) for model in self.models]
        places = [place for place in self.acceleration.places if place.kind == CONVOLUTIONS]
        if not any(place.replaced for place in places):
            reasons = "; ".join(dict.fromkeys(place.detail for place in places)) or "accelerate found none"
            warnings.warn(f"no convolution of the model is Equitune's: {reasons}", stacklevel=2)


# MACE's models for LAMMPS.


def compile_for_lammps(
    model: torch.nn.Module, path: str | os.PathLike, *, head: int = 0, options: Mapping[str, Any] | None = None
) -> Path:
    """Write a model for LAMMPS on any number of ranks, without Python, by ``kernelgen/packs/cpp/pair_equitune.cpp``.

    The model is copied, accelerated, traced with its forces inside and compiled by AOTInductor, for CPUs and one thread
    a rank. What is compiled calls MACE as LAMMPS's ML-IAP does: each rank computes its atoms, and ghosts' features come
    from other ranks. ``equitune pack`` makes the pack of its kernels.

    path: of the ``.pt2`` file. head: index of the model's head. options: of torch's compiler. InputError for another
    model than MACE's of energies, or one whose features include charges or spins.
    """
    if not isinstance(model, models.MACE) or hasattr(model, "joint_embedding"):
        kind = type(model).__name__
        raise InputError(f"model is a {kind}; expected a MACE or ScaleShiftMACE of positions and elements alone")
    ready = ready_copy(model)
    accelerate(ready)
    elements = [chemical_symbols[int(number)] for number in model.atomic_numbers]
    dtype, kinds = next(ready.parameters()).dtype, torch.arange(len(elements))
    forward = forward_for_lammps(ready)

    def energies(graph: RankGraph) -> Tensor:
        data = {
            "vectors": -graph.vectors.to(dtype),
            "node_attrs": (graph.elements[:, None] == kinds).to(dtype),
            "edge_index": torch.stack((graph.sender, graph.receiver)),
            "batch": graph.zeros,
            "head": torch.tensor([head]),
            "natoms": (graph.atoms, graph.ghosts),
            "lammps_class": graph.exchange(),
        }
        return forward(data, training=False, compute_force=False, lammps_mliap=True)["node_energy"]

    return compile_energies(energies, float(model.r_max), elements, path, options)
