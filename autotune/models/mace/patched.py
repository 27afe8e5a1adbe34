"""MACE's models with a strain whose gradient keeps a GPU busy.

Stress is the gradient by a strain of each graph, which MACE reads once for every edge (``cell[batch[sender]]``). In the
backward pass torch sums such a gradient row by row, and one graph is one row: 443,000 edges of a box of water take an
H200 91 ms of the 106 ms of all kernels for energies, forces and stress of MACE-MP-0 medium. Here parts of the edges
are summed at the same time.

Vectors of edges are taken without an index whose gradient sorts: 0.15 of the 3.0 ms of all kernels on diamond.

Read in mace-torch 0.3.16, ``mace/modules/utils.py``: ``prepare_graph``, ``get_symmetric_displacement`` and
``get_edge_vectors_and_lengths``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from mace.modules import blocks, models, utils
from mace.modules.radial import RadialMLP
from torch import Tensor
from torch.nn.utils import parametrize

from autotune.models.layout import with_users_descriptors
from autotune.models.linear import rows_of, times_matrices
from autotune.models.stand_ins import has_hooks


def strained(
    positions: Tensor,
    unit_shifts: Tensor,
    cell: Tensor | None,
    edge_index: Tensor,
    num_graphs: int,
    batch: Tensor,
    displacement: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What MACE's ``get_symmetric_displacement`` returns: strained positions [atoms, 3] and shifts [edges, 3], and the
    displacement [graphs, 3, 3], whose symmetric part is the strain.
    """
    if displacement is None:
        # Not a leaf, so that the gradient by it can be taken.
        displacement = positions.new_zeros((num_graphs, 3, 3)) + positions.sum() * 0.0
    strain = 0.5 * (displacement + displacement.transpose(-1, -2))
    moved = positions + times_matrices(positions, rows_of(strain, batch))
    cells = positions.new_zeros((num_graphs, 3, 3)) if cell is None else cell.view(-1, 3, 3)
    cells = cells + torch.matmul(cells, strain)
    shifts = times_matrices(unit_shifts, rows_of(cells, batch[edge_index[0]]))
    return moved, shifts, displacement


def edge_vectors(
    positions: Tensor, edge_index: Tensor, shifts: Tensor, normalize: bool = False, eps: float = 1e-9
) -> tuple[Tensor, Tensor]:
    """What MACE's ``get_edge_vectors_and_lengths`` returns: vectors [edges, 3] and lengths [edges, 1].

    The gradient of rows that are taken by ``positions[sender]`` sorts the edges; this one adds where they belong.
    """
    sender, receiver = edge_index[0], edge_index[1]
    vectors = positions.index_select(0, receiver) - positions.index_select(0, sender) + shifts
    lengths = torch.linalg.norm(vectors, dim=-1, keepdim=True)
    return (vectors / (lengths + eps) if normalize else vectors), lengths


def _with_names(function: Callable[..., Any], **names: Any) -> Any:
    """The function, which finds other values under some names of its module."""
    code, there = function.__code__, {**function.__globals__, **names}
    made = types.FunctionType(code, there, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__, made.__annotations__ = function.__kwdefaults__, function.__annotations__
    made.__doc__, made.__module__ = function.__doc__, function.__module__
    return made


_NAMES = {"get_symmetric_displacement": strained, "get_edge_vectors_and_lengths": edge_vectors}
if hasattr(utils, "prepare_graph"):
    _NAMES["prepare_graph"] = _with_names(utils.prepare_graph, **_NAMES)


def forward_for_lammps(model: torch.nn.Module) -> Callable[..., dict[str, Tensor]]:
    """What MACE computes of the graphs of LAMMPS's ML-IAP, for tracing.

    MACE's own has ``int(n_real)``, which would fix the number of atoms to the example's.
    """
    stock: Any = next(kind for kind in type(model).__mro__ if kind.__module__ == models.__name__)
    prepare = _with_names(utils.prepare_graph, int=torch.sym_int)
    return functools.partial(_with_names(stock.forward, prepare_graph=prepare), model)


def masked_by_head(x: Tensor, head: Tensor, num_heads: int) -> Tensor:
    """What MACE's ``mask_head`` returns: x [nodes, heads * width], with zeros where the columns are of other heads.

    MACE writes a number of the host's into a mask, which no CUDA graph can hold.
    """
    own = head.unsqueeze(1) == torch.arange(num_heads, device=x.device)
    return (x.unflatten(1, (num_heads, -1)) * own.unsqueeze(2)).flatten(1)


def _patched_class(
    stock: type[torch.nn.Module],
    names: Mapping[str, Any],
    finish: Callable[[Any, Any], Any] = lambda _, out: out,
    **methods: Any,
) -> type[torch.nn.Module]:
    """A subclass of the same name, which MACE looks at, whose forward finds others under some names.

    finish: makes the results, from the module and what this forward gives. methods: others of the subclass.
    """
    patched = _with_names(stock.forward, **names)

    @functools.wraps(stock.forward)
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        # Here and not in a hook, which torch.compile would compile by itself.
        return finish(self, patched(self, *arguments, **options))

    return type(stock.__name__, (stock,), {**methods, "forward": forward, "__module__": __name__})


def _strained_class(stock: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The subclass of a model's class, for layout ``ir_mul``, that strains its graphs as above."""

    def new(cls: Any, *arguments: Any, **options: Any) -> torch.nn.Module:
        # MACE rebuilds models by their class, and the result is stock. Copies and pickles come without arguments.
        return stock(*arguments, **options) if arguments or options else stock.__new__(cls)

    return _patched_class(stock, _NAMES, with_users_descriptors, __new__=new)


# Models are pickled by the names of their classes.
MACE = _strained_class(models.MACE)
ScaleShiftMACE = _strained_class(models.ScaleShiftMACE)
EnergyDipolesMACE = _strained_class(models.EnergyDipolesMACE)
# Readouts of models of several heads.
NonLinearReadoutBlock = _patched_class(blocks.NonLinearReadoutBlock, {"mask_head": masked_by_head})
NonLinearBiasReadoutBlock = _patched_class(blocks.NonLinearBiasReadoutBlock, {"mask_head": masked_by_head})


# MACE's ``RadialMLP`` without its last layer, which a convolution multiplies by.


class ShortenedRadialMLP(RadialMLP):
    """Gives what goes into the last layer, a column of ones for its bias, and zeros up to a multiple of four."""

    @property
    def stops_early(self) -> bool:
        """Whether there is a layer before the last, and the last one's weights may be read in the place of a call."""
        net, last = self.net, self.net[-1]
        is_linear = parametrize.type_before_parametrizations(last) is torch.nn.Linear
        return len(net) > 1 and is_linear and not any(map(has_hooks, (self, net, last)))

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs [edges, inputs] -> [edges, columns], of which the first are the hidden features."""
        if not self.stops_early:
            return super().forward(inputs)
        hidden = self.net[:-1](inputs)
        one = hidden.new_zeros(1, 4 - hidden.shape[1] % 4)
        one[:, 0] = 1
        return torch.cat([hidden, one.expand(hidden.shape[0], -1)], dim=1)

    def matrix(self) -> Tensor:
        """[columns, weights]."""
        last = self.net[-1]
        zeros = last.weight.new_zeros(last.weight.shape[0], 3 - last.in_features % 4)
        return torch.cat([last.weight, last.bias.unsqueeze(1), zeros], dim=1).t()
