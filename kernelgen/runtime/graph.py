"""Edges in the order of nodes, checks of their indices, and graphs that are recognised when they come again.

An order is the spans of edges (and the permutation) that the owners of nodes loop over. It uses only torch operations
and no device synchronisation, so that it can be computed in a captured or compiled graph. Edge indices on a GPU are
checked by a small kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.compat import is_transforming, modes_at_work
from kernelgen.errors import InputError
from kernelgen.runtime.kernel import KernelByDtype

# A GPU starts blocks in order. Up to this many nodes, the longest spans come first, so that none starts last. With more
# nodes the load balances by itself, and their own order keeps neighbours close in memory; so few all start at once.
LONGEST_FIRST, ALL_AT_ONCE = 8192, 128
# Spans, permutations and loops of a GPU's kernels count edges by 32 bits, and may step somewhat beyond the last one;
# a node has three numbers in the spans. Offsets of elements have 64 bits everywhere.
MOST_EDGES = (1 << 31) - (1 << 16)
MOST_NODES = MOST_EDGES // 3


class EdgeOrder(NamedTuple):
    """Edges ordered by node. A row of ``spans`` is (destination, begin, end); its edges are ``perm[begin:end]``.

    spans: int32 [num_out, 3], every destination once, in the order in which workers take them.
    perm: int32 [num_edges], or None if the edges are already ordered: then the edges are begin..end.
    sender_spans, sender_perm: the same by sender, [num_in, 3] and [num_edges]. Spans that no kernel needs may be None.
    """

    spans: Tensor | None
    perm: Tensor | None
    sender_spans: Tensor | None = None
    sender_perm: Tensor | None = None


NO_ORDER = EdgeOrder(None, None)


def edge_order(
    receiver: Tensor,
    num_out: int,
    *,
    is_sorted: bool = False,
    sender: Tensor | None = None,
    num_in: int | None = None,
) -> EdgeOrder:
    """The order of edges by ``receiver`` [num_edges]; edges of one destination keep their order.

    ``is_sorted`` promises that ``receiver`` does not decrease, so that no permutation is needed. A false promise gives
    wrong sums. With ``sender`` [num_edges] (indices below ``num_in``, by default num_out) the result has the order by
    sender too.
    """
    spans, perm = order_by("receiver", receiver, num_out, is_sorted)
    if sender is None:
        return EdgeOrder(spans, perm)
    return EdgeOrder(spans, perm, *order_by("sender", sender, num_out if num_in is None else num_in))


def check_sizes(num_edges: Any, *num_nodes: Any) -> None:
    """Raise InputError for more edges or nodes than kernels can count; sizes that are symbols pass."""
    for name, count, most in (("edges", num_edges, MOST_EDGES), *(("nodes", count, MOST_NODES) for count in num_nodes)):
        if type(count) is int and count > most:
            raise InputError(
                f"the graph has {count:,} {name}; expected at most {most:,}: give the edges in parts, and add the "
                "results"
            )


def order_by(
    name: str, nodes: Tensor, count: int, is_sorted: bool = False, by_length: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Spans and permutation of edges by one end, called ``name`` in errors. by_length: on a GPU, longest first."""
    check_is_tensor(name, nodes)
    count = row_count("num_out", count)
    if nodes.dim() != 1 or nodes.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{name} is {nodes.dtype} {tuple(nodes.shape)}; expected int32 or int64 of shape [num_edges]")
    if count < 0:
        raise InputError(f"num_out is {count}; expected the number of destinations, at least 0")
    check_sizes(nodes.shape[0], count)
    perm = None
    if is_sorted:
        nodes = nodes.int()
    else:
        nodes, perm = sorted_nodes(nodes, count, short_keys=nodes.is_cuda and type(count) is int)
    bounds = torch.arange(count + 1, dtype=torch.int32, device=nodes.device)
    ends = torch.searchsorted(nodes.contiguous(), bounds, out_int32=True)
    spans = torch.stack((bounds[:-1], ends[:-1], ends[1:]), 1)
    are_few = type(count) is int and count <= ALL_AT_ONCE
    if by_length and nodes.is_cuda and not are_few and count <= LONGEST_FIRST:
        spans = longest_first(spans)
    return spans, perm


