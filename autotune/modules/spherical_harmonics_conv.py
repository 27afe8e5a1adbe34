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
from autotune.modules.tensor_product_conv import TensorProductConv
from autotune.workload.graph_class import GraphClass
from kernelgen.device import device_facts
from kernelgen.ops.base import DTYPES
from kernelgen.ops.harmonics import HarmonicsOperator
from kernelgen.ops.product import Operator
from kernelgen.ops.vectors import FUSED, HarmonicProduct
from kernelgen.problem.harmonics import VectorProblem
from kernelgen.problem.irreps import Irreps


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
        # Built once the harmonics are there.
        place = options.pop("device", None), options.pop("dtype", None)
        super().__init__(irreps_in1, harmonics.irreps_out, *args, **options)
        self.harmonics = harmonics
        self.fuse = fuse
        self._build_for(*place)

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
        self, operator: Any, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, *edges: torch.Tensor, **graph: Any
    ) -> torch.Tensor:
        if isinstance(operator, Operator):  # torch traces this call
            y = self.harmonics(y)
        return operator(x, y, w, *edges, **graph)

    def _run_by(self, operator: Operator, graph_class: GraphClass | None, device: torch.device) -> HarmonicProduct:
        vectors = None if graph_class is None else 2**graph_class.log2_edges
        harmonics = self.harmonics.operator_for(device, operator.dtype, vectors)
        return HarmonicProduct(operator, harmonics, self._inside(operator, harmonics, graph_class, device))

    def _inside(
        self,
        operator: Operator,
        harmonics: HarmonicsOperator,
        graph_class: GraphClass | None,
        device: torch.device,
    ) -> Sequence[str]:
        if self.fuse is not None or not self.problem.is_channelwise:
            return FUSED if self.fuse else ()
        problem = VectorProblem(self.problem, harmonics.problem)
        where = (DTYPES[operator.dtype], self.layout, device_facts(device), graph_class)
        return directions_inside(problem, *where, self.strict)
