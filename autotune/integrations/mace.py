"""MACE's ASE calculator with Equitune in its models, and models for LAMMPS without Python.

Change ``from mace.calculators import MACECalculator`` to ``from autotune.integrations.mace import MACECalculator`` and
nothing else. For ``mace_mp`` and ``mace_off``, which download a model: ``accelerate(mace_mp(...))``.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from ase.data import chemical_symbols
from mace.calculators import MACECalculator as Stock
from mace.modules import models
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autotune.captured.capture import capture as captured
from autotune.integrations.accelerate import accelerate
from autotune.integrations.acceleration import CONVOLUTIONS
from autotune.integrations.blocks.mace import forward_for_lammps
from kernelgen.errors import InputError
from kernelgen.packs.ranks import Exchange


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
    ready = copy.deepcopy(model).cpu().eval().requires_grad_(False)
    accelerate(ready)
    elements = [chemical_symbols[int(number)] for number in model.atomic_numbers]
    # Any graph will do: 4 atoms and 3 ghosts, of which the last sends no edge.
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 1, 2], [1, 0, 3, 2, 0, 1, 2, 1]])
    inputs = (
        torch.rand(7, 3, dtype=torch.float64),
        torch.zeros_like(edges[0, :7]),
        edges,
        torch.zeros_like(edges[0, :4]),
    )
    traced = make_fx(_of_a_rank(ready, len(elements), head), tracing_mode="symbolic", _allow_non_fake_inputs=True)(
        *inputs
    )
    rows, count, atoms = (torch.export.Dim(name, min=2) for name in ("rows", "edges", "atoms"))
    program = torch.export.export(traced, inputs, dynamic_shapes=({0: rows}, {0: rows}, {1: count}, {0: atoms}))
    facts = {"cutoff": repr(float(model.r_max)), "elements": " ".join(elements)}
    chosen = {"cpp.threads": 1, "aot_inductor.metadata": facts} | dict(options or {})
    torch._inductor.aoti_compile_and_package(program, package_path=os.fspath(path), inductor_configs=chosen)
    return Path(path)


def _of_a_rank(model: torch.nn.Module, count: int, head: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Energies [atoms] of a rank's atoms, and forces [atoms and ghosts, 3] by what it computes; count: of elements."""
    dtype, kinds = next(model.parameters()).dtype, torch.arange(count)
    forward = forward_for_lammps(model)

    def step(positions: Tensor, elements: Tensor, edge_index: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.detach().requires_grad_()
        sender, receiver = edge_index
        atoms = zeros.shape[0]
        data = {
            "vectors": (positions[receiver] - positions[sender]).to(dtype),
            "node_attrs": (elements[:, None] == kinds).to(dtype),
            "edge_index": edge_index,
            "batch": zeros,
            "head": torch.tensor([head]),
            "natoms": (atoms, positions.shape[0] - atoms),
            "lammps_class": Exchange(),
        }
        energies = forward(data, training=False, compute_force=False, lammps_mliap=True)["node_energy"]
        (gradient,) = torch.autograd.grad(energies.sum(), positions)
        return energies.detach(), -gradient

    return step
