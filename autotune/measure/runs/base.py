"""What runs the kernels of a kind: tensors, float64 reference, operator and calls of one workload.

What chooses their schedules is in :mod:`autotune.workload.kinds.base`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from autotune.measure.autograd_passes import Call
from autotune.measure.reference.tensor_product import Reference
from autotune.workload.tensors import Tensors
from autotune.workload.workload import Workload
from kernelgen.runtime.graph import EdgeOrder, edge_order
from kernelgen.schedule.knobs import Knobs

Run = Callable[[], dict[str, Tensor]]
# Elements of NaN around every operand of a trial; as many bytes as an aligned row of any dtype and vector width.
MARGIN = 4096


class Runs(ABC):
    """operations: those whose kernels it runs. An *operator* is what runs the kernels of a problem."""

    operations: ClassVar[tuple[str, ...]]

    @abstractmethod
    def tensors(self, workload: Workload, device: Any) -> Tensors:
        """Operands, cotangent and tangents."""

    @abstractmethod
    def reference(self, workload: Workload, device: Any, tensors: Tensors) -> Reference:
        """The float64 values of e3nn that outputs are held to."""

    @abstractmethod
    def build(self, workload: Workload, schedules: Mapping[str, Knobs], device: str) -> Any:
        """The operator with these schedules by direction; other directions take the default."""

    @abstractmethod
    def specs(self, operator: Any, directions: Iterable[str]) -> list[Any]:
        """Of the kernels that an operator takes for some directions."""

    @abstractmethod
    def call(self, workload: Workload, operator: Any, tensors: Tensors, order: EdgeOrder | None) -> Call:
        """The operator as a differentiable function of its inputs."""

    @abstractmethod
    def run(
        self, operator: Any, direction: str, tensors: Tensors, order: EdgeOrder | None, poison: bool = False
    ) -> Run:
        """One direction with every output asked for, without autograd; outputs by slot (``g`` is the value).

        poison: outputs are full of NaN before the kernel runs.
        """


def guarded(tensors: Tensors) -> Tensors:
    """The same values with NaN on both sides of every operand: what is read beyond one shows in the outputs."""

    def guard(tensor: Tensor) -> Tensor:
        wide = tensor.new_full((tensor.numel() + 2 * MARGIN,), torch.nan)
        inner = wide[MARGIN : MARGIN + tensor.numel()].view(tensor.shape)
        return inner.copy_(tensor)

    guards: dict[str, Any] = {
        name: guard(getattr(tensors, name)) for name in ("x", "y", "w", "g", "tx", "ty", "tw", "tg")
    }
    return dataclasses.replace(tensors, **guards)


def order_of(tensors: Tensors) -> EdgeOrder | None:
    """By receiver and by sender, as a model makes it once for its graph: no timed call may sort edges."""
    if tensors.receiver is None:
        return None
    return edge_order(tensors.receiver, tensors.num_nodes, is_sorted=True, sender=tensors.sender)
