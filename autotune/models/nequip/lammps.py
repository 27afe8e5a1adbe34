"""NequIP's and Allegro's models for LAMMPS. Read in nequip 0.19.1, ``nequip/integrations/lammps_mliap``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from nequip.data import AtomicDataDict
from nequip.model.modify_utils import get_all_modifiers, modify
from torch import Tensor

from autotune.models.accelerate import accelerate
from autotune.models.lammps import TYPICAL_SIZE, RankGraph, compile_energies, ready_copy
from kernelgen.errors import InputError

_EXCHANGE, _NO_FORCES = "enable_LAMMPSMLIAPGhostExchange", "disable_ForceStressOutput"


def compile_for_lammps(
    model: torch.nn.Module,
    path: str | os.PathLike,
    *,
    device: torch.device | str = "cpu",
    size: tuple[int, int] = TYPICAL_SIZE,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model for LAMMPS on any number of ranks, without Python, by ``kernelgen/packs/cpp/pair_equitune.cpp``.

    The model is copied, accelerated, traced with its forces inside and compiled by AOTInductor, for a CPU and one
    thread a rank, or for this machine's GPU. What is compiled calls NequIP as LAMMPS's ML-IAP does: each rank computes
    its atoms, and ghosts' features come from other ranks; Allegro needs none of these. ``equitune pack`` makes the pack
    of its kernels. path: of the ``.pt2`` file. device: a GPU, or the CPU. size: edges and atoms of a rank, for which a
    GPU's schedules are chosen. options: of torch's compiler. InputError for another model than NequIP's of energies
    whose types are elements, or one that takes more than positions and types.
    """
    _check(model)
    ready: Any = ready_copy(model, device)
    modifiers = [{"modifier": name} for name in (_EXCHANGE, _NO_FORCES) if name in get_all_modifiers(ready)]
    ready = modify(ready, modifiers)
    accelerate(ready)

    def energies(graph: RankGraph) -> Tensor:
        data = {
            AtomicDataDict.EDGE_VECTORS_KEY: graph.vectors,
            AtomicDataDict.EDGE_INDEX_KEY: torch.stack((graph.receiver, graph.sender)),
            AtomicDataDict.ATOM_TYPE_KEY: graph.elements,
            AtomicDataDict.LMP_MLIAP_DATA_KEY: graph.exchange(),
        }
        # Models without exchange give energies of ghosts too.
        return ready(data)[AtomicDataDict.PER_ATOM_ENERGY_KEY][: graph.atoms]

    return compile_energies(
        energies, float(ready.metadata["r_max"]), ready.type_names, path, device=device, size=size, options=options
    )


def _check(model: Any) -> None:
    if not getattr(model, "is_graph_model", False) or _NO_FORCES not in get_all_modifiers(model):
        kind = type(model).__name__
        raise InputError(f"model is a {kind}; expected a GraphModel of NequIP's with energies and forces")
    if any(len(getattr(module, "categorical_graph_field_embed_modules", ())) for module in model.modules()):
        raise InputError("the model embeds fields of a graph, which LAMMPS does not have; expected one of types alone")