def sorted_nodes(nodes: Tensor, count: int, *, short_keys: bool) -> tuple[Tensor, Tensor]:
    """Nodes in ascending order and their places before, both int32; equal ones keep their order.

    A GPU sorts digit by digit: keys of 32 bits take half the passes of 64, and short keys, of 16 bits, half of these.
    Indices that are not below ``count``, or are negative, come after or before all others with either.
    """
    fits = short_keys and count < torch.iinfo(torch.int16).max
    keys = nodes.clamp(-1, count).short() if fits else nodes.int()
    found, order = torch.sort(keys, stable=True)
    return found.int(), order.int()


def check_is_tensor(name: str, index: object) -> None:
    """Raise InputError for a list, a NumPy array or anything else that is not a tensor."""
    if not isinstance(index, Tensor):
        raise InputError(
            f"{name} is of type {type(index).__name__}; expected a tensor of int32 or int64 [num_edges]: make one with "
            f"torch.as_tensor({name}, device=...)"
        )


def row_count(name: str, given: Any) -> int:
    """A number of rows; InputError if it is not an integer (20.0 is not)."""
    if isinstance(given, (int, torch.SymInt)):
        return given  # type: ignore[return-value]
    try:
        return operator.index(given)
    except TypeError as error:
        raise InputError(f"{name} is {given!r}; expected an integer, the number of destinations") from error


def longest_first(spans: Tensor) -> Tensor:
    """``spans`` [nodes, 3] sorted by decreasing number of edges; equal ones keep their order."""
    return spans[torch.argsort(spans[:, 1] - spans[:, 2], stable=True)]


def is_in_order(receiver: Tensor) -> bool:
    """Whether ``receiver`` does not decrease; synchronises a GPU."""
    return bool((receiver[1:] >= receiver[:-1]).all())


def check_indices(sender: Tensor, receiver: Tensor, num_in: int, num_out: int) -> None:
    """Raise InputError for the first edge whose sender or receiver is out of range; synchronises a GPU."""
    for name, index, count in (("sender", sender, num_in), ("receiver", receiver, num_out)):
        check_is_tensor(name, index)
        if index.shape[0] == 0:
            continue
        least, most = (int(bound) for bound in torch.aminmax(index))
        if least >= 0 and most < count:
            continue
        bad = ((index < 0) | (index >= count)).nonzero()
        edge = int(bad[0])
        raise InputError(
            f"{name}[{edge}] is {int(index[edge])}, outside 0..{count - 1}"
            f" ({bad.shape[0]} of {index.shape[0]} edges are); check the graph, or num_out"
        )


def check_ascending(receiver: Tensor) -> None:
    """Raise InputError for a receiver that decreases despite ``is_sorted``; synchronises a GPU."""
    if not is_in_order(receiver):
        raise InputError("edges are said to be sorted (edges_sorted, is_sorted), but receiver is not ascending")


def assert_indices(sender: Tensor, receiver: Tensor, num_in: int, num_out: int, is_sorted: bool) -> None:
    """Both checks as assertions that a traced graph keeps; without synchronisation."""
    for name, index, count in (("sender", sender, num_in), ("receiver", receiver, num_out)):
        in_range = ((index >= 0) & (index < count)).all()
        torch._assert_async(in_range, f"{name} has an index that is negative or at least the number of nodes")
    if is_sorted:
        torch._assert_async((receiver[1:] >= receiver[:-1]).all(), "edges_sorted=True, but receiver is not ascending")


# Checks edge indices on a GPU with a small kernel, without synchronisation.

_THREADS, _MOST_BLOCKS = 256, 1024
CHECK = KernelByDtype("equitune_index_check", "index_check.cuh", count=5, threads=_THREADS, name="INDEX")


def check_on_device(name: str, index: Tensor, count: int) -> None:
    """Stop the program with a device-side assertion if ``name`` (sender or receiver) is not in 0..count-1."""
    _launch(index, count, name == "receiver", False)


