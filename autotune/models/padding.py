"""A model's step at one size: static buffers, filled with a graph and ghosts, and on a GPU a CUDA graph."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernelgen.errors import InputError, UnsupportedError, cause_of
from kernelgen.runtime.graph import known_in_capture

# The tensors of a model's input, and what ghosts hold in them.
#
# Ghosts fill a graph up to a captured size. They are atoms of a structure of their own, and edges among those atoms,
# each from an atom to its image in a cell that is wider than the cutoff. So no ghost adds to what a real atom, edge or
# structure has: sums over neighbours and over structures never mix them.

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
    def signature(self) -> tuple[Any, ...]:
        """What a captured graph depends on beside its size."""
        shape = list(self.tensor.shape)
        shape[self.axis] = -1
        return self.tensor.dtype, tuple(shape)


Fields = Mapping[str, Field]


class GivenFields(dict[Any, Any]):
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


def ghost_ends_there(atoms: Tensor, edges: Tensor, size: Counts, numbers: Tensor) -> Tensor:
    """:func:`ghost_ends` for numbers of atoms and edges that the device knows; rows of real edges hold no atom.

    numbers [size.edges]: 0, 1, 2 ...
    """
    ghost_edges, ghost_atoms = size.edges - edges, size.atoms - atoms
    used = (ghost_edges * atoms / edges.clamp(min=1)).round().long().clamp(min=1).minimum(ghost_atoms)
    return atoms + (numbers - edges) * used // ghost_edges.clamp(min=1)


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


# Calls before a capture: kernels are compiled, and torch's libraries choose theirs.
_WARM_UP = 3


Compute = Callable[[dict[str, Tensor], Counts], dict[str, Any]]


# By device one stream for all captures: torch's libraries keep a workspace for each stream.
_side_stream = functools.cache(torch.cuda.Stream)


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python frees no cycles within: the memory of an older graph that went in the middle of a capture would end it."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphMemory:
    """What captured steps of one model compute in: the same memory, since one of them runs at a time.

    Each step's results are copied before another one runs. Inputs have memory of their own.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def pool_for(self, graph: torch.cuda.CUDAGraph) -> Any:
        """That of the graphs that there are; torch takes no pool again whose graphs are gone."""
        if not len(self._graphs):
            self._pool = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        return self._pool

    def follow_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of the caller, which waits for that of the last call."""
        stream = torch.cuda.current_stream(device)
        if self.stream not in (None, stream):
            stream.wait_stream(self.stream)
        self.stream = stream
        return stream


class PaddedStep:
    """Computes graphs that fit ``size``. On a CPU each call runs the model on the buffers, padded alike.

    compute: the model's results of padded tensors. results: what the rows of each are. memory: of all steps that never
    run at once; none: its own. replays: launches of the graph.
    """

    def __init__(
        self,
        size: Counts,
        fields: Fields,
        device: torch.device,
        compute: Compute,
        results: Mapping[str, str],
        memory: GraphMemory | None = None,
    ) -> None:
        self.size, self.device, self.compute, self.results = size, device, compute, results
        for name, field in fields.items():
            field.check_shape(name)  # not in each call: it belongs to a field's signature
        with torch.inference_mode(False):
            self.buffers = {name: field.empty(size, device) for name, field in fields.items()}
        # Of the graph that is in the buffers; None while a call fills them, which may raise or be interrupted.
        self.filled: Counts | None = None
        # Names of inputs that the model looked for and a step does not pass on.
        self.asked: set[str] = set()
        # Rows of ghosts that are always the same, on the device.
        self._ghosts: dict[str, Tensor] = {}
        self.replays = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: dict[str, Any] = {}
        self.memory = GraphMemory() if memory is None else memory

    def __call__(self, fields: Fields, real: Counts) -> dict[str, Any]:
        """The results of the real atoms, edges and graphs, in memory of their own."""
        self.fill(fields, real)
        return self._real(self.launch(), real)

    def fill(self, fields: Fields, real: Counts) -> None:
        """Copy a graph, and ghosts, to where the model reads them."""
        if self.device.type == "cuda":
            self.memory.follow_stream(self.device)
        self._fill(fields, real)

    def launch(self) -> dict[str, Any]:
        """The results of what was filled, ghosts' too, in memory that the next launch overwrites."""
        if self.device.type != "cuda":
            return self._computed()
        with torch.cuda.device(self.device):
            stream = self.memory.follow_stream(self.device)
            if self._graph is None:
                self._capture(stream)
            assert self._graph is not None
            self._graph.replay()
        self.replays += 1
        return self._found

    def check_asked(self, inputs: Any) -> None:
        """UnsupportedError if the model looked for an input that is given and not passed on."""
        for name in self.asked:
            if name in inputs:
                raise lost_input(name)

    @torch.no_grad()
    def _fill(self, fields: Fields, real: Counts) -> None:
        last, self.filled = self.filled, None
        for name, field in fields.items():
            buffer, length = self.buffers[name], field.length(real)
            if field.tensor.shape[field.axis] != length or (field.below and field.tensor.is_cpu):
                field.check(name, real)
            buffer.narrow(field.axis, 0, length).copy_(field.tensor)
            # Whether the buffer, filled with a graph of ``last``, has the ghosts of ``real``.
            if last == real or (
                last is not None and not callable(field.ghost) and getattr(last, field.per) == getattr(real, field.per)
            ):
                continue
            rest = buffer.narrow(field.axis, length, buffer.shape[field.axis] - length)
            if callable(field.ghost):
                rest.copy_(field.ghost(real, self.size, self.device))
            elif isinstance(field.ghost, Tensor):
                if name not in self._ghosts:
                    self._ghosts[name] = field.ghost.to(buffer)
                rest.copy_(self._ghosts[name])
            else:
                rest.fill_(field.ghost)
        self.filled = real

    def _computed(self) -> dict[str, Any]:
        """By name of those results that the model gives, without autograd's graph."""
        given = GivenFields({name: buffer.detach() for name, buffer in self.buffers.items()}, self.asked)
        with torch.inference_mode(False), torch.enable_grad(), VolumesByProducts():
            out = self.compute(given, self.size)
        found = {name: out[name] for name in self.results if name in out}
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in found.items()}

    def _capture(self, current: torch.cuda.Stream) -> None:
        side = _side_stream(self.device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    self._computed()
        finally:  # what a failed call left there still reads the buffers
            current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = self.memory.pool_for(graph)
        capturing = torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local")
        try:
            with _nothing_collected(), known_in_capture(), capturing:
                found = self._computed()
        except RuntimeError as error:
            raise UnsupportedError(
                f"the model cannot be captured in a CUDA graph: {cause_of(error)}; something in it (a hook, a block "
                "that is not the package's) waits for the device or copies from the host"
            ) from error
        self._found, self._graph = found, graph

    def _real(self, found: Mapping[str, Any], real: Counts) -> dict[str, Any]:
        return {
            name: value.narrow(0, 0, getattr(real, self.results[name])).clone() if isinstance(value, Tensor) else value
            for name, value in found.items()
        }


# Determinants of cells without a solver library.
#
# torch computes them by a factorisation in another library, of which not all can be captured in a CUDA graph.


class VolumesByProducts(TorchFunctionMode):
    """Within, ``det`` of matrices [..., 3, 3] is the triple product of their rows."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _DETERMINANTS and args[0].shape[-2:] == (3, 3):
            return triple_product(args[0])
        return func(*args, **(kwargs or {}))


_DETERMINANTS = (torch.linalg.det, torch.det, Tensor.det)


def triple_product(cell: Tensor) -> Tensor:
    """``a . (b x c)`` of the rows of cells [..., 3, 3]."""
    a, b, c = cell.unbind(-2)
    return (a * torch.linalg.cross(b, c)).sum(-1)
