"""Compiles energies of the atoms of one rank, and forces by what they come from, for LAMMPS."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kernelgen.packs.library import Exchange


@dataclass(frozen=True)
class RankGraph:
    """The atoms of a rank, then its ghosts, and the edges to its atoms.

    positions: [atoms and ghosts, 3], in Angstrom. elements: [atoms and ghosts], index in the model's list of elements.
    sender, receiver: [edges]; senders are atoms or ghosts. zeros: [atoms], the only structure's number.
    """

    positions: Tensor
    elements: Tensor
    sender: Tensor
    receiver: Tensor
    zeros: Tensor

    @property
    def atoms(self) -> int:
        return self.zeros.shape[0]

    @property
    def ghosts(self) -> int:
        return self.positions.shape[0] - self.atoms

    @property
    def vectors(self) -> Tensor:
        """[edges, 3], from receivers to senders."""
        return self.positions[self.sender] - self.positions[self.receiver]

    def exchange(self) -> Exchange:
        return Exchange(self.atoms, self.ghosts)


# Energies [atoms] or [atoms, 1] in eV.
Energies = Callable[[RankGraph], Tensor]


def ready_copy(model: torch.nn.Module) -> Any:
    """A copy on the CPU for inference, without gradients of parameters."""
    return copy.deepcopy(model).cpu().eval().requires_grad_(False)


def compile_energies(
    energies: Energies,
    cutoff: float,
    elements: Sequence[str],
    path: str | os.PathLike,
    options: Mapping[str, Any] | None,
) -> Path:
    """Trace energies with their forces, and compile them by AOTInductor, for CPUs and one thread a rank.

    cutoff: in Angstrom. elements: their symbols, in the model's order. path: of the ``.pt2`` file. options: of torch's
    compiler.
    """
    # Any graph will do: 4 atoms and 3 ghosts, of which the last sends no edge.
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 1, 2], [1, 0, 3, 2, 0, 1, 2, 1]])
    inputs = (
        torch.rand(7, 3, dtype=torch.float64),
        torch.zeros_like(edges[0, :7]),
        edges,
        torch.zeros_like(edges[0, :4]),
    )

    def step(positions: Tensor, kinds: Tensor, edge_index: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.detach().requires_grad_()
        graph = RankGraph(positions, kinds, edge_index[0], edge_index[1], zeros)
        found = energies(graph).to(torch.float64).view(-1)
        (gradient,) = torch.autograd.grad(found.sum(), positions)
        return found.detach(), -gradient

    traced = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    rows, count, atoms = (torch.export.Dim(name, min=2) for name in ("rows", "edges", "atoms"))
    program = torch.export.export(traced, inputs, dynamic_shapes=({0: rows}, {0: rows}, {1: count}, {0: atoms}))
    facts = {"cutoff": repr(cutoff), "elements": " ".join(elements)}
    chosen = {"cpp.threads": 1, "aot_inductor.metadata": facts} | dict(options or {})
    torch._inductor.aoti_compile_and_package(program, package_path=os.fspath(path), inductor_configs=chosen)
    return Path(path)
