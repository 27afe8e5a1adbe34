"""NequIP's blocks: the convolution as one, self-connections by type, the radial network without its last layer, edge
vectors of batches.
"""

from __future__ import annotations

from typing import Any, cast

import nequip
import torch
from nequip.data import AtomicDataDict
from nequip.nn._ghost_exchange_base import NoOpGhostExchangeModule
from nequip.nn._tp_scatter_base import TensorProductScatter
from nequip.nn.embedding import EdgeLengthNormalizer, SphericalHarmonicEdgeAttrs
from nequip.nn.interaction_block import InteractionBlock
from nequip.nn.mlp import ScalarLinearLayer, ScalarMLPFunction
from torch import Tensor
from torch.nn.utils import parametrize

from autotune.models.linear import rows_of, times_matrices
from autotune.models.species import NODE_TYPES
from autotune.models.stand_ins import has_hooks
from kernelgen.compat import is_tracing
from kernelgen.ops.edge_networks import few_pass_silu, hidden_features, is_one_kernel
from kernelgen.ops.radial_convolution import ACCURACY, multiply_by


class FusedTensorProductScatter(TensorProductScatter):
    """``tp`` is an :class:`autotune.models.stand_ins.AcceleratedConvolution`."""

    def forward(self, x: Tensor, edge_attr: Tensor, edge_weight: Tensor, edge_dst: Tensor, edge_src: Tensor) -> Tensor:
        """As NequIP's: gather by ``edge_src``, sum by ``edge_dst``."""
        return self.tp(x, edge_attr, edge_weight, edge_src, edge_dst)


