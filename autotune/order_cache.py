"""The edge order of the last few graphs, so that an unsorted graph is ordered once and not at every call.

Sender and receiver tensors enter, their :class:`kernelgen.graph.EdgeOrder` leaves. A graph is recognised by the
identity of its tensors, their version counters and memory: the layers of a model share them, so they share the order.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from kernelgen.graph import EdgeOrder
from kernelgen.operators import Operator
from kernelgen.transforms import is_transforming

KEPT_GRAPHS = 8


@dataclass(frozen=True)
class _Known:
    receiver: weakref.ref[torch.Tensor]
    sender: weakref.ref[torch.Tensor]
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

    def order(
        self,
        operator: Operator,
        sender: torch.Tensor,
        receiver: torch.Tensor,
        num_in: int,
        num_out: int,
        is_sorted: bool,
    ) -> EdgeOrder:
        """What the operator's kernels need; computed (on the current stream) unless this very graph is known."""
        if not (_is_recognisable(receiver) and _is_recognisable(sender)):
            return operator.order(sender, receiver, num_in, num_out, is_sorted)
        needs = (operator.by_receiver, operator.by_sender, num_in, num_out, is_sorted)
        # The stream too: an order made on one stream may not be read from another without waiting for it.
        stream = torch._C._cuda_getCurrentRawStream(receiver.get_device()) if receiver.is_cuda else 0
        state = (needs, stream, _state(receiver), _state(sender))
        for known in self._known:
            if known.receiver() is receiver and known.sender() is sender and known.state == state:
                return known.order
        order = operator.order(sender, receiver, num_in, num_out, is_sorted)
        newest = _Known(weakref.ref(receiver, self._forget), weakref.ref(sender, self._forget), state, order)
        self._known = (newest, *self._known)[: self.size]
        return order

    def _forget(self, dead: weakref.ref[torch.Tensor]) -> None:
        self._known = tuple(known for known in self._known if dead not in (known.receiver, known.sender))


def _is_recognisable(receiver: torch.Tensor) -> bool:
    """Not so: traced or transformed tensors, inference tensors (no version), memory that a CUDA graph owns."""
    if torch.compiler.is_compiling() or is_transforming():
        return False
    if type(receiver) is not torch.Tensor or receiver.is_inference():
        return False
    return not (receiver.is_cuda and torch.cuda.is_current_stream_capturing())


def _state(index: torch.Tensor) -> Hashable:
    return (index._version, index.data_ptr(), index.shape, index.stride())
