"""MACE's skip connection: a linear map for each element, weighted by the element attributes."""

from __future__ import annotations

from typing import Any

import torch
from mace_core.clebsch_gordan.irreps import Irreps
from mace_core.kernels.canonical import fully_connected_tp_weight_scale
from torch import Tensor

from autotune.integrations.ir_mul.species import species_of
from autotune.integrations.ir_mul.species_product import ByElement, MatricesByElement, Path, by_element, dense
from autotune.integrations.mace_backend.canonical import DTYPES, checked, drawn, pairs_of


class BackendSkip(torch.nn.Module):
    """Features ``[nodes, irreps_in1]`` in ``ir_mul`` and scalars ``[nodes, scalars]`` -> ``[nodes, irreps_out]``.

    One-hot rows of scalars, as MACE has them, take a matrix product for each element that occurs; others a dense one.
    ``weight`` holds [copies of the input, scalars, copies of the output] for each pair of blocks.
    """

    product: Any  # ByElement
    order: Tensor
    scales: Tensor

    def __init__(self, descriptor: Any) -> None:
        super().__init__()
        pairs = pairs_of(descriptor.irreps_in1, descriptor.irreps_out)
        scalars = Irreps.parse(descriptor.irreps_in2).dimension
        count = sum(pair.weights.numel() for pair in pairs)
        paths, order, at = [], [], 0
        scales = torch.ones(scalars, count, dtype=torch.float64)
        for pair in pairs:
            paths.append(Path(pair.x, pair.y, at, scalars, 1.0))
            at += paths[-1].numel
            order.append((pair.weights[:, None] + count * torch.arange(scalars)[:, None]).flatten())
            scales[:, pair.weights.flatten()] = fully_connected_tp_weight_scale(pair.x.mul, scalars)
        dims = {"x": Irreps.parse(descriptor.irreps_in1).dimension, "y": Irreps.parse(descriptor.irreps_out).dimension}
        self.__dict__["product"] = by_element(paths, dims)
        self.register_buffer("order", torch.cat(order), persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.weight = torch.nn.Parameter(torch.zeros(at, dtype=DTYPES[descriptor.precision]))

    def forward(self, features: Tensor, attributes: Tensor) -> Tensor:
        product: ByElement = self.product
        species = species_of(attributes)
        if species is None:
            return dense(product.paths, product.dims, attributes, "y", features, self.weight)
        return MatricesByElement(product, species)(features, self.weight)

    def to_canonical(self) -> dict[str, Tensor]:
        """``weight`` [scalars, pairs of copies]."""
        weight = self.weight.detach()
        return {"weight": torch.empty_like(weight).index_copy_(0, self.order, weight).view(self.scales.shape)}

    def load_canonical(self, state: dict[str, Tensor]) -> None:
        """Take over such weights; InputError for others."""
        weight = checked(state, "weight", tuple(self.scales.shape)).to(self.order.device)
        with torch.no_grad():
            self.weight.copy_(weight.flatten().index_select(0, self.order))

    def initialize_weights(self, seed: int) -> None:
        """Normal numbers at MACE's scales."""
        self.load_canonical({"weight": drawn(tuple(self.scales.shape), seed) * self.scales.cpu()})
