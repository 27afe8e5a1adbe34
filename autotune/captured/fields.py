"""The tensors of a model's input, and what ghosts hold in them.

Ghosts fill a graph up to a captured size. They are atoms of a structure of their own, and edges among those atoms, each
from an atom to its image in a cell that is wider than the cutoff. So no ghost adds to what a real atom, edge or
structure has: sums over neighbours and over structures never mix them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.errors import InputError, UnsupportedError

# Ghost atoms are at least so many that none has more than this many times the edges of a real atom on average: one atom
# with all ghost edges would be the last one to be ready.
_EDGES_OF_A_GHOST = 4
# A captured size serves graphs down to this many steps below it.
_SPARE_STEPS = 2
# From so many on, steps of size are the fourth root of growth. For large graphs the device is the limit, so ghosts cost
# what they are: NequIP-OAM-L on 157,894 edges of diamond took 24.9 ms of an H200 padded to 188,080, and 21.5 as it is.
# And the more edges there are, the less their number changes from step to step.
_LARGE = 32768


class Counts(NamedTuple):
    """Numbers of atoms, edges and graphs (structures)."""

    atoms: int
    edges: int
    graphs: int


GhostRows = Callable[[Counts, Counts, torch.device], Tensor]


class Field(NamedTuple):
    """One tensor of a model's input.

    per: what ``axis`` counts: ``atoms``, ``edges`` or ``graphs``; ``rows`` of it for each, and ``extra`` more.
    ghost: the rows of ghosts, as a number, as a tensor that broadcasts to them, or as a function of the real counts,
    the captured ones and the device. below: what its indices count, if it holds any: one that is too large would be a
    ghost's. each: the other lengths.
    """

    tensor: Tensor
    per: str
    ghost: float | Tensor | GhostRows
    axis: int = 0
    rows: int = 1
    extra: int = 0
    below: str = ""
    each: tuple[int, ...] = ()

    def length(self, counts: Counts) -> int:
        return getattr(counts, self.per) * self.rows + self.extra

    def check(self, name: str, real: Counts) -> None:
        """InputError for another number of rows, and for indices out of range: a copy would broadcast the one row, and
        padding would take the other for a ghost. On a GPU indices are not looked at, which would wait.
        """
        given, expected = self.tensor.shape[self.axis], self.length(real)
        of = f"a graph of {real.atoms} atoms, {real.edges} edges and {real.graphs} structures"
        if given != expected:
            raise InputError(f"{name} has {given} rows; expected {expected} for {of}")
        if self.below and self.tensor.is_cpu and self.tensor.numel():
            least, most = (int(end) for end in self.tensor.aminmax())
            if least < 0 or most >= getattr(real, self.below):
                raise InputError(f"{name} has indices from {least} to {most}; expected numbers of {self.below} in {of}")

    def check_shape(self, name: str) -> None:
        """InputError for other lengths than ``axis``'s."""
        shape = self.tensor.shape
        if (*shape[: self.axis], *shape[self.axis + 1 :]) != self.each:
            expected = (*self.each[: self.axis], self.per, *self.each[self.axis :])
            raise InputError(f"{name} is of shape {tuple(shape)}; expected ({', '.join(map(str, expected))})")

    def empty(self, size: Counts, device: torch.device) -> Tensor:
        shape = list(self.tensor.shape)
        shape[self.axis] = self.length(size)
        return torch.empty(shape, dtype=self.tensor.dtype, device=device)

    @property
    def signature(self) -> tuple:
        """What a captured graph depends on beside its size."""
        shape = list(self.tensor.shape)
        shape[self.axis] = -1
        return self.tensor.dtype, tuple(shape)


Fields = Mapping[str, Field]


class GivenFields(dict):
    """A model's padded inputs. ``asked``: names of others that the model looked for."""

    def __init__(self, fields: Mapping[str, Any], asked: set[str]) -> None:
        super().__init__(fields)
        self.asked = asked

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        self.asked.add(str(name))
        return False

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, default) if name in self else default

    def __missing__(self, name: str) -> Any:
        raise lost_input(name)

    def copy(self) -> GivenFields:
        return GivenFields(self, self.asked)


def lost_input(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"the model reads {name}, which a captured step does not pass on; call the model itself, uncaptured"
    )


def ghost_ends(real: Counts, size: Counts, device: torch.device) -> Tensor:
    """Both ends [edges of ghosts] of every ghost edge: ghost atoms one after the other, in ascending order.

    Each has about as many edges as a real atom, so that most have none; if there are too many edges for that, all have
    edges. Blocks of a convolution have equally many edges each, and work for each atom too: one whose edges are of many
    atoms would be the last to be ready.
    """
    edges, atoms = size.edges - real.edges, size.atoms - real.atoms
    used = min(atoms, max(1, round(edges * real.atoms / max(real.edges, 1))))
    return real.atoms + torch.arange(edges, device=device) * used // max(edges, 1)


def ghost_pointer(real: Counts, size: Counts, device: torch.device) -> Tensor:
    """The end of the ghosts' structure in a list of where structures begin."""
    return torch.full((1,), size.atoms, device=device)


def ghost_atoms(real: Counts, size: Counts, device: torch.device) -> Tensor:
    """The number of atoms of the ghosts' structure."""
    return torch.full((1,), size.atoms - real.atoms, device=device)


def padded_size(real: Counts, growth: float) -> Counts:
    """The step of size for a graph: edges and atoms go up in steps of ``growth``, at least one atom is a ghost."""
    edges = step_above(max(1, real.edges), growth)
    each = max(1, -(-real.edges // max(1, real.atoms))) * _EDGES_OF_A_GHOST
    ghosts = max(1, -(-(edges - real.edges) // each))
    return Counts(step_above(real.atoms + ghosts, growth), edges, real.graphs + 1)


def step_above(count: int, growth: float) -> int:
    """The least of the steps 16, 16 growth, 16 growth^2, ... (each rounded up to a multiple of 8) not below a count.

    Beyond 32768 steps are four times as fine.
    """
    step, size = 16.0, 16
    while size < count:
        step *= growth if step < _LARGE else growth**0.25
        size = -(-int(step) // 8) * 8
    return size


def fits(real: Counts, size: Counts) -> bool:
    return real.atoms < size.atoms and real.edges <= size.edges and real.graphs + 1 == size.graphs


def best_fit(real: Counts, sizes: Sequence[Counts], growth: float) -> Counts | None:
    """The smallest of the sizes that a graph fits in, unless the graph is so small that it deserves its own."""
    wanted = padded_size(real, growth)
    most = growth**_SPARE_STEPS
    fitting = [
        size
        for size in sizes
        if fits(real, size) and size.edges <= most * wanted.edges + 8 and size.atoms <= most * wanted.atoms + 8
    ]
    return min(fitting, default=None, key=lambda size: (size.edges, size.atoms))
