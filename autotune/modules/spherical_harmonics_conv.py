"""Convolution on edge vectors, which forms their spherical harmonics inside its kernels.

:class:`SphericalHarmonicsConv` takes edge vectors where :class:`TensorProductConv` takes their harmonics. It gives
gradients with respect to the vectors, from which models compute forces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autotune.database.edge_vectors import directions_inside
from autotune.modules.spherical_harmonics import SphericalHarmonics
from autotune.modules.tensor_product import Irreps, TensorProductConv
from kernelgen.device import device_facts
from kernelgen.ops.base import DTYPES
from kernelgen.ops.edge_vectors import FUSED, HarmonicProduct
from kernelgen.ops.harmonics_operator import HarmonicsOperator
from kernelgen.ops.operator import Operator
from kernelgen.problem.edge_vectors import VectorProblem


class SphericalHarmonicsConv(TensorProductConv):
    """``TensorProductConv(irreps_in1, harmonics.irreps_out, ...)`` of the harmonics of edge vectors.

    harmonics: degrees, normalisation and whether vectors are normalised first. fuse: True forms the harmonics of an
    edge in registers, inside the kernels of the value and first gradients, and never writes them to memory; False
    computes them in separate kernels. None, the default, chooses for each direction what measured faster for this
    problem, device and graph class, and fuses where nothing was measured. Harmonics are always separate for gradients
    that are differentiated again, torch.compile, torch.func, and products other than weighted ``uvu`` with one copy of
    each degree. Results agree to rounding. The other arguments are those of :class:`TensorProductConv`.
    """

    def __init__(
        self, irreps_in1: Irreps, harmonics: SphericalHarmonics, *args: Any, fuse: bool | None = None, **options: Any
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
        """As in :class:`TensorProductConv`, with edge_vectors ``[edges, 3]`` for edge_attrs; same keyword arguments."""
        return super().forward(node_feats, edge_vectors, weights, sender, receiver, **graph)

    def _run(
        self, operator: Operator, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, *edges: torch.Tensor, **graph: Any
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return operator(x, self.harmonics(y), w, *edges, **graph)
        both = self._both.get(operator)
        if both is None:
            harmonics = self.harmonics._operator_for(x.device, x.dtype)
            both = self._both[operator] = HarmonicProduct(operator, harmonics, self._inside(operator, harmonics))
        return both(x, y, w, *edges, **graph)

    def _inside(self, operator: Operator, harmonics: HarmonicsOperator) -> Sequence[str]:
        if self.fuse is not None or not self.problem.is_channelwise:
            return FUSED if self.fuse else ()
        problem = VectorProblem(self.problem, harmonics.problem)
        where = (DTYPES[operator.dtype], self.layout, device_facts(operator.device), self.graph_class)
        return directions_inside(problem, *where, self.strict)

    def _forget_operators(self) -> None:
        super()._forget_operators()
        self._both: dict[Operator, HarmonicProduct] = {}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_both": {}}
