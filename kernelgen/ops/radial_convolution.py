"""A convolution with weights ``w = h @ matrix`` that never exist for all edges at once, differentiable twice.

Radial networks end with such a product: h [edges, hidden] depends on an edge's length, the matrix [hidden, weights] is
shared. A row of w is 5 to 9 kB, one of h 256 bytes. Parts of the edges (:mod:`kernelgen.ops.radial_convolution`) are
taken one after the other: their w is formed, used and dropped. Derivatives form it again. With F(x, y, w, g) of
``kernelgen.arithmetic.couplings``, and gw = dF/dw:

    first     dF/dh = gw matrix^T,  dF/dmatrix = h^T gw,  dF/dx and dF/dy as they are
    second    S = <tx, dF/dx> + <ty, dF/dy> + <tw, gw>  with  tw = th matrix + h tmatrix, so that
              dS/dh = (dS/dw) matrix^T + gw tmatrix^T,  dS/dmatrix = h^T (dS/dw) + th^T gw

Fused, the value and the gradients of x, y and h come from kernels that form w in registers, for all edges at once
(:mod:`kernelgen.ops.radial_convolution`); the gradient of the matrix and second derivatives still take parts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelgen.arithmetic.directions import Direction, backward, double_backward, forward
from kernelgen.compat import is_eager, is_transforming
from kernelgen.device import device_facts
from kernelgen.errors import InputError, ScheduleError, UnsupportedError
from kernelgen.kernels.knobs import read_schedule
from kernelgen.kernels.radial.plan import (
    MARKS,
    RadialPlan,
    RadialSchedule,
    RadialSpec,
    default_radial_schedule,
    operands_of,
    radial_plan,
)
from kernelgen.ops.autograd import PRODUCT, edges_of
from kernelgen.ops.autograd import second_gradients as second_of_product
from kernelgen.ops.base import INDEX_DTYPES, OPERATORS, rebuilds, resolve
from kernelgen.ops.library import (
    Differentiable,
    Maybe,
    Signature,
    define_op,
    differentiable,
    gradients,
    second_gradients,
)
from kernelgen.ops.product import Operator
from kernelgen.ops.tall_products import edge_product, full_product, sum_product
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime.call import Graph, aligned, empty, zeros
from kernelgen.runtime.graph import EdgeOrder, kept_fact, order_by, stream_of
from kernelgen.runtime.kernel import Kernel, load_kernel


def radial_product(
    x: Tensor,
    y: Tensor,
    h: Tensor,
    matrix: Tensor,
    sender: Tensor,
    receiver: Tensor,
    num_out: int,
    operator: Operator,
    most_edges: int,
    product: str = "fp16x3",
    fused: FusedRadial | None = None,
) -> Tensor:
    """The convolution with weights ``h @ matrix``, by parts of at most ``most_edges`` edges.

    x, y, sender, receiver and num_out: as the operator's. h [edges, hidden], matrix [hidden, weight_numel].
    product: one of ``EDGE_PRODUCTS`` of ``kernelgen.ops.radial_convolution``. What torch traces or transforms is
    computed for all edges at once. fused: kernels that form the weights in registers
    (``kernelgen.ops.radial_convolution.fused_of``), if they shall be used; products outside of them are still
    ``product``. Raises InputError for other shapes, dtypes and devices, and for shared weights.
    """
    if operator.shared_weights or h.dim() != 2 or matrix.shape != (h.shape[1], operator.problem.weight_numel):
        raise InputError(
            f"h is {tuple(h.shape)} and the matrix {tuple(matrix.shape)}; expected (edges, hidden) and "
            f"(hidden, {operator.problem.weight_numel}), for a convolution with weights of each edge"
        )
    if not (h.dtype is matrix.dtype is x.dtype and h.get_device() == matrix.get_device() == x.get_device()):
        raise InputError(
            f"h is {h.dtype} on {h.device} and the matrix {matrix.dtype} on {matrix.device}; expected {x.dtype} on "
            f"{x.device} for both, as x is: convert them"
        )
    if product not in EDGE_PRODUCTS:
        raise InputError(f"product is {product!r}; expected one of {', '.join(EDGE_PRODUCTS)}")
    if not is_eager(x, y, h, matrix) or is_transforming(x, y, h, matrix):
        return operator(x, y, full_product(h, matrix), sender, receiver, num_out=num_out)
    if h.shape[0] != y.shape[0]:
        raise InputError(f"h has {h.shape[0]} rows; expected {y.shape[0]}, one for each row of y")
    multiply = multiply_by(product)
    if fused is None and y.shape[0] <= most_edges:
        return operator(x, y, multiply.rows(h, matrix), sender, receiver, num_out=num_out)
    whole = operator.graph(x, y, sender, receiver, num_out, None)  # parts have orders of their own
    shared = _Call(whole, operator, Parts(operator, whole, most_edges), multiply, fused)
    return differentiable(shared, x, y, h, matrix, *whole.saved)


class _Derivatives(Signature):
    """Of calls without ops: of each the call itself is the ``text``."""

    def backward(self, primal: tuple[Any, ...], rest: tuple[Any, ...], outputs: str, text: Any) -> tuple[Maybe, ...]:
        *inputs, g = primal
        if is_transforming(g):
            return first_transformed(primal, _of_kernel(outputs), text)
        return gradients(text, tuple(inputs), g, rest, outputs)

    def double_backward(
        self, primal: tuple[Any, ...], tangents: tuple[Maybe, ...], rest: tuple[Any, ...], outputs: str, text: Any
    ) -> tuple[Maybe, ...]:
        if is_transforming(*tangents):
            return second_transformed(primal, tangents, _of_kernel(outputs), text)
        return second_gradients(text, primal, tangents, rest, outputs)


# Slots are x, y, h and the matrix m.
RADIAL = _Derivatives(
    name="",
    slots="xyhm",
    inputs=("x", "y", "h", "matrix"),
    tangents=("tx", "ty", "th", "tm"),
    is_multilinear=True,
    noun=PRODUCT.noun,
    instead=PRODUCT.instead,
)


@dataclass(eq=False)
class _Call(Differentiable):
    """A call on a checked graph. Autograd saves the graph's indices as the rest: it notices writes to them."""

    whole: Graph
    operator: Operator
    parts: Parts
    multiply: Multiply
    fused: FusedRadial | None

    signature = RADIAL

    @property
    def text(self) -> Any:
        return self

    def op_forward(self, x: Tensor, y: Tensor, h: Tensor, matrix: Tensor, *_: Tensor) -> Tensor:
        if self.fused is not None:
            return self.fused.value(x, y, h, matrix, self.whole)
        out = empty(self.whole.shapes["g"], x)
        for part in self.parts:
            w = self.multiply.rows(part.rows(h), matrix)
            operands = (x, None, part.rows(y), None, w, None, None, None)
            out[part.begin : part.end] = self.operator.run_on(part.graph, forward(), operands)["g"]
            del w, operands
        return out

    def op_backward(self, x: Tensor, y: Tensor, h: Tensor, matrix: Tensor, g: Tensor, *rest: Any) -> dict[str, Tensor]:
        *_, wanted = rest
        slots = _of_kernel(wanted)
        if self.fused is not None and "m" not in wanted:
            by_slot = self.fused.gradients(slots, x, y, h, matrix, g, self.whole)
            return {"h" if slot == "w" else slot: grad for slot, grad in by_slot.items()}
        sums = Sums(wanted, self.whole, self.multiply, x=x, h=h, m=matrix)
        for part in self.parts:
            of_h = part.rows(h)
            w = self.multiply.rows(of_h, matrix) if "w" in backward(slots).operands else None
            operands = (x, None, part.rows(y), None, w, None, g[part.begin : part.end], None)
            found = self.operator.run_on(part.graph, backward(slots), operands)
            sums.add(part, found, ((found.get("w"), matrix, of_h),))
            del w, operands, found  # before those of the next part exist
        return sums.found

    def op_double_backward(
        self, x: Tensor, y: Tensor, h: Tensor, matrix: Tensor, g: Tensor, *tangents_and_rest: Any
    ) -> dict[str, Tensor]:
        tx, ty, th, tm, *_, wanted = tangents_and_rest
        slots = _of_kernel(wanted)
        sums = Sums(wanted, self.whole, self.multiply, x=x, h=h, m=matrix)
        for part in self.parts:
            of_h, of_y, of_g = part.rows(h), part.rows(y), g[part.begin : part.end]
            of_ty, of_th = (None if tangent is None else part.rows(tangent) for tangent in (ty, th))
            w, tw = self.multiply.rows(of_h, matrix), None
            if of_th is not None:
                tw = self.multiply.rows(of_th, matrix)
            if tm is not None:
                tw = _sum(tw, self.multiply.rows(of_h, tm))
            primal, along = (x, of_y, w, of_g), (tx, of_ty, tw, None)
            outputs = double_backward(PRODUCT.present(along), slots).live_outputs
            found = second_of_product(primal, along, outputs, part.graph, self.operator) if outputs else {}
            terms: list[tuple[Maybe, Maybe, Maybe]] = [(found.get("w"), matrix, of_h)]
            if ("h" in wanted and tm is not None) or ("m" in wanted and of_th is not None):
                operands = (x, None, of_y, None, w, None, of_g, None)
                terms.append((self.operator.run_on(part.graph, backward("w"), operands)["w"], tm, of_th))
            sums.add(part, found, terms)
            del w, tw, primal, along, found, terms
        return sums.found


