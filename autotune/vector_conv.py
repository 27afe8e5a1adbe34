"""The convolution on edge vectors: their spherical harmonics are formed inside its kernels.

:class:`SphericalHarmonicsConv` takes vectors where :class:`TensorProductConv` takes their harmonics, and gives
gradients with respect to the vectors, which is the way to forces.
"""

from __future__ import annotations

from typing import Any

import torch

from autotune.harmonics import SphericalHarmonics
from autotune.modules import Irreps, TensorProductConv
from kernelgen.fused import HarmonicProduct
from kernelgen.operators import Operator


class SphericalHarmonicsConv(TensorProductConv):
    """``TensorProductConv(irreps_in1, harmonics.irreps_out, ...)`` of the harmonics of edge vectors.

    harmonics: degrees, normalisation and whether vectors are normalised first. fuse: whether a kernel forms the
    harmonics of an edge in registers and never writes them to memory (the default); False computes them by a kernel of
    their own, as does everything that is no value and no first gradient: a gradient that is differentiated again,
    torch.compile, torch.func, products that are not weighted ``uvu`` with one copy of each degree. Results agree to
    rounding. The other arguments are those of :class:`TensorProductConv`.
    """

    def __init__(
        self, irreps_in1: Irreps, harmonics: SphericalHarmonics, *args: Any, fuse: bool = True, **options: Any
    ) -> None:
        super().__init__(irreps_in1, harmonics.irreps_out, *args, **options)
        self.harmonics = harmonics
        self.fuse = fuse

    def forward(  # type: ignore[override]
        self,
        node_feats: torch.Tensor,
        edge_vectors: torch.Tensor,
        weights: torch.Tensor,
        sender: torch.Tensor,
        receiver: torch.Tensor,
        **graph: Any,
    ) -> torch.Tensor:
        """As of :class:`TensorProductConv`, with edge_vectors ``[edges, 3]`` for edge_attrs; same keyword arguments."""
        return super().forward(node_feats, edge_vectors, weights, sender, receiver, **graph)

    def _run(
        self, operator: Operator, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, *edges: torch.Tensor, **graph: Any
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return operator(x, self.harmonics(y), w, *edges, **graph)
        both = self._both.get(operator)
        if both is None:
            harmonics = self.harmonics._operator_for(x.device, x.dtype)
            both = self._both[operator] = HarmonicProduct(operator, harmonics, self.fuse)
        return both(x, y, w, *edges, **graph)

    def _forget_operators(self) -> None:
        super()._forget_operators()
        self._both: dict[Operator, HarmonicProduct] = {}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_both": {}}