def check_ascending_on_device(receiver: Tensor) -> None:
    """Stop the program with a device-side assertion if ``receiver`` decreases anywhere."""
    _launch(receiver, 0, True, True)


def _launch(index: Tensor, count: int, is_receiver: bool, ascending: bool) -> None:
    index = index.contiguous()
    edges = index.shape[0]
    if edges:
        blocks = min(_MOST_BLOCKS, -(-edges // _THREADS))
        values = (index.data_ptr(), edges, count, int(is_receiver), int(ascending))
        CHECK.of(index.dtype).launch(index.get_device(), blocks, *values)


# Remembers graphs, so that indices are checked and edges ordered once a graph instead of once a call.
#
# On the CPU a graph is recognised by its contents, so every write is noticed. On a GPU a comparison would synchronise.
# There a graph is recognised by the memory of its tensors and torch's counters of in-place writes, which a tensor
# shares with its views: every new ``edge_index[1]`` is the same receiver. Memory that torch does not own (of NumPy, or
# imported through DLPack) can change without being counted, so it is never recognised. Torch also does not count writes
# to its own memory through ``.data``, ``untyped_storage()``, a DLPack export, or a tensor that got the memory by
# ``set_`` or by an assignment to ``.data``; nor those of replayed CUDA graphs, and of other libraries' kernels that
# take pointers (Triton, Warp, CuPy). After such writes on a GPU, pass new tensors (``receiver.clone()``) or your own
# ``order``.


KEPT_GRAPHS = 8
# Most orders, and most sizes, that are kept for one graph.
_KEPT_FACTS = 16
# Most bytes of indices (copies on the CPU, the tensors' own memory on a GPU) that all graphs but the newest hold.
_KEPT_BYTES = 32 << 20
_ROWS = torch.contiguous_format

# Sender, receiver, number of destinations and order; whether the same tensors may come again; the graph's entry if it
# was just found to be unchanged, with indices in range.
Edges = tuple[Tensor | None, Tensor | None, int, EdgeOrder | None, bool, "KnownGraph | None"]

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class KnownGraph:
    """A graph's orders by what determines them, and the (num_in, num_out) for which its indices are in range.

    is_captured: it is in the CUDA graph that is being captured, so what is found out is computed at every replay.
    """

    def __init__(self, sender: Tensor, receiver: Tensor, is_on_host: bool, is_captured: bool = False) -> None:
        seen: type[_Copy | _Memory] = _Copy if is_on_host else _Memory
        self.sender, self.receiver = seen(sender), seen(receiver)
        self.nbytes = self.sender.nbytes + self.receiver.nbytes
        self.is_on_host, self.is_captured = is_on_host, is_captured
        self.orders: dict[Hashable, EdgeOrder] = {}
        self.in_range: set[tuple[int, int]] = set()
        # What others found out about the tensors.
        self.facts: dict[Hashable, Any] = {}
        self._contiguous: dict[int, tuple[Tensor, Tensor]] = {}

    def is_still(self, sender: Tensor, receiver: Tensor) -> bool:
        """Whether these tensors are the graph's, with unchanged contents."""
        return self.receiver.is_of(receiver) and self.sender.is_of(sender)

    def is_unwritten(self, sender: Tensor, receiver: Tensor) -> bool:
        """The same for the graph's own tensors in their original form."""
        return self.receiver.is_unwritten(receiver) and self.sender.is_unwritten(sender)

    def contiguous(self, sender: Tensor, receiver: Tensor) -> tuple[Tensor, Tensor]:
        """The graph's tensors with contiguous entries, copied at most once a stream."""
        if sender.is_contiguous() and receiver.is_contiguous():
            return sender, receiver
        stream = stream_of(receiver)
        copies = self._contiguous.get(stream)
        if copies is None:
            # As for orders: autograd may save the copies later.
            with torch.inference_mode(False):
                copies = sender.clone(memory_format=_ROWS), receiver.clone(memory_format=_ROWS)
            make_room(self._contiguous)
            self._contiguous[stream] = copies
        return copies


class _Copy:
    """A copy of a host index tensor, compared as bytes: ``torch.equal`` takes twice as long."""

    def __init__(self, index: Tensor) -> None:
        self.tensor = index.clone(memory_format=_ROWS)
        self.dtype, self.shape, self.nbytes = index.dtype, index.shape, self.tensor.nbytes
        self.address = ctypes.c_void_p(self.tensor.data_ptr())

    def is_of(self, index: Tensor) -> bool:
        if index.shape != self.shape:
            return False
        if index.dtype is self.dtype and not index.is_contiguous():
            return torch.equal(index, self.tensor)
        return self.is_unwritten(index)

    def is_unwritten(self, index: Tensor) -> bool:
        """Whether a contiguous tensor of this shape has the same dtype and bytes."""
        return index.dtype is self.dtype and _memcmp(index.data_ptr(), self.address, self.nbytes) == 0


class _Memory:
    """Where the entries of an index tensor are, and how often torch counted writes there.

    A counter belongs to a tensor and its views, which are known by their common base. Base and storage are held, so
    that no others get their identity; a weak reference to a tensor would forbid ``swap_tensors``.
    """

    def __init__(self, index: Tensor) -> None:
        self.base, self.storage = _base(index), index.untyped_storage()
        self.address, self.version, self.state = index.data_ptr(), index._version, _state(index)
        self.nbytes = self.storage.nbytes()

    def is_of(self, index: Tensor) -> bool:
        # The comparison that most often fails comes first.
        return index.data_ptr() == self.address and _base(index) is self.base and _state(index) == self.state

    def is_unwritten(self, index: Tensor) -> bool:
        """Whether the tensor itself was not written."""
        return index._version == self.version


def _base(index: Tensor) -> Tensor:
    """The tensor of which this is a view, or itself."""
    base = index._base
    return index if base is None else base


def _state(index: Tensor) -> Hashable:
    return (index._version, index.untyped_storage()._cdata, index.dtype, index.shape, index.stride())


class KnownGraphs:
    """The last few graphs, newest first."""

    def __init__(self, size: int = KEPT_GRAPHS) -> None:
        self.size = size
        # Always replaced as a whole, so that threads need no lock: at worst a graph is checked twice.
        self._known: tuple[KnownGraph, ...] = ()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, sender: Tensor, receiver: Tensor) -> KnownGraph | None:
        """The entry of a graph, a new one if needed; None for a graph that cannot be recognised later."""
        # A traced graph would hold a known graph's order as a constant.
        if torch.compiler.is_compiling() or modes_at_work() or is_transforming():
            return None
        if not _can_be_looked_at(sender, receiver):
            return None
        is_on_host = _is_on_host(receiver)
        if _is_capturing(receiver):
            return self._find_in_capture(sender, receiver)
        known = self.seen(sender, receiver)
        if known is not None:
            return known
        if not (is_on_host or (_is_counted(sender) and _is_counted(receiver))):
            return None
        check_sizes(receiver.numel())  # before it is copied
        newest = KnownGraph(sender, receiver, is_on_host)
        kept, nbytes = [newest], 0
        for known in self._known[: self.size - 1]:
            nbytes += known.nbytes
            if nbytes <= _KEPT_BYTES:
                kept.append(known)
        self._known = tuple(kept)
        return newest

    def seen(self, sender: Tensor, receiver: Tensor) -> KnownGraph | None:
        """The entry of a graph that was found before, outside of captures; no new one. Also while one is captured."""
        is_on_host = _is_on_host(receiver)
        for known in self._known:
            if known.is_on_host is is_on_host and known.is_still(sender, receiver):
                return known
        return None

    def _find_in_capture(self, sender: Tensor, receiver: Tensor) -> KnownGraph | None:
        if _in_capture is None or not (_is_counted(sender) and _is_counted(receiver)):
            return None
        graphs = _in_capture.setdefault((self, stream_of(receiver)), [])
        for known in graphs:
            if known.is_still(sender, receiver):
                return known
        graphs.append(KnownGraph(sender, receiver, is_on_host=False, is_captured=True))
        return graphs[-1]

    def order(
        self, sender: Tensor, receiver: Tensor, needs: tuple[int, int, Hashable], make: Callable[[], EdgeOrder]
    ) -> tuple[EdgeOrder, KnownGraph | None] | None:
        """The order of a graph's edges, kept or made now on this stream, after :meth:`check`; and its result.

        needs: num_in, num_out and all else that determines the order. None for a graph that cannot be recognised later.
        """
        known = self.find(sender, receiver)
        if known is None:
            return None
        # An order made on one stream may not be read from another without waiting for it.
        stream = stream_of(receiver)
        order = known.orders.get((needs, stream))
        if order is None:
            # Even an order made under inference mode must work with autograd later.
            with torch.inference_mode(False):
                order = make()
            self.check(sender, receiver, *needs[:2])
            make_room(known.orders)
            known.orders[needs, stream] = order
        return order, None if known.is_captured else known

    def check(self, sender: Tensor, receiver: Tensor, num_in: int, num_out: int) -> KnownGraph | None:
        """The entry of a graph whose indices are in range; otherwise InputError, or on a GPU a device-side assertion.

        The check on a GPU does not synchronise. Graphs on a GPU that cannot be recognised later are not checked, since
        that would cost a launch in every call; neither are those that are being captured. They have no entry.
        """
        known = self.find(sender, receiver)
        if known is not None and known.is_captured:
            return None
        if known is not None and (num_in, num_out) in known.in_range:
            return known
        if receiver.is_cpu:
            check_indices(sender, receiver, num_in, num_out)
        elif known is not None and receiver.is_cuda:
            check_on_device("sender", sender, num_in)
            check_on_device("receiver", receiver, num_out)
        if known is not None:
            make_room(known.in_range)
            known.in_range.add((num_in, num_out))
        return known


def stream_of(index: Tensor) -> int:
    """The current stream of a GPU's tensor; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(index.get_device()) if index.is_cuda else 0


def kept_fact(known: KnownGraph | None, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What ``make`` gives, kept with a graph that is recognised again."""
    if known is not None and key in known.facts:
        return known.facts[key]
    with torch.inference_mode(False):
        made = make()
    if known is not None:
        make_room(known.facts)
        known.facts[key] = made
    return made


def make_room(facts: Any) -> None:
    if len(facts) >= _KEPT_FACTS:
        facts.clear()


def _can_be_looked_at(sender: Tensor, receiver: Tensor) -> bool:
    """False for subclasses, and for inference tensors on a GPU (no counter of writes)."""
    if type(sender) is not Tensor or type(receiver) is not Tensor:
        return False
    if receiver.is_cpu:
        return sender.is_cpu
    return receiver.is_cuda and sender.is_cuda and not (sender.is_inference() or receiver.is_inference())


def _is_on_host(index: Tensor) -> bool:
    return index.is_cpu


def _is_capturing(index: Tensor) -> bool:
    return index.is_cuda and torch._C._cuda_isCurrentStreamCapturing()


def _is_counted(index: Tensor) -> bool:
    """Whether torch counts writes: it owns the memory (only then it can be resized), and a view is in its base's."""
    storage, base = index.untyped_storage(), index._base
    return storage.resizable() and (base is None or base.untyped_storage()._cdata == storage._cdata)


# By table of graphs and stream, those of the CUDA graph that is being captured; None outside of known_in_capture.
_in_capture: dict[tuple[KnownGraphs, int], list[KnownGraph]] | None = None


@contextlib.contextmanager
def known_in_capture() -> Iterator[None]:
    """Around the capture of a CUDA graph: its nodes and edges are ordered once a replay, not once a layer.

    Otherwise no graph is recognised during a capture. What was found is forgotten at the end: it is in memory of the
    captured graph, and right only within a replay. One capture at a time.
    """
    global _in_capture
    _in_capture = {}
    try:
        yield
    finally:
        _in_capture = None


# Shared by all operators, because the layers of a model use the same graph.
KNOWN_GRAPHS = KnownGraphs()
