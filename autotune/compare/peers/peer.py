"""A peer: another library's product or harmonics, in its own layout and weight order, checked before it is timed.

An adapter gives a :class:`Product`; :class:`Peer.prepare` turns it into :class:`CheckedPasses`. Layout and weight order
are converted there once, outside timed calls.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autotune.database.maintenance import hash_of_text, statements_of
from autotune.errors import PeerError
from autotune.measure.kinds import AutogradPasses, Call, GraphOrder, measured_kind
from autotune.measure.references import Reference
from autotune.workload.known_kinds import ProductKind
from autotune.workload.workload import Tensors, Workload, relayout
from kernelgen.problem.other_kinds import VectorProblem

# Largest relative error against float64 e3nn of a correct product; a wrong path gives an error of about one.
PEER_TOLERANCE = {"float32": 1e-3, "float64": 1e-6}
# Directions that differentiate gradients.
SECOND = ("double_backward", "joint_backward")
Conversion = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Product:
    """A differentiable ``call(x, y, w)`` in ``layout``. For harmonics: ``call(x)``, in e3nn's layout; for contractions:
    ``call(x, w)``, in the workload's.

    into, back: untimed conversions by slot, from e3nn's order or convention to the peer's and back. no_second: why it
    has no second derivatives, if it has none.
    """

    call: Call
    layout: str = "mul_ir"
    into: Mapping[str, Conversion] = field(default_factory=dict)
    back: Mapping[str, Conversion] = field(default_factory=dict)
    no_second: str = ""


@dataclass(eq=False)
class Task:
    """What peers share: a workload on a device, its tensors, and the float64 reference (made on first use)."""

    workload: Workload
    device: torch.device
    given_tensors: Tensors | None = None
    given_reference: Reference | None = None

    @functools.cached_property
    def tensors(self) -> Tensors:
        return self.given_tensors or measured_kind(self.workload.operation).tensors(self.workload, self.device)

    @functools.cached_property
    def reference(self) -> Reference:
        return self.given_reference or measured_kind(self.workload.operation).reference(
            self.workload, self.device, self.tensors
        )

    @property
    def is_conv(self) -> bool:
        return self.workload.is_conv

    @property
    def edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Senders and receivers of a convolution."""
        assert self.tensors.sender is not None and self.tensors.receiver is not None
        return self.tensors.sender, self.tensors.receiver


@dataclass(frozen=True)
class Adapter:
    """One peer. ``backends``, ``operations``: those it supports. ``unusable``: why it cannot run here (None if it can).

    ``module``: what it needs beside torch, if anything. ``listed_if_absent``: whether it is listed without, with the
    reason.
    ``warm_up_calls``: calls before its timings are steady. ``deterministic``: promises bitwise equal results.
    ``build_s``: the most seconds that it takes to compile itself.
    ``order``: what it does once for a new graph; None if it needs nothing. That edges' rows then have to be in that
    order is not counted.
    """

    name: str
    backends: tuple[str, ...]
    unusable: Callable[[torch.device], str | None]
    build: Callable[[Task], Product]
    warm_up_calls: int = 10
    listed_if_absent: bool = True
    module: str = ""
    deterministic: bool = False
    operations: tuple[str, ...] = ProductKind.operations
    order: GraphOrder | None = None
    build_s: float = 0.0

    @property
    def code(self) -> str:
        """Hash of the file that builds it; comments and docstrings do not count."""
        return _hash_of_file(inspect.getfile(getattr(self.build, "func", self.build)))


@functools.cache
def _hash_of_file(path: str) -> str:
    return hash_of_text(statements_of(Path(path).read_text(encoding="utf-8")))


def needs(module: str, remedy: str) -> Callable[[torch.device], str | None]:
    """An ``unusable`` of peers that need a module: why it cannot be imported, and the remedy."""

    def unusable(device: torch.device) -> str | None:
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:
            return f"not usable ({error}); {remedy}"
        return None

    return unusable


@dataclass(frozen=True, eq=False)
class Peer:
    """An adapter applied to a task."""

    adapter: Adapter
    task: Task

    @property
    def name(self) -> str:
        return self.adapter.name

    def build(self) -> Product:
        """The product, unchecked. Raises PeerError with the reason if unusable here, or the peer's own exception."""
        reason = self.adapter.unusable(self.task.device)
        if reason:
            raise PeerError(f"{self.name}: {reason}")
        return self.adapter.build(self.task)

    def prepare(self) -> CheckedPasses:
        """Build the peer and check its forward values. Raises PeerError with the reason if it cannot be used."""
        try:
            passes = CheckedPasses(self.name, self.build(), self.task)
            passes.check("forward")
        except PeerError:
            raise
        except Exception as error:  # peers raise errors of their own, all of which the table shows
            raise PeerError(f"{self.name}: {type(error).__name__}: {error}"[:1000]) from error
        return passes


