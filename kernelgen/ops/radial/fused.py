"""Runs the kernels that form edge weights in tensor cores (``kernelgen.plan.radial_convolution``) on checked tensors.

Products of halves, summed in float32, see ``kernelgen.ops.radial.products``. What is multiplied is first scaled by
powers of two: each edge's h, and the part of the matrix that a block has, by its largest element; gradients of
weights of an edge by a bound for 8 channels and all paths of a group: the largest elements of x, edge values and
the receiver's cotangents, and the number of terms. So class ``ieee`` has float32's errors, relative to each edge's
largest element of h, for what is more than 2**-20 times as large as the largest of the matrix, and 2**-17 times that
bound. The bound of ordinary gradients is some 2**7 times as large as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from kernelgen.device import device_facts
from kernelgen.errors import InputError, ScheduleError, UnsupportedError
from kernelgen.ops.operator import Operator
from kernelgen.ops.radial.products import ACCURACY
from kernelgen.plan.radial.defaults import default_radial_schedule
from kernelgen.plan.radial_convolution import MARKS, RadialPlan, radial_plan
from kernelgen.problem.tensor_product import TensorProductProblem
from kernelgen.runtime.allocation import empty, zeros
from kernelgen.runtime.arguments import Graph, aligned
from kernelgen.runtime.graph import EdgeOrder, order_by
from kernelgen.runtime.kernel import Kernel, load_kernel
from kernelgen.runtime.known_graphs import kept_fact, stream_of
from kernelgen.schedule.kernel_spec import BUFFERS
from kernelgen.schedule.radial import RadialSchedule, RadialSpec, operands_of
from kernelgen.terms.directions import Direction, backward, forward

_PLACE = {name: place for place, name in enumerate(BUFFERS)}
_INDICES = {torch.int32: "int32", torch.int64: "int64"}


class FusedRadial:
    """The value and first gradients of one problem, with weights ``h @ matrix`` in registers.

    hidden: features of h. accuracy: of ``kernelgen.schedule.radial.PRODUCTS``. schedules: by direction name
    (``forward``, ``backward``), else the defaults. Kernels compile at first use. Raises UnsupportedError for problems,
    sizes and devices without such a kernel.
    """

    def __init__(
        self,
        problem: TensorProductProblem,
        hidden: int,
        accuracy: str,
        layout: str,
        device: torch.device,
        schedules: Mapping[str, RadialSchedule] | None = None,
    ) -> None:
        self.problem, self.hidden, self.accuracy, self.layout = problem, hidden, accuracy, layout
        self.device, self.schedules = device, dict(schedules or {})
        self._kernels: dict[tuple[Direction, torch.dtype], Kernel] = {}
        for direction in (forward(), backward("xyw")):
            radial_plan(self.spec(direction))

    def spec(self, direction: Direction, index: torch.dtype = torch.int64) -> RadialSpec:
        """The spec of a direction's kernel."""
        name, facts = "forward" if direction == forward() else "backward", device_facts(self.device)
        schedule = self.schedules.get(name) or RadialSchedule()
        spec = RadialSpec(
            self.problem, self.hidden, direction, schedule, self.accuracy, self.layout, _INDICES[index], facts
        )
        return spec if name in self.schedules else default_radial_schedule(spec)

    def value(self, x: Tensor, y: Tensor, h: Tensor, matrix: Tensor, graph: Graph) -> Tensor:
        """The convolution [num_out, dim_out], without autograd."""
        return self.run(forward(), {"x": x, "y": y, "w": h, "tw": matrix}, graph)["g"]

    def gradients(
        self, slots: str, x: Tensor, y: Tensor, h: Tensor, matrix: Tensor, g: Tensor, graph: Graph
    ) -> dict[str, Tensor]:
        """Gradients of some of x, y and ``w``, which stands for h, given that of the value."""
        return self.run(backward(slots), {"x": x, "y": y, "w": h, "tw": matrix, "g": g}, graph)

    def run(
        self, direction: Direction, given: Mapping[str, Tensor], graph: Graph, poison: bool = False
    ) -> dict[str, Tensor]:
        """Outputs of a direction by slot. given: by buffer. poison: fill those that are not summed with NaN before."""
        assert graph.sender is not None and graph.receiver is not None
        kernel = self.kernel(direction, graph.sender.dtype)
        plan = kernel.plan
        assert isinstance(plan, RadialPlan)
        shapes = graph.shapes | {"w": (graph.num_edges, self.hidden)}
        shapes["tw"] = (self.hidden, self.problem.weight_numel)
        kept = {name: _ready(name, given[name], shapes[name], graph.sender) for name in operands_of(direction)}
        kept["sender"], order = graph.sender, order_of(graph)
        kept |= {name: one for name, one in (("spans", order.spans), ("perm", order.perm)) if one is not None}
        pointers = [0] * len(BUFFERS)
        for name, tensor in kept.items():
            pointers[_PLACE[name]] = tensor.data_ptr()
        found: dict[str, Tensor] = {}
        no_edges = graph.num_edges == 0  # then nothing runs: a GPU refuses a grid without blocks
        if plan.marks and not no_edges:
            marks = zeros((plan.marks, graph.num_out), given["x"])
            pointers[_PLACE[MARKS]] = marks.data_ptr()
        for slot in direction.outputs:
            is_zeroed = no_edges or f"out_{slot}" in plan.zeroed
            found[slot] = (zeros if is_zeroed else empty)(shapes[slot], given["x"])
            if poison and not is_zeroed:
                found[slot].fill_(torch.nan)
            pointers[_PLACE[f"out_{slot}"]] = found[slot].data_ptr()
        if graph.num_out and not no_edges:
            kernel.run(pointers, graph.num_edges, graph.num_in, graph.num_out, given["x"].get_device())
        return found

    def kernel(self, direction: Direction, index: torch.dtype = torch.int64) -> Kernel:
        """The loaded kernel of a direction, for indices of a dtype."""
        kernel = self._kernels.get((direction, index))
        if kernel is None:
            kernel = self._kernels[direction, index] = load_kernel(self.spec(direction, index))
        return kernel


