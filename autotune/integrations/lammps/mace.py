"""MACE's models for LAMMPS."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ase.data import chemical_symbols
from mace.modules import models
from torch import Tensor

from autotune.integrations.accelerate import accelerate
from autotune.integrations.blocks.mace import forward_for_lammps
from autotune.integrations.lammps.compiled import RankGraph, compile_energies, ready_copy
from kernelgen.errors import InputError


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