def _of_kernel(wanted: str) -> str:
    """The slots of the kernel's gradients that these need."""
    return "".join(slot for slot, by in (("x", "x"), ("y", "y"), ("w", "hm"), ("g", "g")) if set(by) & set(wanted))


def _sum(before: Maybe, more: Tensor) -> Tensor:
    """Their sum, in the place of the first if there is one."""
    return more if before is None else before.add_(more)


class Sums:
    """The gradients of all edges, gathered part by part; zero where no part adds."""

    def __init__(self, wanted: str, whole: Graph, multiply: Multiply, *, x: Tensor, h: Tensor, m: Tensor) -> None:
        self.multiply = multiply
        shapes = {slot: whole.shapes[slot] for slot in "xyg"} | {"h": tuple(h.shape), "m": tuple(m.shape)}
        self.found = {slot: zeros(shapes[slot], x) for slot in RADIAL.slots + "g" if slot in wanted}

    def add(self, part: Part, found: dict[str, Tensor], terms: Any) -> None:
        """Gradients of a part; terms: (gradient of w, what multiplies it for h, and for the matrix), None for none."""
        if "x" in self.found and "x" in found:
            self.found["x"] += found["x"]
        if "y" in self.found and "y" in found:
            part.write(self.found["y"], found["y"])
        if "g" in self.found and "g" in found:
            self.found["g"][part.begin : part.end] = found["g"]
        of_h = None
        for gw, by_h, by_m in terms:
            if "h" in self.found and gw is not None and by_h is not None:
                of_h = _sum(of_h, self.multiply.rows(gw, by_h.t()))
            if "m" in self.found and gw is not None and by_m is not None:
                self.found["m"] += self.multiply.sums(by_m, gw)
        if of_h is not None:
            part.write(self.found["h"], of_h)


