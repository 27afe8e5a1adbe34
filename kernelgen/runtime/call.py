"""Checks the tensors of a call, allocates those of its results, and tells those who watch calls."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.arithmetic.directions import OPERANDS
from kernelgen.errors import InputError
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime.graph import KNOWN_GRAPHS, NO_ORDER, EdgeOrder, KnownGraph, check_is_tensor, check_sizes
from kernelgen.runtime.kernel import clear

# Checks the tensors of a call: makes a checked :class:`Graph`, and contiguous, aligned operands.

# Alignment of operands in bytes.
ALIGNMENT = 16
# Graphs of at most this many edges are kept, so that the next call with the same order skips the checks.
KEPT_EDGES = 1 << 14
# One tensor for each of OPERANDS; None if the direction does not have it.
Operands = tuple[Tensor | None, ...]


class Graph(NamedTuple):
    """A call's edges (None for a plain product), row counts and shapes by slot, checked once for all directions."""

    sender: Tensor | None
    receiver: Tensor | None
    order: EdgeOrder
    num_edges: int
    num_in: int
    num_out: int
    shapes: dict[str, tuple[int, ...]]

    # The tensors of indices and order. Autograd saves them to detect writes between forward and backward.
    saved: tuple[Tensor, ...] = ()
    # Tells whether the indices were written since they were checked; None for a graph that is not recognised again.
    known: KnownGraph | None = None

    def of_saved(self, saved: Sequence[Tensor]) -> Graph:
        """The graph with autograd's tensors in place of :attr:`saved`; saved-tensor hooks may have copied them."""
        if all(map(operator.is_, saved, self.saved)):
            return self
        kept = dict(zip(map(id, self.saved), saved, strict=True))
        sender, receiver, *order = (kept.get(id(tensor)) for tensor in (self.sender, self.receiver, *self.order))
        return self._replace(sender=sender, receiver=receiver, order=EdgeOrder(*order), saved=tuple(saved))


def _is_still(
    graph: Graph,
    x: Tensor,
    sender: Tensor | None,
    receiver: Tensor | None,
    order: EdgeOrder,
    known: KnownGraph | None,
) -> bool:
    """Whether these are the graph's own indices and order, and the indices still have their form.

    A graph that was recognised by its memory is the same whichever views of it are given. On the CPU other tensors may
    have its contents; autograd must notice writes to those that were given.
    """
    if sender is None or receiver is None or order is not graph.order:
        return False
    device, shape = x.get_device(), (graph.num_edges,)
    if known is not None and known is graph.known and not known.is_on_host:
        return sender.shape == shape and sender.get_device() == device
    if sender is not graph.sender or receiver is not graph.receiver:
        return False
    same = sender.shape == shape == receiver.shape and sender.dtype is receiver.dtype
    here = sender.get_device() == device == receiver.get_device()
    return same and here and sender.is_contiguous() and receiver.is_contiguous()


