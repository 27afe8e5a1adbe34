"""What a peer is: a product by somebody else, in its own layout and weight order, proven right before it is timed.

An adapter gives a :class:`Product`; :class:`Peer.prepare` turns it into :class:`CheckedPasses`. Conversions of layout
and weight order happen there, once, outside of every timed call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autotune.baselines.passes import AutogradPasses, Call
from autotune.errors import PeerError
from autotune.verify import Reference
from autotune.workload import Tensors, Workload, make_tensors, relayout

# Relative error against float64 e3nn that still counts as the same product; a wrong path is off by about one.
PEER_TOLERANCE = {"float32": 1e-3, "float64": 1e-6}
SLOTS = {"forward": "g", "backward": "xyw", "double_backward": "xywg"}


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class Product:
    """A differentiable ``call(x, y, w)`` in ``layout``; weights go from e3nn's order to its own and back."""

    call: Call
    layout: str = "mul_ir"
    weights_in: Callable[[torch.Tensor], torch.Tensor] = same
    weights_out: Callable[[torch.Tensor], torch.Tensor] = same


@dataclass(eq=False)
class Task:
    """What peers share: a workload on a device, its tensors, and the float64 values (made on first use)."""

    workload: Workload
    device: torch.device
    given_tensors: Tensors | None = None
    given_reference: Reference | None = None

    @functools.cached_property
    def tensors(self) -> Tensors:
        return self.given_tensors or make_tensors(self.workload, self.device)

    @functools.cached_property
    def reference(self) -> Reference:
        return self.given_reference or Reference(self.workload, self.device, self.tensors)

    @property
    def is_conv(self) -> bool:
        return self.workload.operation == "conv"

    @property
    def edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Senders and receivers of a convolution."""
        assert self.tensors.sender is not None and self.tensors.receiver is not None
        return self.tensors.sender, self.tensors.receiver


@dataclass(frozen=True)
class Adapter:
    """One peer. ``backends``: where it belongs. ``unusable``: why it cannot run here (None if it can).

    ``listed_if_absent``: whether it stays in the table, with the reason, where its ``module`` is not installed.
    ``warm_up_calls``: calls before its timings are steady.
    """

    name: str
    backends: tuple[str, ...]
    unusable: Callable[[torch.device], str | None]
    build: Callable[[Task], Product]
    warm_up_calls: int = 10
    listed_if_absent: bool = True
    module: str = ""


@dataclass(frozen=True, eq=False)
class Peer:
    """An adapter with its task."""

    adapter: Adapter
    task: Task

    @property
    def name(self) -> str:
        return self.adapter.name

    @property
    def warm_up_calls(self) -> int:
        return self.adapter.warm_up_calls

    def prepare(self) -> CheckedPasses:
        """Build the peer and check its forward values. Raises PeerError with the reason where it cannot be used."""
        reason = self.adapter.unusable(self.task.device)
        if reason:
            raise PeerError(f"{self.name}: {reason}")
        try:
            passes = CheckedPasses(self.name, self.adapter.build(self.task), self.task)
            passes.check("forward")
        except PeerError:
            raise
        except Exception as error:  # a peer may fail in its own ways; each is an entry in the table
            raise PeerError(f"{self.name}: {type(error).__name__}: {error}"[:1000]) from error
        return passes


class CheckedPasses(AutogradPasses):
    """Passes of a peer; each is held to the float64 values the first time that it is called."""

    def __init__(self, name: str, product: Product, task: Task) -> None:
        super().__init__(product.call, _own_form(product, task))
        self.name, self._product, self._task = name, product, task
        self.errors: dict[str, dict[str, float]] = {}

    def check(self, direction: str) -> dict[str, float]:
        """Relative errors of one direction by slot; PeerError where they are too large."""
        if direction in self.errors:
            return self.errors[direction]
        run = {
            "forward": lambda: (super(CheckedPasses, self).forward(),),
            "backward": super().backward,
            "double_backward": super().double_backward,
        }[direction]
        outputs = dict(zip(SLOTS[direction], run(), strict=True))
        errors = self._task.reference.check(direction, {slot: self._back(slot, t) for slot, t in outputs.items()})
        limit = PEER_TOLERANCE[self._task.workload.dtype]
        wrong = {slot: error for slot, error in errors.items() if not error <= limit}
        if wrong:
            shown = ", ".join(f"{slot} {error:.1e}" for slot, error in wrong.items())
            raise PeerError(f"{self.name}: {direction} disagrees with float64 e3nn by more than {limit:g}: {shown}")
        self.errors[direction] = errors
        return errors

    def forward(self) -> torch.Tensor:
        if "forward" not in self.errors:
            self.check("forward")
        return super().forward()

    def backward(self) -> tuple[torch.Tensor, ...]:
        if "backward" not in self.errors:
            self.check("backward")
        return super().backward()

    def double_backward(self) -> tuple[torch.Tensor, ...]:
        if "double_backward" not in self.errors:
            self.check("double_backward")
        return super().double_backward()

    def forward_backward(self) -> tuple[torch.Tensor, ...]:
        if "backward" not in self.errors:
            self.check("backward")
            self.release()
        return super().forward_backward()

    def _back(self, slot: str, tensor: torch.Tensor) -> torch.Tensor:
        """An output in the workload's layout and e3nn's weight order."""
        if slot == "w":
            return self._product.weights_out(tensor.detach())
        if slot == "y":
            return tensor
        problem = self._task.workload.problem
        irreps = problem.irreps_in1 if slot == "x" else problem.irreps_out
        return relayout(tensor.detach(), irreps, self._product.layout, self._task.workload.layout)


def _own_form(product: Product, task: Task) -> Tensors:
    """The task's tensors in the peer's layout and weight order."""
    t, problem, source = task.tensors, task.workload.problem, task.workload.layout

    def features(tensor: torch.Tensor, irreps: str) -> torch.Tensor:
        return relayout(tensor, irreps, source, product.layout).contiguous()

    return dataclasses.replace(
        t,
        x=features(t.x, problem.irreps_in1),
        tx=features(t.tx, problem.irreps_in1),
        g=features(t.g, problem.irreps_out),
        w=product.weights_in(t.w).contiguous(),
        tw=product.weights_in(t.tw).contiguous(),
    )
