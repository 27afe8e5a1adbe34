"""MACE's symmetric contraction, with weights of MACE's basis of polynomials."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from mace_core.clebsch_gordan import reduced_basis
from mace_core.clebsch_gordan.irreps import Irreps
from mace_core.kernels.canonical import contraction_path_labels, symmetric_contraction_weight_scale
from mace_core.kernels.capabilities import UnsupportedDescriptorError
from torch import Tensor

from autotune.integrations.mace_backend.canonical import DTYPES, checked, drawn
from autotune.modules.symmetric_contraction import TunedContraction
from kernelgen.arithmetic.contraction_couplings import coordinates, polynomials
from kernelgen.compat import without_autocast
from kernelgen.problem.contraction import ContractionProblem


class Piece(NamedTuple):
    """Canonical weights that are neighbours: those of a block of the output and a degree."""

    block: int
    degree: int
    polynomials: Tensor  # [2l+1, inputs ** degree, number]


class BackendContraction(torch.nn.Module):
    """Features ``[nodes, inputs * channels]`` in ``ir_mul``, elements ``[nodes]`` -> ``[nodes, outputs * channels]``.

    ``weight`` [elements, polynomials, channels] is canonical. A small matrix product turns it into weights of the
    kernel's basis, in each call: the two bases span the same polynomials.
    """

    to_basis: Tensor
    path_counts: Tensor

    def __init__(self, descriptor: Any) -> None:
        super().__init__()
        irreps = descriptor.irreps_in, descriptor.irreps_out
        problem = ContractionProblem(*irreps, descriptor.correlation, descriptor.num_features)
        pieces, dtype = _pieces(descriptor), DTYPES[descriptor.precision]
        self.contraction = TunedContraction(problem, layout="ir_mul")
        self.register_buffer("to_basis", _to_basis(problem, pieces).to(dtype), persistent=False)
        counts = [piece.polynomials.shape[2] for piece in pieces]
        self.register_buffer("path_counts", torch.tensor(counts), persistent=False)
        shape = (descriptor.num_elements, sum(counts), descriptor.num_features)
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))

    def forward(self, features: Tensor, elements: Tensor) -> Tensor:
        with without_autocast(self.weight):
            weight = torch.matmul(self.to_basis, self.weight)
        return self.contraction.contract(features, weight, elements)

    def to_canonical(self) -> dict[str, Tensor]:
        """``weight``, and ``path_counts``: how many polynomials each piece has."""
        return {"weight": self.weight.detach(), "path_counts": self.path_counts.clone()}

    def load_canonical(self, state: dict[str, Tensor]) -> None:
        """Take over such weights; InputError for others."""
        weight = checked(state, "weight", tuple(self.weight.shape))
        with torch.no_grad():
            self.weight.copy_(weight)

    def initialize_weights(self, seed: int) -> None:
        """Normal numbers at MACE's scale."""
        self.load_canonical({"weight": drawn(tuple(self.weight.shape), seed) * symmetric_contraction_weight_scale()})


def _pieces(descriptor: Any) -> list[Piece]:
    """In canonical order, which the labels of the weights tell: by block, then degree, or the other way."""
    build = getattr(reduced_basis, f"{descriptor.basis}_symmetric_tensor_product_basis")
    blocks = [str(irrep) for _, irrep in Irreps.parse(descriptor.irreps_out).terms]
    degrees = range(1, descriptor.correlation + 1)
    found = {}
    for number, block in enumerate(blocks):
        for degree in degrees:
            array = torch.from_numpy(build(descriptor.irreps_in, degree, block)[block].copy())
            found[number, degree] = Piece(number, degree, array.reshape(*array.shape[:2], -1).permute(1, 2, 0))
    labels = contraction_path_labels(
        descriptor.irreps_in, descriptor.irreps_out, descriptor.correlation, basis=descriptor.basis
    )
    told = [(label.rpartition(":")[2], label.count("|") + 1) for label in labels]
    for order in (sorted(found), sorted(found, key=lambda key: (key[1], key[0]))):
        if [(blocks[b], d) for b, d in order for _ in range(found[b, d].polynomials.shape[2])] == told:
            return [found[key] for key in order]
    raise UnsupportedDescriptorError(
        f"mace_core names the weights of {descriptor} {told}, an order that Equitune does not know; build this model "
        "with MACE's reference backend"
    )


def _to_basis(problem: ContractionProblem, pieces: list[Piece]) -> Tensor:
    """[polynomials of the kernel's basis, canonical ones], float64."""
    basis = polynomials(problem)
    columns = []
    for block, degree, given in pieces:
        column = torch.zeros(len(basis), given.shape[2], dtype=torch.float64)
        rows = [row for row, one in enumerate(basis) if (one.block, one.degree) == (block, degree)]
        column[rows] = coordinates(problem, block, degree, given)
        columns.append(column)
    return torch.cat(columns, dim=1)
