"""Interface to run the kernels of a kind: tensors, float64 reference, operator and calls of one workload.

:mod:`autotune.workload.kinds.base` chooses schedules.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from autotune.measure.autograd_passes import Call
from autotune.measure.reference.tensor_product import Reference
from autotune.workload.tensors import Tensors
from autotune.workload.workload import Workload
from kernelgen.kernels.knobs import Knobs
from kernelgen.runtime.graph import EdgeOrder, edge_order
from kernelgen.runtime.known_graphs import KnownGraphs

Run = Callable[[], dict[str, Tensor]]
# What is done once for a new graph, given senders and receivers with edges in any order.
GraphOrder = Callable[[Tensor, Tensor], Any]
ORDER_SAMPLES = 10
# Number of NaN elements around every operand of a trial; keeps rows of any dtype and vector width aligned.
MARGIN = 4096


class Runs(ABC):
    """Runs the kernels of ``operations``. An *operator* is the object that runs the kernels of a problem."""

    operations: ClassVar[tuple[str, ...]]

    @abstractmethod
    def tensors(self, workload: Workload, device: Any) -> Tensors:
        """Make operands, cotangent and tangents."""

    @abstractmethod
    def reference(self, workload: Workload, device: Any, tensors: Tensors) -> Reference:
        """The float64 values of e3nn that outputs are compared with."""

    @abstractmethod
    def build(self, workload: Workload, schedules: Mapping[str, Knobs], device: str) -> Any:
        """The operator with these schedules by direction; other directions use the default."""

    @abstractmethod
    def specs(self, operator: Any, directions: Iterable[str]) -> list[Any]:
        """Specs of the kernels that an operator uses for some directions."""

    @abstractmethod
    def call(self, workload: Workload, operator: Any, tensors: Tensors, order: EdgeOrder | None) -> Call:
        """The operator as a differentiable function of its inputs."""

    @abstractmethod
    def run(
        self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool = False
    ) -> Run:
        """A function that runs one direction with all outputs, without autograd; outputs by slot (``g`` is the value).

        poison: fill outputs with NaN before the kernel runs.
        """


def guarded(tensors: Tensors) -> Tensors:
    """The same values with NaN around every operand, so that out-of-bounds reads show in the outputs."""

    def guard(tensor: Tensor) -> Tensor:
        wide = tensor.new_full((tensor.numel() + 2 * MARGIN,), torch.nan)
        inner = wide[MARGIN : MARGIN + tensor.numel()].view(tensor.shape)
        return inner.copy_(tensor)

    guards: dict[str, Any] = {
        name: guard(getattr(tensors, name)) for name in ("x", "y", "w", "g", "tx", "ty", "tw", "tg")
    }
    return dataclasses.replace(tensors, **guards)


def unordered(sender: Tensor, receiver: Tensor) -> tuple[Tensor, Tensor]:
    """The same edges in a random order, the same each time, as a program may give them."""
    shuffled = torch.randperm(len(sender), generator=torch.Generator().manual_seed(0)).to(sender.device)
    return sender[shuffled], receiver[shuffled]


def new_graph(operator: Any, num_nodes: int) -> GraphOrder:
    """What an operator does for a graph that it meets for the first time: order the edges, and check the indices."""
    product, nodes = getattr(operator, "product", operator), num_nodes

    def order(sender: Tensor, receiver: Tensor) -> Any:
        make = functools.partial(product.order, sender, receiver, nodes, nodes)
        return KnownGraphs().order(sender, receiver, (nodes, nodes, None), make)

    return order


def order_ms(order: GraphOrder | None, sender: Tensor, receiver: Tensor) -> float:
    """Median milliseconds of ordering these edges, given in random order; 0 for what needs no order."""
    if order is None:
        return 0.0
    from autotune.measure.timing import Sampler  # which imports this package's users

    given = unordered(sender, receiver)
    sampler = Sampler(lambda: order(*given), str(sender.device))
    sampler.warm_up()
    return statistics.median(sampler.take(ORDER_SAMPLES)) / 1e3


def order_of(tensors: Tensors) -> EdgeOrder | None:
    """The order by receiver and by sender, made once as in a model: no timed call may sort edges."""
    if tensors.receiver is None:
        return None
    return edge_order(tensors.receiver, tensors.num_nodes, is_sorted=True, sender=tensors.sender)