class TypedInteractionBlock(InteractionBlock):
    """``sc`` is an :class:`autotune.models.species.TypedProduct`."""

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        """As NequIP's, whose self-connection also sees the types of the nodes."""
        kind = cast(type[InteractionBlock], type(self).__mro__[1])
        if torch.compiler.is_compiling():
            return kind.forward(self, data)
        token = NODE_TYPES.set(data[AtomicDataDict.ATOM_TYPE_KEY].view(-1))
        try:
            exchanges = type(self.ghost_exchange) is not NoOpGhostExchangeModule
            if kind is InteractionBlock and nequip.__version__ == _READ and not exchanges and _has_no_ghosts(data):
                return self._of_all_nodes(data)
            return kind.forward(self, data)
        finally:
            NODE_TYPES.reset(token)

    def _of_all_nodes(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        """As NequIP's where no nodes are ghosts: it cuts rows of ghosts off, which are launches and autograd nodes."""
        x = data[AtomicDataDict.NODE_FEATURES_KEY]
        sc = None if self.sc is None else self.sc(x, data[AtomicDataDict.NODE_ATTRS_KEY])
        data[AtomicDataDict.NODE_FEATURES_KEY] = self.linear_1(x)
        x = self.avg_num_neighbors_norm(data)[AtomicDataDict.NODE_FEATURES_KEY]
        edges = data[AtomicDataDict.EDGE_INDEX_KEY]
        weights = self.edge_mlp(data[AtomicDataDict.EDGE_EMBEDDING_KEY])
        x = self.linear_2(self.tp_scatter(x, data[AtomicDataDict.EDGE_ATTRS_KEY], weights, edges[0], edges[1]))
        data[AtomicDataDict.NODE_FEATURES_KEY] = x if sc is None else x + sc
        return data


# The version of NequIP whose block was read.
_READ = "0.19.1"


def _has_no_ghosts(data: AtomicDataDict.Type) -> bool:
    if is_tracing():
        return False  # sizes may be symbols
    rows = {data[name].shape[0] for name in (AtomicDataDict.NODE_FEATURES_KEY, AtomicDataDict.NODE_ATTRS_KEY)}
    return AtomicDataDict.LMP_MLIAP_DATA_KEY not in data and rows == {AtomicDataDict.num_nodes(data)}


class EdgeScalarMLP(ScalarMLPFunction):
    """A network of edges; a radial one gives what goes into its last layer, which the convolution multiplies by."""

    @property
    def stops_early(self) -> bool:
        """Whether the last layer is the convolution's: a matrix product alone, after at least one other."""
        layers: Any = self.mlp
        return bool(self.__dict__.get("shortened")) and self._is_known and len(layers) > 1 and _is_plain(layers[-1])

    @property
    def _is_known(self) -> bool:
        return type(self.mlp) is torch.nn.Sequential and not has_hooks(self) and not has_hooks(self.mlp)

    def forward(self, x: Tensor) -> Tensor:
        """x [edges, inputs] -> [edges, outputs], or [edges, hidden] where it stops early."""
        if not self._is_known:
            return super().forward(x)
        multiply = multiply_by(self.__dict__.get("product", "fp16x3"))
        layers: list[Any] = list(self.mlp)[: -1 if self.stops_early else None]
        if self.__dict__.get("in_one_kernel") and _are_plain_with_silu(layers):
            matrices = [layer.weight * layer.alpha for layer in layers[::2]]  # a number on the device
            if is_one_kernel(x, matrices, self.training):
                accuracy = ACCURACY[self.__dict__.get("product", "fp16x3")]
                return hidden_features(x, matrices, [1.0] * len(matrices), accuracy)
        for layer in layers:
            if _is_plain(layer):
                x = multiply.rows(x, layer.weight * layer.alpha)
            else:
                x = few_pass_silu(x) if type(layer) is torch.nn.SiLU and not has_hooks(layer) else layer(x)
        return x

    def matrix(self) -> Tensor:
        """[hidden, weights]."""
        last = self.mlp[-1]
        return last.weight * last.alpha


def _is_plain(layer: Any) -> bool:
    kind = parametrize.type_before_parametrizations(layer)
    return kind is ScalarLinearLayer and layer.bias is None and not has_hooks(layer)


def _are_plain_with_silu(layers: list[Any]) -> bool:
    """Whether each product is followed by SiLU alone."""
    silu = all(type(one) is torch.nn.SiLU and not has_hooks(one) for one in layers[1::2])
    return len(layers) % 2 == 0 and silu and all(map(_is_plain, layers[::2]))


class BatchedEdgeLengthNormalizer(EdgeLengthNormalizer):
    """As NequIP's; takes the edges' vectors of a batch from here."""

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        return cast(Any, type(self).__mro__[1]).forward(self, with_edge_vectors(data))


class BatchedSphericalHarmonicEdgeAttrs(SphericalHarmonicEdgeAttrs):
    """As NequIP's; takes the edges' vectors of a batch from here."""

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        return cast(Any, type(self).__mro__[1]).forward(self, with_edge_vectors(data))


def with_edge_vectors(data: AtomicDataDict.Type) -> AtomicDataDict.Type:
    """Adds the vectors [edges, 3] of a batch with cells, unless they are there.

    NequIP's own function multiplies the cells edge by edge, and sums their gradients one by one.
    """
    asked = {AtomicDataDict.CELL_KEY, AtomicDataDict.BATCH_KEY} <= data.keys()
    if asked and AtomicDataDict.EDGE_VECTORS_KEY not in data and _has_known_sizes(data):
        data[AtomicDataDict.EDGE_VECTORS_KEY] = _edge_vectors(data)
    return data


def _has_known_sizes(data: AtomicDataDict.Type) -> bool:
    """Whether it is not traced for any number of structures: one and several are computed in two ways."""
    sizes = (*data[AtomicDataDict.CELL_KEY].shape, *data[AtomicDataDict.EDGE_INDEX_KEY].shape)
    return not torch.compiler.is_compiling() and all(type(size) is int for size in sizes)


def _edge_vectors(data: AtomicDataDict.Type) -> Tensor:
    """[edges, 3], as NequIP's ``with_edge_vectors_``."""
    positions, batch = data[AtomicDataDict.POSITIONS_KEY], data[AtomicDataDict.BATCH_KEY]
    first, second = (data[AtomicDataDict.EDGE_INDEX_KEY][end] for end in (0, 1))
    vectors = torch.index_select(positions, 0, second) - torch.index_select(positions, 0, first)
    cells = rows_of(data[AtomicDataDict.CELL_KEY].view(-1, 3, 3), torch.index_select(batch, 0, first))
    return vectors + times_matrices(data[AtomicDataDict.EDGE_CELL_SHIFT_KEY].view(-1, 3), cells)