def _ready(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The tensor, copied if it is not contiguous and aligned; InputError if it does not fit."""
    if tensor.dtype is not torch.float32 or tensor.shape != shape or tensor.device != like.device:
        named = {"w": "h", "tw": "the matrix"}.get(name, name)
        raise InputError(
            f"{named} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected torch.float32 {shape} on "
            f"{like.device}"
        )
    return aligned(tensor)


def order_of(graph: Graph) -> EdgeOrder:
    """Spans, in the order of edges, and permutation by receiver, kept with a graph that is recognised again."""
    receiver = graph.receiver
    assert receiver is not None
    key = ("radial order", graph.num_out, stream_of(receiver))
    return kept_fact(
        graph.known, key, lambda: EdgeOrder(*order_by("receiver", receiver, graph.num_out, by_length=False))
    )


@functools.lru_cache(maxsize=256)
def fused_of(
    operator: Operator, hidden: int, product: str, schedules: tuple[tuple[str, RadialSchedule], ...] = ()
) -> FusedRadial | None:
    """The kernels of an operator's convolution; None if there are none for it on its device.

    product: one of ``EDGE_PRODUCTS`` of ``kernelgen.ops.radial.products``, which gives the accuracy class. schedules:
    with the names of their directions; else the defaults.
    """
    is_meant = operator.is_conv and operator.device.type == "cuda" and not operator.deterministic
    if not is_meant or operator.dtype is not torch.float32:
        return None
    try:
        accuracy, where = ACCURACY[product], (operator.layout, operator.device)
        return FusedRadial(operator.problem, hidden, accuracy, *where, dict(schedules))
    except (UnsupportedError, ScheduleError):
        return None
