"""The destination order of the last few graphs, so that an unsorted graph is ordered once and not at every call.

A receiver tensor enters, its :class:`kernelgen.graph.EdgeOrder` leaves. A graph is recognised by the identity of its
receiver tensor, its version counter and its memory: the layers of a model share the tensor, so they share the order.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from kernelgen.graph import EdgeOrder, edge_order, is_in_order

KEPT_GRAPHS = 8


@dataclass(frozen=True)
class _Known:
    receiver: weakref.ref[torch.Tensor]
    state: Hashable
    order: EdgeOrder


class OrderCache:
    """Keeps no graph alive: an order is dropped when its receiver tensor is.

    In-place changes that torch does not count (through NumPy's view of the memory, or by a foreign kernel) are not
    seen: hand such a graph's ``order`` to the module yourself.
    """

    def __init__(self, size: int = KEPT_GRAPHS) -> None:
        self.size = size
        # Replaced whole, never changed in place, so that threads need no lock: at worst a graph is ordered twice.
        self._known: tuple[_Known, ...] = ()

    def __len__(self) -> int:
        return len(self._known)

    def order(self, receiver: torch.Tensor, num_out: int, is_sorted: bool) -> EdgeOrder:
        """The order of these edges by receiver; computed (on the current stream) unless this very graph is known."""
        if not _is_recognisable(receiver):
            return edge_order(receiver, num_out, is_sorted=is_sorted)
        state = _state(receiver, num_out, is_sorted)
        for known in self._known:
            if known.receiver() is receiver and known.state == state:
                return known.order
        # Where the answer is at hand, on the CPU, a look saves the sort (and the kernel a permutation).
        looked = is_sorted or (receiver.device.type == "cpu" and receiver.dim() == 1 and is_in_order(receiver))
        order = edge_order(receiver, num_out, is_sorted=looked)
        newest = _Known(weakref.ref(receiver, self._forget), state, order)
        self._known = (newest, *self._known)[: self.size]
        return order

    def _forget(self, dead: weakref.ref[torch.Tensor]) -> None:
        self._known = tuple(known for known in self._known if known.receiver is not dead)


def _is_recognisable(receiver: torch.Tensor) -> bool:
    """Tracing has no stable identities, inference tensors no version, and captured memory belongs to its CUDA graph."""
    if torch.compiler.is_compiling() or type(receiver) is not torch.Tensor or receiver.is_inference():
        return False
    return not (receiver.is_cuda and torch.cuda.is_current_stream_capturing())


def _state(receiver: torch.Tensor, num_out: int, is_sorted: bool) -> Hashable:
    # The stream too: an order made on one stream may not be read from another without waiting for it.
    stream = torch.cuda.current_stream(receiver.device).cuda_stream if receiver.is_cuda else 0
    shape, stride = tuple(receiver.shape), receiver.stride()
    return (receiver._version, receiver.data_ptr(), shape, stride, num_out, is_sorted, stream)
