"""A model of Equitune's modules, exported with its forces, gives the same from a C++ program without Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exported import Program, export
from reference import float64, relative_error

from autotune import SymmetricContraction
from autotune.modules.convolution import TensorProductConv
from autotune.modules.rows import SphericalHarmonics

TOLERANCE = 1e-12
ELEMENTS = 3
IRREPS = "4x0e+4x1o"
PATHS = [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True), (1, 0, 1, "uvu", True), (1, 1, 0, "uvu", True)]


class Model(torch.nn.Module):
    """Harmonics, two convolutions, a symmetric contraction; energies of atoms and forces."""

    def __init__(self) -> None:
        super().__init__()
        self.harmonics = SphericalHarmonics("0e+1o", normalize=True, normalization="component")
        self.conv = TensorProductConv(IRREPS, "0e+1o", IRREPS, PATHS, shared_weights=False)
        self.radial = torch.nn.Linear(3, self.conv.weight_numel)
        self.embed = torch.nn.Embedding(ELEMENTS, self.conv.irreps_in1.dim)
        self.contraction = SymmetricContraction(IRREPS, "4x0e", 2, ELEMENTS)
        self.requires_grad_(False)

    def forward(self, positions: torch.Tensor, elements: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions = positions.requires_grad_(True)
        sender, receiver = edges
        vectors = positions[receiver] - positions[sender]
        weights = self.radial(torch.exp(-((vectors.norm(dim=1, keepdim=True) - torch.arange(3.0)) ** 2)))
        harmonics, x = self.harmonics(vectors), self.embed(elements)
        for _ in range(2):
            x = self.conv(x, harmonics, weights, sender, receiver)
        energies = self.contraction(x, elements).sum(1)
        (gradient,) = torch.autograd.grad([energies.sum()], [positions])
        return energies.detach(), -gradient.detach()


def graph(atoms: int, edges: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(atoms)
    sender = torch.randint(atoms, (edges,), generator=generator)
    receiver = (sender + torch.randint(1, atoms, (edges,), generator=generator)) % atoms
    positions = 2 * torch.randn(atoms, 3, generator=generator, dtype=torch.float64)
    return positions, torch.randint(ELEMENTS, (atoms,), generator=generator), torch.stack((sender, receiver))


@pytest.mark.slow
def test_energies_and_forces_of_a_program_without_python(tmp_path: Path) -> None:
    with float64():
        torch.manual_seed(0)
        model = Model()
        atoms, edges = torch.export.Dim("atoms", min=2), torch.export.Dim("edges", min=2)
        path = tmp_path / "model.pt2"
        export(lambda *given: model(*given), graph(12, 70), ({0: atoms}, {0: atoms}, {1: edges}), path)
        program = Program(tmp_path)
        for size in ((12, 70), (40, 300), (5, 9)):
            inputs = graph(*size)
            wanted = model(*inputs)
            found = program.run(path, tuple(tensor.detach() for tensor in inputs))
            assert [tensor.shape for tensor in found] == [tensor.shape for tensor in wanted]
            assert max(relative_error(a, b) for a, b in zip(found, wanted, strict=True)) < TOLERANCE