class Checks:
    """Checks an operator's tensors; raises InputError if they do not fit."""

    def __init__(self, problem: TensorProductProblem, operation: str, dtype: torch.dtype, device_type: str) -> None:
        self.problem = problem
        self.is_conv = operation == "conv"
        self.dtype = dtype
        self.device_type = device_type
        self._last: Graph | None = None

    def given(self, operands: Operands) -> tuple[tuple[int, str, str], ...]:
        """Position, name and slot of the operands that are not None."""
        return tuple((i, name, name[-1]) for i, name in enumerate(OPERANDS) if operands[i] is not None)

    def graph(
        self,
        x: Tensor,
        y: Tensor,
        sender: Tensor | None,
        receiver: Tensor | None,
        num_out: int | None,
        order: EdgeOrder | None,
        keep: bool = False,
        known: KnownGraph | None = None,
    ) -> Graph:
        """The checked graph of a call, with contiguous index tensors.

        keep: the tensors and order are the caller's own and may come again; a small graph is then checked only once.
        known: the entry of the graph, if it was just found to be unchanged, with indices in range.
        """
        if x.dim() != 2 or y.dim() != 2:
            raise InputError(f"x is {tuple(x.shape)} and y {tuple(y.shape)}; expected [rows, features] for both")
        num_edges, num_in, order = y.shape[0], x.shape[0], order or NO_ORDER
        last = self._last if keep else None
        if last and last[3:6] == (num_edges, num_in, num_out) and _is_still(last, x, sender, receiver, order, known):
            unwritten = known is not None or last.known.is_unwritten(sender, receiver)  # type: ignore[union-attr, arg-type]
            if unwritten:
                return last
        if not self.is_conv:
            check_sizes(num_edges)
            if sender is not None or receiver is not None:
                raise InputError("sender and receiver were given to a plain product; build it with operation='conv'")
            num_in = num_out = num_edges
        else:
            num_out = num_in if num_out is None else num_out
            if num_out < 0:
                raise InputError(f"num_out is {num_out}; expected the number of destinations, at least 0")
            check_sizes(num_edges, num_in, num_out)
            sender, receiver = self._indices(sender, receiver, num_edges, x.device)
            known = known or KNOWN_GRAPHS.check(sender, receiver, num_in, num_out)
            if known is not None:
                sender, receiver = known.contiguous(sender, receiver)
            else:
                sender, receiver = sender.contiguous(), receiver.contiguous()
            if order is not NO_ORDER:
                sizes: tuple[tuple[int, ...], ...] = ((num_out, 3), (num_edges,), (num_in, 3), (num_edges,))
                order = self._order(order, sizes, x.device)
        problem = self.problem
        shapes: dict[str, tuple[int, ...]] = {
            "x": (num_in, problem.dim_in1),
            "y": (num_edges, problem.dim_in2),
            "w": (problem.weight_numel,) if problem.shared_weights else (num_edges, problem.weight_numel),
            "g": (num_out, problem.dim_out),
        }
        saved = tuple(tensor for tensor in (sender, receiver, *order) if tensor is not None)
        graph = Graph(sender, receiver, order, num_edges, num_in, num_out, shapes, saved, known)
        if keep and num_edges <= KEPT_EDGES and known is not None:
            self._last = graph
        return graph

    def operands(
        self, operands: Operands, read: tuple[tuple[int, str, str], ...], shapes: dict[str, tuple[int, ...]]
    ) -> Operands:
        """The operands; those in ``read`` are copied if they are not contiguous and aligned."""
        x = operands[0]
        assert x is not None
        if x.device.type != self.device_type:
            raise InputError(
                f"x is on {x.device}; this operator was built for {self.device_type}: build another for it"
            )
        device, dtype, cpu = x.get_device(), self.dtype, x.is_cpu
        ready: list[Tensor | None] | None = None
        for position, name, slot in read:
            tensor = operands[position]
            if tensor is None:
                raise InputError(f"{name} is missing")
            # Device numbers are negative except for GPUs.
            elsewhere = tensor.get_device() != device or (device < 0 and tensor.is_cpu is not cpu)
            if tensor.dtype is not dtype or tensor.shape != shapes[slot] or elsewhere:
                raise self._mismatch(name, tensor, shapes[slot], x.device)
            if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
                ready = ready or list(operands)
                ready[position] = tensor.clone(memory_format=torch.contiguous_format)
        return operands if ready is None else tuple(ready)

    def _indices(
        self, sender: Tensor | None, receiver: Tensor | None, num_edges: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        for name, index in (("sender", sender), ("receiver", receiver)):
            if index is None:
                raise InputError(f"{name} is missing; a convolution needs sender and receiver [num_edges]")
            check_is_tensor(name, index)
            fits = index.dtype in (torch.int32, torch.int64) and index.shape == (num_edges,)
            if not fits or index.device != device:
                raise InputError(
                    f"{name} is {index.dtype} {tuple(index.shape)} on {index.device}; "
                    f"expected int32 or int64 ({num_edges},) on {device}, one index for each row of y"
                )
        assert sender is not None and receiver is not None
        if sender.dtype is not receiver.dtype:
            raise InputError(f"sender is {sender.dtype} and receiver {receiver.dtype}; expected one dtype")
        return sender, receiver

    def _order(self, order: EdgeOrder, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> EdgeOrder:
        """The precomputed order, contiguous; InputError if it does not fit the graph."""
        for name, tensor, shape in zip(EdgeOrder._fields, order, shapes, strict=True):
            if tensor is None:
                continue
            if tensor.dtype is not torch.int32 or tensor.shape != shape or tensor.device != device:
                raise InputError(
                    f"order.{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected int32 "
                    f"{shape} on {device}: make it with edge_order(receiver, num_out={shapes[0][0]})"
                )
            if not tensor.is_contiguous():
                order = order._replace(**{name: tensor.contiguous()})
        return order

    def _mismatch(self, name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> InputError:
        rows = "num_edges is taken from y, num_in from x"
        return InputError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected {self.dtype} "
            f"{shape} on {device} ({rows}) for {self.problem.irreps_in1} x "
            f"{self.problem.irreps_in2} -> {self.problem.irreps_out}"
        )


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied if it is not contiguous and aligned."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


# Allocates tensors for results.
#
# Host time limits calls on small graphs, and torch's public allocating functions took a seventh of such a backward
# pass. So this uses the functions with which torch's compiled graphs allocate, if this version of torch has them.
#
# On the host, outputs of tens of megabytes are mapped anew in every call. Touching them page by page (4 KiB each) can
# take longer than the kernel. Advising huge pages before the first touch turns 512 page faults into one.

HUGE_PAGE = 2 << 20
# From asm-generic/mman-common.h.
_MADV_HUGEPAGE = 14


def _of_compiled_graphs(name: str) -> Callable[..., Tensor] | None:
    return getattr(getattr(torch._C._dynamo, "guards", None), name, None)


_empty_cpu = _of_compiled_graphs("_empty_strided_cpu")
_empty_cuda = _of_compiled_graphs("_empty_strided_cuda")
_reinterpret = _of_compiled_graphs("_reinterpret_tensor")


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """``like.new_empty(shape)``, contiguous; large host tensors ask for huge pages."""
    if like.is_cpu:
        out = like.new_empty(shape) if _empty_cpu is None else _empty_cpu(shape, _strides(shape), like.dtype)
        if math.prod(shape) * out.element_size() >= 2 * HUGE_PAGE:
            begin = -(-out.data_ptr() // HUGE_PAGE) * HUGE_PAGE
            end = (out.data_ptr() + out.nbytes) // HUGE_PAGE * HUGE_PAGE
            advise = _madvise()
            if advise is not None and end > begin:
                advise(begin, end - begin, _MADV_HUGEPAGE)  # only advice: a failure does no harm
        return out
    if _empty_cuda is not None and _is_on_current_gpu(like):
        return _empty_cuda(shape, _strides(shape), like.dtype)
    return like.new_empty(shape)


def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """``like.new_zeros(shape)``, allocated as :func:`empty` does."""
    out = empty(shape, like)
    return out if _is_on_current_gpu(out) and clear(out) else out.zero_()


def _is_on_current_gpu(tensor: Tensor) -> bool:
    """Whether the fast functions work for this tensor's device."""
    return tensor.is_cuda and torch._C._cuda_getDevice() == tensor.get_device()


def part(flat: Tensor, shape: tuple[int, ...], begin: int) -> Tensor:
    """The elements of ``flat`` from ``begin`` on as a separate tensor, with its own counter of in-place writes."""
    if _reinterpret is None:
        return flat.as_strided(shape, _strides(shape), begin).data
    return _reinterpret(flat, shape, _strides(shape), begin)


@functools.lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    if len(shape) == 2:
        return max(1, shape[1]), 1
    return tuple(math.prod(max(1, size) for size in shape[i + 1 :]) for i in range(len(shape)))


@functools.cache
def _madvise() -> Any:
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None  # not Linux: keep the page size
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


# Functions that learn which kernels a process runs: a tuner asks what a model needs.
#
# In: every run of an operator's direction. Out: a call of each watcher, before the kernel is launched. Without watchers
# a run pays for one test of an empty list.

# Called with the operator, the direction, the number of edges and of result rows, and, for a convolution, sender and
# receiver. A watcher may change this list.
Watcher = Callable[[Any, Any, int, int, Tensor | None, Tensor | None], None]
WATCHERS: list[Watcher] = []
# Called when an operator prepares a direction's kernel, before its first run: rare.
PREPARING: list[Callable[[], None]] = []


def tell(
    operator: Any, direction: Any, num_edges: int, num_out: int, sender: Tensor | None, receiver: Tensor | None
) -> None:
    """Call every watcher."""
    for watcher in tuple(WATCHERS):
        watcher(operator, direction, num_edges, num_out, sender, receiver)


def tell_of_preparing() -> None:
    """Call every function of ``PREPARING``."""
    for function in tuple(PREPARING):
        function()
