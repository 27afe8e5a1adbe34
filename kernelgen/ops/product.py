"""The operator of a tensor product, a differentiable torch function.

``build`` makes an :class:`Operator`. Its ``forward`` uses ``kernelgen.ops.autograd``, or the torch ops of
``kernelgen.ops.library`` if torch traces; the calls without autograd are in ``kernelgen.runtime.call``. Kernels
compile at first use, one for each direction and set of wanted gradients.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelgen.arithmetic.couplings import couplings_digest
from kernelgen.arithmetic.directions import DIRECTIONS, Direction, backward, double_backward, fixed_order_parts, forward
from kernelgen.compat import is_tracing, is_transforming
from kernelgen.device import device_facts
from kernelgen.errors import TuningMissError, UnsupportedError
from kernelgen.kernels.product.plan import default_schedule
from kernelgen.kernels.product.schedule import SCHEDULES, Schedule, schedule_from_dict
from kernelgen.kernels.spec import Spec
from kernelgen.ops.autograd import PRODUCT, order_for_size, product
from kernelgen.ops.base import DTYPES, INDEX_DTYPES, rebuilds, register
from kernelgen.ops.first_run import LISTENERS, Choice, can_choose, choose
from kernelgen.ops.library import DifferentiableOperator, Maybe
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime.call import AnyRunner, Checks, DirectCalls, Graph, Operands, Runner, RunnerKey
from kernelgen.runtime.graph import (
    KNOWN_GRAPHS,
    NO_ORDER,
    EdgeOrder,
    Edges,
    check_ascending,
    check_ascending_on_device,
    is_in_order,
    order_by,
    row_count,
)


def build(
    problem: TensorProductProblem,
    schedule: Schedule | Mapping[str, Schedule] | None = None,
    *,
    operation: str = "conv",
    dtype: torch.dtype = torch.float32,
    layout: str = "mul_ir",
    device: torch.device | str = "cpu",
    deterministic: bool = False,
    refused: Mapping[str, str] | None = None,
    shortlists: Mapping[str, Sequence[Schedule]] | None = None,
) -> Operator:
    """The operator of a tensor product.

        >>> problem = TensorProductProblem.channelwise("128x0e+128x1o", "0e+1o", "0e+1o")
        >>> operator = build(problem)
        >>> out = operator(x, y, w, sender, receiver, num_out=len(x))     # [num_out, problem.dim_out]

    schedule: one for every direction, or by direction name; directions without one get the default schedule.
    operation: ``conv`` (gather by sender, product, sum by receiver) or ``plain`` (edge by edge).
    deterministic: every result is bitwise equal from run to run, because sums have a fixed order; this costs time. A
    separate kernel then computes gradients of x, with edges ordered by sender (schedule ``source_backward``).
    refused: directions that may not run, each with the text of its TuningMissError.
    shortlists: by direction, other schedules that its first run tries beside its own (``first_run``). The fastest one
    is then in ``schedules``.
    """
    return register(
        Operator(
            problem,
            schedule,
            dtype,
            torch.device(device),
            operation=operation,
            layout=layout,
            deterministic=deterministic,
            refused=refused,
            shortlists=shortlists,
        )
    )


class Operator(DirectCalls, DifferentiableOperator):
    """A tensor product with its schedules. Call it like a function; it is differentiable twice.

    Tensors: x [num_in, dim_in1] (plain: [num_edges, dim_in1]), y [num_edges, dim_in2], w [num_edges, weight_numel] or
    shared [weight_numel], sender and receiver [num_edges]; result [num_out, dim_out] (plain: [num_edges, dim_out]).
    """

    kind = "product"
    signature = PRODUCT
    directions = DIRECTIONS
    problem_type = TensorProductProblem
    schedule_types = SCHEDULES
    options = ("operation", "layout", "deterministic", "refused")
    operation: str
    layout: str
    deterministic: bool
    refused: dict[str, str]

    def __init__(
        self,
        problem: TensorProductProblem,
        schedule: Schedule | Mapping[str, Schedule] | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        operation: str,
        layout: str,
        deterministic: bool,
        refused: Mapping[str, str] | None = None,
        shortlists: Mapping[str, Sequence[Schedule]] | None = None,
    ) -> None:
        if deterministic and operation == "conv" and not problem.is_channelwise:
            raise UnsupportedError(
                "deterministic convolutions are generated for weighted uvu paths with one copy of the second input; "
                "use the plain product and sum its rows yourself in a fixed order"
            )
        self.is_conv = operation == "conv"
        # By direction, the place of the schedule that a first run chose in its shortlist, and all times in us.
        self.chosen: dict[str, tuple[int, tuple[float, ...]]] = {}
        # Of directions whose first run is still to come.
        self.shortlists = {name: tuple(others) for name, others in (shortlists or {}).items() if others}
        options = {"operation": operation, "layout": layout, "deterministic": deterministic}
        super().__init__(problem, schedule, dtype, device, **options, refused=dict(refused or {}))
        self.dim_out = problem.dim_out
        self.shared_weights = problem.shared_weights
        self.row_slots = "" if self.is_conv else "xyg" if self.shared_weights else "xywg"
        self._checks = Checks(problem, operation, dtype, device.type)
        self.graph = self._checks.graph
        self._runners: dict[RunnerKey, AnyRunner] = {}
        self._choosing = threading.RLock()
        self._find_orders()

    def _facts(self) -> dict[str, Any]:
        shortlists = {name: [each.to_dict() for each in others] for name, others in self.shortlists.items()}
        facts = super()._facts() | {"couplings": couplings_digest(self.problem), "shortlists": shortlists}
        return {name: fact for name, fact in facts.items() if fact or name not in ("refused", "shortlists")}

    @classmethod
    def _options(cls, data: dict[str, Any]) -> dict[str, Any]:
        problem = TensorProductProblem.from_key(data["problem"])
        if data.get("couplings", "") not in ("", couplings_digest(problem)):
            raise UnsupportedError(
                f"{problem.irreps_in1} x {problem.irreps_in2} was saved under another version of e3nn, with other "
                "signs of couplings than the installed one; install that version, or save or export the model again"
            )
        shortlists = data.get("shortlists", {}).items()
        return {
            **super()._options({"refused": None, **data}),
            "shortlists": {name: [schedule_from_dict(knobs) for knobs in others] for name, others in shortlists},
        }

    def as_family(self, members: Sequence[Operator], classes: Sequence[Sequence[int]], text: str) -> Operator:
        family = super().as_family(members, classes, text)
        family._find_orders()
        return family

    def _find_orders(self) -> None:
        """The ends by which some direction's kernel needs the edges in order; by_size: those of some members alone."""
        self.by_size = (False, False)
        if self.members:
            receiver, sender = zip(*((member.by_receiver, member.by_sender) for member in self.members), strict=True)
            self.by_receiver, self.by_sender = self._eager_ends = all(receiver), all(sender)
            self.by_size = any(receiver) and not all(receiver), any(sender) and not all(sender)
            return
        self.by_receiver, self.by_sender = self._ends_of(self.schedules.values())
        tried = self._ends_of(itertools.chain(*self.shortlists.values()))
        self._eager_ends = (self.by_receiver or tried[0], self.by_sender or tried[1])

    def _ends_of(self, schedules: Iterable[Schedule]) -> tuple[bool, bool]:
        fused = [schedule for schedule in schedules if self.is_conv and schedule.fuse and self.problem.paths]
        owners = {schedule.owner for schedule in fused}
        runs = self.device.type == "cuda" and self.problem.is_channelwise and any(each.has_long_runs for each in fused)
        return runs or "receiver" in owners, "sender" in owners

    def _ends(self) -> tuple[bool, bool]:
        """Those of a call: also what a first run will try, but where torch traces, since traced code keeps its order.

        There a schedule that needs another order makes it in each of its runs, and its time tells so.
        """
        if self.shortlists and (torch.compiler.is_compiling() or is_tracing()):
            return self.by_receiver, self.by_sender
        return self._eager_ends

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        w: Tensor,
        sender: Tensor | None = None,
        receiver: Tensor | None = None,
        *,
        num_out: int | None = None,
        order: EdgeOrder | None = None,
        is_sorted: bool = False,
    ) -> Tensor:
        """The tensor product, differentiable twice with respect to x, y and w.

        Second derivatives can be differentiated by what they are linear in, as ``torch.autograd.functional.hvp`` does.
        num_out: rows of a convolution's result, by default as many as x has. order: a precomputed
        ``edge_order(receiver, num_out)``. is_sorted: ``receiver`` does not decrease, see :meth:`order`.
        """
        return product(x, y, self.one_row(w), self.edges(x, sender, receiver, num_out, order, is_sorted), self)

    def edges(
        self,
        x: Tensor,
        sender: Tensor | None = None,
        receiver: Tensor | None = None,
        num_out: int | None = None,
        order: EdgeOrder | None = None,
        is_sorted: bool = False,
    ) -> Edges:
        """A call's edges with the number of destinations and the order, computed if missing."""
        if num_out is None:
            num_out = x.shape[0]  # len(x) would fix the size of an exported graph
        elif type(num_out) is not int:
            num_out = row_count("num_out", num_out)
        if order is not None or not self.is_conv or sender is None or receiver is None:
            return sender, receiver, num_out, order, True, None
        num_in = x.shape[0]

        def make() -> EdgeOrder:
            return self.order(sender, receiver, num_in, num_out, is_sorted)

        needs = (num_in, num_out, (*self._ends(), is_sorted))
        known = KNOWN_GRAPHS.order(sender, receiver, needs, make)
        if known is not None:
            return sender, receiver, num_out, known[0], True, known[1]
        order = make()
        # Not ``order is NO_ORDER``: torch.compile of torch 2.4 compares the elements of tuples instead.
        unordered = order.spans is None and order.sender_spans is None
        return sender, receiver, num_out, order, unordered, None

    __call__ = forward

    def order(self, sender: Tensor, receiver: Tensor, num_in: int, num_out: int, is_sorted: bool = False) -> EdgeOrder:
        """The order of a graph's edges that this operator's kernels need; keep it while the graph stays the same.

        ``is_sorted`` promises that ``receiver`` does not decrease. If it does, InputError, or on a GPU a device-side
        assertion. Under function transforms a graph's values are unknown here, so each kernel call orders the edges.
        """
        if not torch.compiler.is_compiling() and is_transforming():
            return NO_ORDER
        (needs_receiver, needs_sender), (some_need_receiver, some_need_sender) = self._ends(), self.by_size
        if not (needs_receiver or needs_sender or some_need_receiver or some_need_sender):
            return NO_ORDER
        by_sender = order_by("sender", sender, num_in) if needs_sender else (None, None)
        by_receiver: tuple[Maybe, Maybe] = (None, None)
        if needs_receiver:
            # Check whether edges are sorted where that is cheap: on the CPU, outside of tracing.
            looked_at = type(receiver) is Tensor and not is_tracing()
            if looked_at and receiver.device.type == "cpu":
                if is_sorted:
                    check_ascending(receiver)
                is_sorted = is_in_order(receiver)
            elif looked_at and receiver.is_cuda and is_sorted and not torch.cuda.is_current_stream_capturing():
                check_ascending_on_device(receiver)
        # What only some members need is left to an op, which looks at the graph's size.
        if needs_receiver or (some_need_receiver and is_sorted):
            by_receiver = order_by("receiver", receiver, num_out, is_sorted)
        elif some_need_receiver:
            by_receiver = order_for_size(receiver, num_out, num_out, "receiver", self.text)
        if some_need_sender:
            by_sender = order_for_size(sender, num_out, num_in, "sender", self.text)
        return EdgeOrder(*by_receiver, *by_sender)

    def one_row(self, w: Tensor) -> Tensor:
        """Shared weights given as [1, weight_numel] become [weight_numel]."""
        return w[0] if self.shared_weights and w.dim() == 2 and w.shape[0] == 1 else w

    def spec(self, direction: Direction, index: torch.dtype = torch.int64, device: torch.device | None = None) -> Spec:
        """Spec of the kernel of a direction; without ``fuse`` it is a plain kernel."""
        schedule = self.schedules[direction.name]
        return self._spec(direction, schedule, self._index(schedule, index), device)

    def _index(self, schedule: Schedule, index: torch.dtype | None) -> str:
        return INDEX_DTYPES[index] if index is not None and self.is_conv and schedule.fuse else "int64"

    def specs(self, direction_name: str) -> list[Spec]:
        """Specs of the kernels of a direction with all its outputs."""
        return [self.spec(part) for part in self.parts(self._direction(direction_name))]

    def _kernel_spec(self, direction: Direction, schedule: Schedule) -> Spec:
        return self._spec(self.parts(direction)[-1], schedule, "int64")

    def _default_schedule(self, direction: Direction) -> Schedule:
        return default_schedule(self._kernel_spec(direction, SCHEDULES[device_facts(self.device).backend]()))

    def _spec(self, direction: Direction, schedule: Schedule, index: str, device: torch.device | None = None) -> Spec:
        return Spec(
            self.problem,
            direction,
            schedule,
            operation=self.operation if schedule.fuse else "plain",
            dtype=DTYPES[self.dtype],
            layout=self.layout,
            index=index,
            facts=device_facts(device or self.device),
            deterministic=self.deterministic,
        )

    def op_forward(self, x: Tensor, y: Tensor, w: Tensor, *graph: Any) -> Tensor:
        return self._run_op(forward(), (x, None, y, None, w, None, None, None), *graph)["g"]

    def op_backward(self, x: Tensor, y: Tensor, w: Tensor, g: Tensor, *rest: Any) -> dict[str, Tensor]:
        *graph, outputs = rest
        return _apart(self._run_op(backward(outputs), (x, None, y, None, w, None, g, None), *graph))

    def op_double_backward(
        self, x: Tensor, y: Tensor, w: Tensor, g: Tensor, tx: Maybe, ty: Maybe, tw: Maybe, *rest: Any
    ) -> dict[str, Tensor]:
        *graph, outputs = rest
        direction = double_backward(self.signature.present((tx, ty, tw)), outputs)
        return _apart(self._run_op(direction, (x, tx, y, ty, w, tw, g, None), *graph))

    def _run_op(
        self, direction: Direction, operands: Operands, sender: Maybe, receiver: Maybe, *order_and_size: Any
    ) -> dict[str, Tensor]:
        *order, num_out = order_and_size
        return self.run(direction, operands, sender, receiver, num_out, EdgeOrder(*order))

    def sizes(self, inputs: tuple[Any, ...], rest: tuple[Any, ...]) -> tuple[int, int]:
        num_edges = inputs[1].shape[0]
        return num_edges, rest[-1] if self.is_conv else num_edges

    def prepared(
        self,
        direction: Direction,
        operands: Operands,
        graph: Graph,
        runners: dict[RunnerKey, AnyRunner],
        harmonics: HarmonicsProblem | None = None,
    ) -> AnyRunner:
        """The runner of a direction's first call, kept in ``runners``.

        If the direction has a shortlist, the first call that can choose decides which schedule stays; calls before it
        take the first one.
        """
        if direction.name in self.refused:
            raise TuningMissError(self.refused[direction.name])
        x, sender = operands[0], graph.sender
        assert x is not None
        index = None if sender is None else sender.dtype

        def make(schedule: Schedule) -> AnyRunner:
            parts = [(part, schedule if len(kinds) == 1 else self.schedules[part.name]) for part in kinds]
            specs = [self._spec(part, each, self._index(each, index), x.device) for part, each in parts]
            made = [Runner(dataclasses.replace(spec, harmonics=harmonics), self._checks) for spec in specs]
            # Two for sums in a fixed order: one owns senders, for dF/dx, the other receivers.
            return made[0] if len(made) == 1 else lambda *call: made[0](*call) | made[1](*call)

        kinds, others = self.parts(direction), self.shortlists.get(direction.name, ())
        key = (direction, index, x.get_device())
        if others and not can_choose(x, graph.num_edges):
            first = make(self.schedules[direction.name])

            def waiting(given: Operands, graph: Graph, poison: bool = False) -> dict[str, Tensor]:
                chooses = given[0] is not None and can_choose(given[0], graph.num_edges)
                runner = self.prepared(direction, given, graph, runners, harmonics) if chooses else first
                return runner(given, graph, poison)

            runners[key] = waiting
            return waiting
        if others:
            with self._choosing:
                if direction.name in self.shortlists:
                    schedules = (self.schedules[direction.name], *others)
                    self._take(choose(self, direction, schedules, make, operands, graph))
        runners[key] = make(self.schedules[direction.name])
        return runners[key]

    def _take(self, choice: Choice) -> None:
        name = choice.direction.name
        self.schedules[name] = choice.schedules[choice.place]
        self.chosen[name] = (choice.place, choice.times_us)
        del self.shortlists[name]
        self._find_orders()
        for listener in tuple(LISTENERS):
            listener(choice)

    def parts(self, direction: Direction) -> tuple[Direction, ...]:
        """The directions of the kernels that compute a direction's outputs."""
        return fixed_order_parts(direction) if self.deterministic and self.is_conv else (direction,)


def _apart(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results that share memory (small ones) are copied: torch ops may not return them."""
    whole = {slot: grad.untyped_storage().nbytes() == grad.nbytes for slot, grad in found.items()}
    return {slot: grad if whole[slot] else grad.clone() for slot, grad in found.items()}


rebuild = Operator.rebuild
rebuilds("product", rebuild)