def _checked_first(which: str) -> Any:
    """The pass of :class:`AutogradPasses` of this name, with a check at the first call."""
    run = getattr(AutogradPasses, which)

    def checked(self: CheckedPasses) -> Any:
        self._check_first(which)
        return run(self)

    return checked


class CheckedPasses(AutogradPasses):
    """Passes of a contender, whose directions are checked against the float64 values at the first call.

    limit: largest accepted relative error, by default that of peers.
    """

    def __init__(self, name: str, product: Product, task: Task, limit: float | None = None) -> None:
        kind = task.workload.kind
        own: dict[str, Any] = {slot: _own_form(slot, product, task) for slot in kind.inputs + "g"}
        tensors = dataclasses.replace(task.tensors, **own)
        super().__init__(product.call, tensors, kind.inputs, kind.tangents, kind.forces)
        self._own_tangents: dict[str, torch.Tensor] = {}
        self.name, self._product, self._task = name, product, task
        self._limit = PEER_TOLERANCE[task.workload.dtype] if limit is None else limit
        self.errors: dict[str, dict[str, float]] = {}

    def check(self, direction: str) -> dict[str, float]:
        """Relative errors of one direction by slot; PeerError if they are too large."""
        if direction in self.errors:
            return self.errors[direction]
        values = getattr(super(), direction)()
        values = values if isinstance(values, tuple) else (values,)
        slots = self._task.workload.kind.directions[direction].outputs
        outputs = dict(zip(slots, values, strict=True))
        errors = self._task.reference.check(direction, {slot: self._back(slot, t) for slot, t in outputs.items()})
        wrong = {slot: error for slot, error in errors.items() if not error <= self._limit}
        if wrong:
            shown = ", ".join(f"{slot} {error:.1e}" for slot, error in wrong.items())
            raise PeerError(
                f"{self.name}: {direction} disagrees with float64 e3nn by more than {self._limit:g}: {shown}"
            )
        self.errors[direction] = errors
        return errors

    forward, backward, source_backward = map(_checked_first, ("forward", "backward", "source_backward"))
    feature_backward, edge_backward = map(_checked_first, ("feature_backward", "edge_backward"))
    double_backward, joint_backward = map(_checked_first, ("double_backward", "joint_backward"))
    forward_backward, force_step = map(_checked_first, ("forward_backward", "force_step"))

    def release(self) -> None:
        super().release()
        self._own_tangents.clear()

    def _check_first(self, which: str) -> None:
        # A peer's directions are all checked against the float64 reference; values were checked before.
        passes = {name.replace("+", "_"): parts for name, parts in self._task.workload.kind.passes.items()}
        directions = [name for name in passes[which] if name != "forward" or which == "forward"]
        if self._product.no_second and not set(SECOND).isdisjoint(directions):
            raise PeerError(f"{self.name}: {self._product.no_second}")
        for direction in directions:
            if direction not in self.errors:
                self.check(direction)
                if direction != which:
                    self.release()  # the autograd graph, which only the check needed

    def _tangents(self, slots: str) -> list[torch.Tensor]:
        """Tangents in the peer's form, made on first use: most passes never need those of the weights."""
        for slot in slots:
            if slot not in self._own_tangents:
                self._own_tangents[slot] = _own_form("t" + slot, self._product, self._task)
        return [self._own_tangents[slot] for slot in slots]

    def _back(self, slot: str, tensor: torch.Tensor) -> torch.Tensor:
        """Convert an output to the workload's layout and e3nn's order and convention."""
        if slot in self._product.back:
            tensor = self._product.back[slot](tensor.detach())
        if slot == "w":
            return tensor.detach()
        return _relaid(slot, tensor.detach(), self._task, self._product.layout, _layout(slot, self._task))


def _own_form(name: str, product: Product, task: Task) -> torch.Tensor:
    """An operand or tangent of the task in the peer's layout, order and convention."""
    tensor, slot = getattr(task.tensors, name), name[-1]
    if slot != "w":
        tensor = _relaid(slot, tensor, task, _layout(slot, task), product.layout)
    return (product.into[slot](tensor) if slot in product.into else tensor).contiguous()


def _layout(slot: str, task: Task) -> str:
    """Layout of a slot in the workload's tensors; edge attributes are always in e3nn's layout."""
    return "mul_ir" if slot == "y" else task.workload.layout


def _relaid(slot: str, tensor: torch.Tensor, task: Task, source: str, target: str) -> torch.Tensor:
    if source == target:
        return tensor
    problem = task.workload.product
    irreps_y = "1o" if isinstance(task.workload.problem, VectorProblem) else problem.irreps_in2
    irreps = {"x": problem.irreps_in1, "y": irreps_y, "g": problem.irreps_out}[slot]
    return relayout(tensor, irreps, source, target)
