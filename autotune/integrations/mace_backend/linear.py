"""MACE's equivariant linear map: products of blocks with matrices, and a bias of even scalars."""

from __future__ import annotations

from typing import Any

import torch
from mace_core.kernels.canonical import linear_weight_scale
from torch import Tensor

from autotune.integrations.ir_mul.linear import BlockMatrices, Path
from autotune.integrations.mace_backend.canonical import DTYPES, checked, drawn, pairs_of
from kernelgen.problem.irreps import blocks_of


class BackendLinear(torch.nn.Module):
    """Features ``[nodes, irreps_in]`` in ``ir_mul`` -> ``[nodes, irreps_out]``.

    ``weight`` holds the matrix of each pair of blocks, [copies of the input, copies of the output], one after the
    other: the canonical weights in another order.
    """

    form: Any  # BlockMatrices
    order: Tensor
    scales: Tensor
    bias_places: Tensor

    def __init__(self, descriptor: Any) -> None:
        super().__init__()
        dtype, pairs = DTYPES[descriptor.precision], pairs_of(descriptor.irreps_in, descriptor.irreps_out)
        paths, at = [], 0
        for pair in pairs:
            paths.append(Path(pair.x.offset, pair.y.offset, at, pair.x.mul, pair.y.mul, pair.y.dim, 1.0))
            at += paths[-1].numel
        outputs = blocks_of(descriptor.irreps_out)
        dims = tuple(_width(irreps) for irreps in (descriptor.irreps_in, descriptor.irreps_out))
        self.__dict__["form"] = BlockMatrices(paths, (dims[0], dims[1]))
        order = [pair.weights.flatten() for pair in pairs]
        self._keep("order", torch.cat(order) if order else torch.empty(0, dtype=torch.int64))
        self._keep("scales", _scales(descriptor.irreps_in, pairs))
        places = [
            place
            for block in outputs
            if descriptor.has_bias and block.text.endswith("x0e")
            for place in range(block.offset, block.offset + block.mul)
        ]
        self._keep("bias_places", torch.tensor(places, dtype=torch.int64))
        self.weight = torch.nn.Parameter(torch.zeros(at, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(len(places), dtype=dtype)) if places else None

    def _keep(self, name: str, table: Tensor) -> None:
        self.register_buffer(name, table, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        form: BlockMatrices = self.form
        found = form(features, self.weight) if form.paths else features.new_zeros(len(features), form.dims["y"])
        if self.bias is None:
            return found
        return found + self.bias.new_zeros(form.dims["y"]).index_copy(0, self.bias_places, self.bias)

    def to_canonical(self) -> dict[str, Tensor]:
        """``weight`` and ``bias``, empty without one."""
        weight = self.weight.detach()
        bias = weight.new_empty(0) if self.bias is None else self.bias.detach()
        return {"weight": torch.empty_like(weight).index_copy_(0, self.order, weight), "bias": bias}

    def load_canonical(self, state: dict[str, Tensor]) -> None:
        """Take over such weights; InputError for others."""
        weight = checked(state, "weight", tuple(self.weight.shape))
        with torch.no_grad():
            self.weight.copy_(weight.to(self.order.device).index_select(0, self.order))
            if self.bias is not None:
                self.bias.copy_(checked(state, "bias", tuple(self.bias.shape)))

    def initialize_weights(self, seed: int) -> None:
        """Normal numbers at MACE's scales, a bias of zeros."""
        values = drawn(tuple(self.weight.shape), seed) * self.scales.cpu()
        self.load_canonical({"weight": values, "bias": self.to_canonical()["bias"] * 0})


def _width(irreps: str) -> int:
    return sum(block.mul * block.dim for block in blocks_of(irreps))


def _scales(irreps_in: str, pairs: list[Any]) -> Tensor:
    """MACE's scale of each canonical weight, float64."""
    found = torch.ones(sum(pair.weights.numel() for pair in pairs), dtype=torch.float64)
    for pair in pairs:
        found[pair.weights] = linear_weight_scale(irreps_in, pair.irrep)
    return found