# Runs the kernels that form edge weights in tensor cores (``kernelgen.kernels.radial.plan``) on checked tensors.
#
# Products of halves, summed in float32, see ``kernelgen.ops.radial_convolution``. What is multiplied is first scaled by
# powers of two: each edge's h, and the part of the matrix that a block has, by its largest element; gradients of
# weights of an edge by a bound for 8 channels and all paths of a group: the largest elements of x, edge values and
# the receiver's cotangents, and the number of terms. So class ``ieee`` has float32's errors, relative to each edge's
# largest element of h, for what is more than 2**-20 times as large as the largest of the matrix, and 2**-17 times that
# bound. The bound of ordinary gradients is some 2**7 times as large as they are.


class FusedRadial:
    """The value and first gradients of one problem, with weights ``h @ matrix`` in registers.

    hidden: features of h. accuracy: of ``kernelgen.kernels.radial.plan.PRODUCTS``. schedules: by direction name
    (``forward``, ``backward``), else the defaults. text: the kernels as JSON, from which any process can rebuild them.
    Kernels compile at first use. Raises UnsupportedError for problems, sizes and devices without such a kernel.
    """

    members: tuple[Any, ...] = ()  # it is no family

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
        self.text = json.dumps(
            {
                **{"kind": "radial", "problem": problem.key, "hidden": hidden, "accuracy": accuracy, "layout": layout},
                **{"device": device.type, "schedules": {name: one.to_dict() for name, one in self.schedules.items()}},
            },
            sort_keys=True,
        )
        for direction in (forward(), backward("xyw")):
            radial_plan(self.spec(direction))

    def spec(self, direction: Direction, index: torch.dtype = torch.int64) -> RadialSpec:
        """The spec of a direction's kernel."""
        name, facts = "forward" if direction == forward() else "backward", device_facts(self.device)
        schedule = self.schedules.get(name) or RadialSchedule()
        spec = RadialSpec(
            self.problem, self.hidden, direction, schedule, self.accuracy, self.layout, INDEX_DTYPES[index], facts
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
        return self.run_in_order(direction, given, graph.sender, graph.num_out, order_of(graph), poison)

    def run_in_order(
        self,
        direction: Direction,
        given: Mapping[str, Tensor],
        sender: Tensor,
        num_out: int,
        order: EdgeOrder,
        poison: bool = False,
    ) -> dict[str, Tensor]:
        """The same, of edges whose order by receiver is given."""
        kernel = self.kernel(direction, sender.dtype)
        plan = kernel.plan
        assert isinstance(plan, RadialPlan)
        num_in, num_edges = given["x"].shape[0], sender.shape[0]
        shapes = self.shapes(num_edges, num_in, num_out)
        buffers = {name: _ready(name, given[name], shapes[name], sender) for name in operands_of(direction)}
        buffers["sender"] = aligned(sender)
        buffers |= {name: one for name, one in (("spans", order.spans), ("perm", order.perm)) if one is not None}
        found: dict[str, Tensor] = {}
        no_edges = num_edges == 0  # then nothing runs: a GPU refuses a grid without blocks
        if plan.marks and not no_edges:
            buffers[MARKS] = zeros((plan.marks, num_out), given["x"])
        for slot in direction.outputs:
            is_zeroed = no_edges or f"out_{slot}" in plan.zeroed
            found[slot] = buffers[f"out_{slot}"] = (zeros if is_zeroed else empty)(shapes[slot], given["x"])
            if poison and not is_zeroed:
                found[slot].fill_(torch.nan)
        if num_out and not no_edges:
            kernel.launch(buffers, num_edges, num_in, num_out)
        return found

    def shapes(self, num_edges: int, num_in: int, num_out: int) -> dict[str, tuple[int, int]]:
        """Of the operands and results, by buffer; ``w`` is h, and ``tw`` the matrix."""
        problem = self.problem
        return {
            "x": (num_in, problem.dim_in1),
            "y": (num_edges, problem.dim_in2),
            "w": (num_edges, self.hidden),
            "tw": (self.hidden, problem.weight_numel),
            "g": (num_out, problem.dim_out),
        }

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

    product: one of ``EDGE_PRODUCTS`` of ``kernelgen.ops.radial_convolution``, which gives the accuracy class.
    schedules: with the names of their directions; else the defaults.
    """
    is_meant = operator.is_conv and operator.device.type == "cuda" and not operator.deterministic
    if not is_meant or operator.dtype is not torch.float32:
        return None
    try:
        return FusedRadial(
            operator.problem,
            hidden,
            accuracy=ACCURACY[product],
            layout=operator.layout,
            device=operator.device,
            schedules=dict(schedules),
        )
    except (UnsupportedError, ScheduleError):
        return None


# The same kernels as ops of torch, for what is exported with energies and forces inside.
#
# Autograd has the first gradients of x, y and h, without which there are no forces. The matrix is a constant there.


def exported_product(
    fused: FusedRadial,
    x: Tensor,
    y: Tensor,
    h: Tensor,
    matrix: Tensor,
    sender: Tensor,
    receiver: Tensor,
    num_out: Any,
    is_sorted: bool,
) -> Tensor:
    """The convolution as an op that torch traces. is_sorted: ``receiver`` does not decrease."""
    OPERATORS.setdefault(fused.text, fused)
    spans, perm = order_by("receiver", receiver, num_out, is_sorted, by_length=False)
    return torch.ops.equitune.rc_forward(x, y, h, matrix, sender, spans, perm, fused.text)


def _run_forward(x: Tensor, y: Tensor, h: Tensor, matrix: Tensor, sender: Tensor, *order_and_text: Any) -> Tensor:
    spans, perm, text = order_and_text
    given = {"x": x, "y": y, "w": h, "tw": matrix}
    return resolve(text).run_in_order(forward(), given, sender, spans.shape[0], EdgeOrder(spans, perm))["g"]


def _run_backward(
    x: Tensor, y: Tensor, h: Tensor, matrix: Tensor, g: Tensor, sender: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    spans, perm, outputs, text = rest
    given = {"x": x, "y": y, "w": h, "tw": matrix, "g": g}
    order = EdgeOrder(spans, perm)
    found = resolve(text).run_in_order(backward(outputs), given, sender, spans.shape[0], order)
    return tuple(found[slot] if slot in found else x.new_empty(0) for slot in "xyw")


def _fake_forward(x: Tensor, *rest: Any) -> Tensor:
    *_, spans, _, text = rest
    return x.new_empty(spans.shape[0], resolve(text).problem.dim_out)


def _fake_backward(x: Tensor, y: Tensor, h: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, outputs, _ = rest
    return tuple(
        torch.empty_like(tensor) if slot in outputs else x.new_empty(0)
        for slot, tensor in zip("xyw", (x, y, h), strict=True)
    )


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.text = inputs
    ctx.save_for_backward(*tensors)


def _first_gradients(ctx: Any, g: Tensor) -> tuple[Maybe, ...]:
    x, y, h, matrix, sender, spans, perm = ctx.saved_tensors
    if ctx.needs_input_grad[3]:
        raise UnsupportedError("an exported convolution has no gradient of its matrix: call requires_grad_(False)")
    outputs = "".join(slot for slot, is_needed in zip("xyw", ctx.needs_input_grad, strict=False) if is_needed)
    given = (x, y, h, matrix, g.contiguous(), sender, spans, perm)
    found = torch.ops.equitune.rc_backward(*given, outputs, ctx.text)
    return *(one if slot in outputs else None for slot, one in zip("xyw", found, strict=True)), *(None,) * 5


_INPUTS = "Tensor x, Tensor y, Tensor h, Tensor matrix, {}Tensor sender, Tensor spans, Tensor? perm, {}str spec"
define_op("rc_forward", f"({_INPUTS.format('', '')}) -> Tensor", run=_run_forward, fake=_fake_forward)
define_op(
    "rc_backward",
    f"({_INPUTS.format('Tensor g, ', 'str outputs, ')}) -> (Tensor, Tensor, Tensor)",
    run=_run_backward,
    fake=_fake_backward,
)
torch.library.register_autograd("equitune::rc_forward", _first_gradients, setup_context=_keep_inputs)


def _rebuild(text: str) -> FusedRadial:
    facts = json.loads(text)
    schedules = {name: read_schedule(knobs, {"cuda": RadialSchedule}) for name, knobs in facts["schedules"].items()}
    problem, device = TensorProductProblem.from_key(facts["problem"]), torch.device(facts["device"])
    return FusedRadial(problem, facts["hidden"], facts["accuracy"], facts["layout"], device, schedules)


rebuilds("radial", _rebuild)


# Parts of a graph: runs of receivers with all their edges, so that parts write different rows of a result.


class Part(NamedTuple):
    """Edges of the receivers ``begin..end``. places: where these edges are in the caller's tensors."""

    begin: int
    end: int
    places: slice | Tensor
    graph: Graph

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of these edges, of a tensor [edges, ...]."""
        return tensor[self.places]

    def write(self, target: Tensor, rows: Tensor) -> None:
        """Write rows of these edges into a tensor of all edges."""
        target[self.places] = rows


class Parts:
    """The parts of a graph, made when they are first needed; see :func:`parts_of`."""

    def __init__(self, *of: Any) -> None:
        self._of = of
        self._parts: tuple[Part, ...] | None = None

    def __iter__(self) -> Iterator[Part]:
        if self._parts is None:
            self._parts = parts_of(*self._of)
        return iter(self._parts)


def parts_of(operator: Operator, whole: Graph, most_edges: int) -> tuple[Part, ...]:
    """The parts of a checked graph, each of at most ``most_edges`` edges unless one receiver has more.

    Kept with a graph that is recognised again. A new graph on a GPU waits for the device once, for the receivers at
    which parts end.
    """
    receiver = whole.receiver
    assert receiver is not None
    key = ("radial parts", operator.text, whole.num_in, whole.num_out, most_edges, stream_of(receiver))
    return kept_fact(whole.known, key, lambda: tuple(_parts(operator, whole, most_edges)))


def _parts(operator: Operator, whole: Graph, most_edges: int) -> list[Part]:
    sender, receiver = whole.sender, whole.receiver
    assert sender is not None and receiver is not None
    order = None
    if bool((receiver[1:] < receiver[:-1]).any()):
        receiver, order = torch.sort(receiver, stable=True)
        sender = sender[order]
    counts = torch.bincount(receiver, minlength=whole.num_out)
    found = []
    for begin, end, first, last in _ranges([0, *counts.cumsum(0).tolist()], most_edges):
        # Copies: a kernel takes aligned and contiguous tensors.
        of_part = sender[first:last].clone(), receiver[first:last] - begin
        in_order = operator.order(*of_part, whole.num_in, end - begin, is_sorted=True)
        shapes = whole.shapes | {slot: (last - first, *whole.shapes[slot][1:]) for slot in "yw"}
        shapes["g"] = (end - begin, *whole.shapes["g"][1:])
        graph = Graph(*of_part, in_order, last - first, whole.num_in, end - begin, shapes)
        found.append(Part(begin, end, slice(first, last) if order is None else order[first:last], graph))
    return found


def _ranges(ends: list[int], most_edges: int) -> list[tuple[int, int, int, int]]:
    """First and last receiver, first and last edge of each part. ends: the edges before each receiver, and all."""
    found, begin = [], 0
    for node in range(1, len(ends)):
        if node == len(ends) - 1 or ends[node + 1] - ends[begin] > most_edges:
            found.append((begin, node, ends[begin], ends[node]))
            begin = node
    return found


# The product ``h @ matrix`` of each edge's hidden features and a radial network's last layer, [edges, weights].
#
# ``fp16x3`` is three products of halves by tensor cores, with errors of float32's class: see
# :mod:`kernelgen.ops.tall_products`. ``tf32`` is one product of halves, whose 11 bits are TF32's. Both are for float32
# and many edges on a GPU; elsewhere, and for ``float32``, it is torch's product with torch's settings
# (``torch.set_float32_matmul_precision``).

# Accuracy class of ``kernelgen.kernels.radial.plan`` with which weights are formed in registers, by product.
ACCURACY = {"fp16x3": "ieee", "float32": "ieee", "tf32": "tf32"}
EDGE_PRODUCTS = tuple(ACCURACY)


class Multiply(NamedTuple):
    """rows: a b for a ``[edges, depth]``. sums: a^T b for a ``[edges, left]``, b ``[edges, right]``. Differentiable."""

    rows: Callable[[Tensor, Tensor], Tensor]
    sums: Callable[[Tensor, Tensor], Tensor]


_MULTIPLY = {
    "fp16x3": Multiply(edge_product, sum_product),
    "float32": Multiply(full_product, lambda a, b: full_product(a.t(), b)),
    "tf32": Multiply(
        lambda a, b: edge_product(a, b, "tf32"),
        lambda a, b: sum_product(a, b, "tf32"),
    ),
}


def multiply_by(product: str) -> Multiply:
    """The functions of one of ``EDGE_PRODUCTS``."""
    return _MULTIPLY[product]


# Derivatives that torch transforms (``is_grads_batched``, vmap): for all edges at once, through the torch ops.


def first_transformed(primal: tuple[Tensor, ...], slots: str, shared: _Call) -> tuple[Maybe, ...]:
    """Gradients of x, y, h and m. slots: of the operands x, y and w, whose gradients these need."""
    x, y, h, m, g = primal
    rest, text = edges_of(shared.whole), shared.operator.text
    dx, dy, dw = PRODUCT.backward((x, y, full_product(h, m), g), rest, slots, text)
    return dx, dy, None if dw is None else full_product(dw, m.t()), None if dw is None else full_product(h.t(), dw)


def second_transformed(
    primal: tuple[Tensor, ...], tangents: tuple[Maybe, ...], slots: str, shared: _Call
) -> tuple[Maybe, ...]:
    """Second derivatives by x, y, h, m and g along tangents of x, y, h and m."""
    (x, y, h, m, g), (tx, ty, th, tm) = primal, tangents
    terms = [full_product(a, b) for a, b in ((th, m), (h, tm)) if a is not None and b is not None]
    w, tw = full_product(h, m), sum(terms[1:], terms[0]) if terms else None
    rest, text = edges_of(shared.whole), shared.operator.text
    dx, dy, dw, dg = PRODUCT.along_tangents((x, y, w, g), (tx, ty, tw, None), rest, slots, text)
    gw = None
    if "w" in slots and terms:
        gw = PRODUCT.backward((x, y, w, g), rest, "w", text)[2]
    of_h = [full_product(a, b.t()) for a, b in ((dw, m), (gw, tm)) if a is not None and b is not None]
    of_m = [full_product(a.t(), b) for a, b in ((h, dw), (th, gw)) if a is not None and b is not None]
    return dx, dy, sum(of_h[1:], of_h[0]) if of_h else None, sum(of_m[1:], of_m[0]) if of_m else None, dg
