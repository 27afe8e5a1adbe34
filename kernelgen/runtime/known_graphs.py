"""Remembers graphs, so that indices are checked and edges ordered once a graph instead of once a call.

On the CPU a graph is recognised by its contents, so every write is noticed. On a GPU a comparison would synchronise.
There a graph is recognised by the memory of its tensors and torch's counters of in-place writes, which a tensor shares
with its views: every new ``edge_index[1]`` is the same receiver. Memory that torch does not own (of NumPy, or imported
through DLPack) can change without being counted, so it is never recognised. Torch also does not count writes to its own
memory through ``.data``, ``untyped_storage()``, a DLPack export, or a tensor that got the memory by ``set_`` or by
an assignment to ``.data``; nor those of replayed CUDA graphs, and of other libraries' kernels that take pointers
(Triton, Warp, CuPy). After such writes on a GPU, pass new tensors (``receiver.clone()``) or your own ``order``.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from kernelgen.compat import is_transforming, modes_at_work
from kernelgen.runtime.graph import EdgeOrder, check_indices, check_on_device, check_sizes

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


def kept_fact(known: KnownGraph | None, key: tuple, make: Callable[[], Any]) -> Any:
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
