"""An operator's calls without autograd: each returns the outputs of one direction, keyed by slot.

Checks, tuning and the autograd functions use them. ``kernelgen.ops.operator`` has the rest of the operator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kernelgen.errors import InputError
from kernelgen.problem.tensor_product import TensorProductProblem
from kernelgen.runtime.arguments import Graph, Operands
from kernelgen.runtime.graph import EdgeOrder
from kernelgen.terms.directions import Direction, backward, double_backward, forward
from kernelgen.watchers import WATCHERS, tell, tell_of_preparing

# Runs one direction on operands and a graph (``poison``: see Runner); outputs by slot.
AnyRunner = Callable[..., dict[str, Tensor]]
# Direction, dtype of the indices (None for a plain product) and number of the device.
RunnerKey = tuple[Direction, torch.dtype | None, int]


class DirectCalls(ABC):
    """The calls of an operator; tensors are those of :class:`kernelgen.ops.operator.Operator`, ``text`` its JSON."""

    text: str
    problem: TensorProductProblem
    is_conv: bool
    shared_weights: bool
    # Makes the checked graph of x, y, sender, receiver, num_out and order, which all calls on it share.
    graph: Callable[..., Graph]
    _runners: dict[RunnerKey, AnyRunner]

    @abstractmethod
    def prepared(
        self, direction: Direction, operands: Operands, graph: Graph, runners: dict[RunnerKey, AnyRunner]
    ) -> AnyRunner:
        """The runner of a direction's first call, kept in ``runners``."""

    def for_size(self, num_edges: int, num_out: int) -> DirectCalls:
        """The operator for a graph: this one, unless it is a family."""
        return self

    @abstractmethod
    def one_row(self, w: Tensor) -> Tensor:
        """Shared weights given as [1, weight_numel] become [weight_numel]."""

    def run_forward(
        self,
        x: Tensor,
        y: Tensor,
        w: Tensor,
        sender: Tensor | None = None,
        receiver: Tensor | None = None,
        num_out: int | None = None,
        order: EdgeOrder | None = None,
        *,
        poison: bool = False,
    ) -> Tensor:
        """The product without autograd. poison: first fill outputs that the kernel must overwrite with NaN."""
        operands = (x, None, y, None, self.one_row(w), None, None, None)
        return self.run(forward(), operands, sender, receiver, num_out, order, poison)["g"]

    def run_backward(
        self,
        x: Tensor,
        y: Tensor,
        w: Tensor,
        g: Tensor,
        sender: Tensor | None = None,
        receiver: Tensor | None = None,
        num_out: int | None = None,
        order: EdgeOrder | None = None,
        *,
        outputs: str = "xyw",
        poison: bool = False,
    ) -> dict[str, Tensor]:
        """First gradients with respect to ``outputs``, given the result's cotangent g; keyed by slot."""
        operands = (x, None, y, None, self.one_row(w), None, g, None)
        return self.run(
            backward(outputs), operands, sender, receiver, g.shape[0] if num_out is None else num_out, order, poison
        )

    def run_double_backward(
        self,
        x: Tensor,
        y: Tensor,
        w: Tensor,
        g: Tensor,
        tangents: Mapping[str, Tensor],
        sender: Tensor | None = None,
        receiver: Tensor | None = None,
        num_out: int | None = None,
        order: EdgeOrder | None = None,
        *,
        outputs: str = "xywg",
        poison: bool = False,
    ) -> dict[str, Tensor]:
        """Gradients of ``sum over slots of <tangents[slot], first gradient>``; keyed by slot.

        A tangent of ``g`` is the cotangent of the value: the value's gradients with respect to x, y and w are added.
        """
        if not tangents or not set(tangents) <= set("xywg"):
            raise InputError(f"tangents are {sorted(tangents)}; expected at least one of 'x', 'y', 'w' and 'g'")
        direction = double_backward("".join(slot for slot in "xywg" if slot in tangents), outputs)
        tw = tangents.get("w")
        tw = tw if tw is None else self.one_row(tw)
        operands = (x, tangents.get("x"), y, tangents.get("y"), self.one_row(w), tw, g, tangents.get("g"))
        return self.run(
            direction, operands, sender, receiver, g.shape[0] if num_out is None else num_out, order, poison
        )

    def run_joint_backward(
        self,
        x: Tensor,
        y: Tensor,
        w: Tensor,
        g: Tensor,
        ty: Tensor,
        tg: Tensor,
        sender: Tensor | None = None,
        receiver: Tensor | None = None,
        num_out: int | None = None,
        order: EdgeOrder | None = None,
        *,
        outputs: str = "xyw",
        poison: bool = False,
    ) -> dict[str, Tensor]:
        """Gradients of ``<ty, dF/dy> + <tg, value>``, a loss on edge gradients (for cotangent g) and values."""
        tangents = {"y": ty, "g": tg}
        return self.run_double_backward(
            x, y, w, g, tangents, sender, receiver, num_out, order, outputs=outputs, poison=poison
        )

    def run(
        self,
        direction: Direction,
        operands: Operands,
        sender: Tensor | None,
        receiver: Tensor | None,
        num_out: int | None,
        order: EdgeOrder | None,
        poison: bool = False,
    ) -> dict[str, Tensor]:
        """Run any direction on operands in the order of ``OPERANDS``; gradients keyed by slot, without autograd."""
        x, y = operands[0], operands[2]
        assert x is not None and y is not None
        return self.run_on(self.graph(x, y, sender, receiver, num_out, order), direction, operands, poison)

    def run_on(self, graph: Graph, direction: Direction, operands: Operands, poison: bool = False) -> dict[str, Tensor]:
        """:meth:`run` on a graph that :meth:`graph` has checked."""
        x, sender = operands[0], graph.sender
        assert x is not None
        key = (direction, None if sender is None else sender.dtype, x.get_device())
        runner = self._runners.get(key)
        if runner is None:
            tell_of_preparing()
            runner = self.prepared(direction, operands, graph, self._runners)
        if WATCHERS:
            tell(self, direction, graph.num_edges, graph.num_out, sender, graph.receiver)
        return runner(operands, graph, poison)
