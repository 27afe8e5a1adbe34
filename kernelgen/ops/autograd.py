"""The signature of tensor products, and their eager calls through autograd, with little host time.

Tensors that torch traces, fakes or transforms use the ops that ``kernelgen.ops.library`` makes of the signature.
Products have eager functions of their own: all passes share a call's checked graph, and two passes can share a kernel.
Like those of other operators they bypass the dispatcher and skip gradients that the pass does not use. A backward pass
that is itself transformed (``torch.autograd.grad(..., is_grads_batched=True)``) uses the ops again.

A loss on values and on first gradients (energies and forces) has two terms that each read and write all weights: the
backward of the value, and the backward of the first gradients. Here one kernel computes both (``joint_backward``). The
node of the first gradients hands their cotangents to the node of the value. Autograd always runs that node later,
because the gradients depend on it through an empty tensor (``link``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelgen.arithmetic.directions import backward, double_backward, forward
from kernelgen.compat import is_eager, is_transforming
from kernelgen.ops.base import resolve
from kernelgen.ops.library import Maybe, Signature, call, define, define_op, gradients, used_slots, will_run
from kernelgen.runtime.call import DirectCalls, Graph, empty
from kernelgen.runtime.graph import NO_ORDER, Edges, order_by

PRODUCT = Signature(
    name="tp",
    slots="xyw",
    inputs=("x", "y", "w"),
    tangents=("tx", "ty", "tw"),
    rest=(
        "Tensor? sender",
        "Tensor? receiver",
        "Tensor? spans",
        "Tensor? perm",
        "Tensor? sender_spans",
        "Tensor? sender_perm",
        "SymInt num_out",
    ),
    is_multilinear=True,
    noun="a tensor product",
    instead="problem.reference() of e3nn",
)
define(PRODUCT)

# Cotangents of failed passes, which no node fetches, are dropped after this many passes.
_KEPT_PASSES = 8
_SMALL_WEIGHTS = 1 << 21
_Leaf: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def product(
    x: Tensor,
    y: Tensor,
    w: Tensor,
    edges: Edges,
    operator: DirectCalls,
) -> Tensor:
    """The operator's value, differentiable twice in x, y and w; ``edges`` comes from :meth:`Operator.edges`."""
    if not is_eager(x, y, w):
        sender, receiver, num_out, order, _, _ = edges
        arguments = (x, y, w, sender, receiver, *(order or NO_ORDER), num_out, operator.text)
        return call("tp_forward", *arguments)
    graph = operator.graph(x, y, *edges)
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad or w.requires_grad):
        return ProductValue.apply(x, y, w, graph, operator, None)[0]
    return operator.run_on(graph, forward(), (x, None, y, None, w, None, None, None))["g"]


def edges_of(graph: Graph) -> tuple[Any, ...]:
    """A graph as arguments of the ops."""
    return graph.sender, graph.receiver, *graph.order, graph.num_out


class ProductValue(torch.autograd.Function):
    """The value on a checked graph; of_vectors: a ``HarmonicProduct`` of the operator, to which y is vectors."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, w: Tensor, graph: Graph, operator: DirectCalls, of_vectors: Any
    ) -> tuple[Tensor, Tensor]:
        link = empty((0,), x)
        ctx.save_for_backward(x, y, w, link, *graph.saved)
        ctx.set_materialize_grads(False)
        ctx.graph, ctx.operator, ctx.of_vectors = graph, operator, of_vectors
        ctx.leaves = sole_leaves(x, y, w, graph, operator)
        # Autograd pass -> list of (cotangents of the first gradients, cotangent of the value in these gradients).
        ctx.pending = {}
        operands = (x, None, y, None, w, None, None, None)
        return (of_vectors or operator).run_on(graph, forward(), operands)["g"], link

    @staticmethod
    def backward(ctx: Any, g: Maybe, _: Maybe) -> tuple[Maybe, ...]:
        operator, of_vectors, left = ctx.operator, ctx.of_vectors, left_in(ctx.pending)
        is_differentiated = torch.is_grad_enabled()
        wanted = _needed(ctx, "xyw") if is_differentiated else ctx.leaves or _needed(ctx, "xyw")
        if not wanted or (g is None and not left):
            return (None,) * 6
        x, y, w, link, *of_graph = ctx.saved_tensors
        graph, is_transformed = ctx.graph.of_saved(of_graph), is_transforming(g)
        if not (is_differentiated or is_transformed or left):
            operands = (x, None, y, None, w, None, g, None)
            found = (of_vectors or operator).run_on(graph, backward(wanted), operands)
            return (*(found.get(slot) for slot in "xyw"), None, None, None)
        xyw = x, y if of_vectors is None else of_vectors.harmonics(y), w
        if is_transformed:
            dx, dy, dw = PRODUCT.backward((*xyw, g), edges_of(graph), wanted, operator.text)
        elif is_differentiated:
            dx, dy, dw = _Backward.apply(*xyw, g, link, wanted, graph, operator, ctx.pending)
        else:
            dx, dy, dw = _joint_gradients(operator, graph, xyw, g, left, wanted)
        if of_vectors is not None and dy is not None:
            dy = gradients(of_vectors.harmonics, inputs=(y,), g=dy, rest=(), outputs="x")[0]
        return dx, dy, dw, None, None, None


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, w: Tensor, g: Tensor, link: Tensor, wanted: str, *rest: Any
    ) -> tuple[Maybe, ...]:
        ctx.graph, ctx.operator, ctx.pending = rest
        ctx.save_for_backward(x, y, w, g, *ctx.graph.saved)
        # A gradient that is not differentiated must arrive as None, so that the kernel omits its tangent.
        ctx.set_materialize_grads(False)
        found = ctx.operator.run_on(ctx.graph, backward(wanted), (x, None, y, None, w, None, g, None))
        return tuple(found.get(slot) for slot in "xyw")

    @staticmethod
    def backward(ctx: Any, *tangents: Maybe) -> tuple[Maybe, ...]:
        given, wanted = PRODUCT.present(tangents), _needed(ctx, "xywg")
        x, y, w, g, *of_graph = ctx.saved_tensors
        graph = ctx.graph.of_saved(of_graph)
        transforming = is_transforming(*tangents)
        if _saves_passes(ctx.operator, given, wanted) and not (transforming or torch.is_grad_enabled()):
            link = ctx.next_functions[4][0]
            if link is not None and will_run(link):
                leave(ctx.pending, (tangents, g))
                wanted = "g" if "g" in wanted else ""
        outputs = double_backward(given, wanted).live_outputs if wanted and given else ""
        if not outputs:
            return (None,) * 9
        if transforming:
            found = PRODUCT.double_backward((x, y, w, g), tangents, edges_of(graph), outputs, ctx.operator.text)
        else:
            found = _second((x, y, w, g), (*tangents, None), outputs, graph, ctx.operator)
        return (*found, *(None,) * 5)


def _second(
    primal: tuple[Any, ...], tangents: tuple[Maybe, ...], outputs: str, graph: Graph, operator: DirectCalls
) -> tuple[Any, ...]:
    """:func:`second_gradients` by slot, None for those that are not in ``outputs``; recorded if they may be needed."""
    if torch.is_grad_enabled():
        return _Second.apply(*primal, *tangents, outputs, graph, operator)
    found = second_gradients(primal, tangents, outputs, graph, operator)
    return tuple(found.get(slot) for slot in "xywg")


class _Second(torch.autograd.Function):
    """Second derivatives of F along tangents of x, y, w and g, which they are linear in.

    They are F's Hessian times the tangents. It is symmetric, so gradients by the tangents are second derivatives along
    the cotangents: Hessian-vector products by ``torch.autograd.functional`` need no others. Those by x, y, w and g are
    third derivatives.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, w: Tensor, g: Tensor, *rest: Any) -> tuple[Maybe, ...]:
        outputs, ctx.graph, ctx.operator = rest[4:]
        ctx.along = PRODUCT.present(rest[:4])
        ctx.save_for_backward(x, y, w, g, *ctx.graph.saved)
        ctx.set_materialize_grads(False)
        found = second_gradients((x, y, w, g), rest[:4], outputs, ctx.graph, ctx.operator)
        return tuple(found.get(slot) for slot in "xywg")

    @staticmethod
    def backward(ctx: Any, *cotangents: Maybe) -> tuple[Any, ...]:
        if used_slots(ctx, "xywg"):
            return PRODUCT.no_third_derivative()
        given, wanted = PRODUCT.present(cotangents), used_slots(ctx, ctx.along, first=4)
        outputs = double_backward(given, wanted).live_outputs if wanted and given else ""
        if not outputs:
            return (None,) * 11
        x, y, w, g, *of_graph = ctx.saved_tensors
        graph = ctx.graph.of_saved(of_graph)
        if is_transforming(*cotangents):
            found = PRODUCT.along_tangents((x, y, w, g), cotangents, edges_of(graph), outputs, ctx.operator.text)
        else:
            found = _second((x, y, w, g), cotangents, outputs, graph, ctx.operator)
        return (*(None,) * 4, *found, None, None, None)


def second_gradients(
    primal: tuple[Tensor, ...], tangents: tuple[Maybe, ...], outputs: str, graph: Graph, operator: DirectCalls
) -> dict[str, Tensor]:
    """Second derivatives with respect to ``outputs``, keyed by slot. primal: x, y, w, g; tangents: of each of them."""
    (x, y, w, g), (tx, ty, tw, tg) = primal, tangents
    if outputs == "g":
        tg = None  # has no part in it
    direction, operands = double_backward(PRODUCT.present((tx, ty, tw, tg)), outputs), (x, tx, y, ty, w, tw, g, tg)
    along = direction.tangents
    if len(along) == 1 and (outputs == "g" or (along in "yg" and "g" not in outputs)):
        # By a kernel of first derivatives: the single tangent replaces its operand.
        x, y, w, g = (operands[2 * place + (slot == along)] for place, slot in enumerate("xywg"))  # type: ignore[assignment]
        direction = forward() if outputs == "g" else backward(outputs)
        operands = (x, None, y, None, w, None, g, None)
    return operator.run_on(graph, direction, operands)


def _saves_passes(operator: DirectCalls, given: str, wanted: str) -> bool:
    """Whether the value's node had better compute second derivatives along these tangents with its first ones.

    What they share is then written once, and not added up: gradients of the weights of edges are most of what is moved.
    The tangents of the weights are read once more, by the gradient of g.
    """
    if given == "y" and ("x" in wanted or "w" in wanted):
        return True
    is_large = "w" in wanted and not operator.shared_weights and "joint_backward" not in operator.refused
    return is_large and bool(given.replace("w", ""))


def _joint_gradients(
    operator: DirectCalls, graph: Graph, xyw: tuple[Tensor, ...], g: Maybe, left: list[Any], wanted: str
) -> tuple[Maybe, ...]:
    """Gradients of the value, and those for the cotangents that first gradients left; not differentiable further."""
    found: dict[str, Tensor] = {}
    for along, of in left:
        tangents, g = (*along, g), None  # the value's gradient with the first ones
        outputs = double_backward(PRODUCT.present(tangents), wanted).live_outputs
        more = second_gradients((*xyw, of), tangents, outputs, graph, operator) if outputs else {}
        found |= {slot: found[slot] + grad if slot in found else grad for slot, grad in more.items()}
    return tuple(found.get(slot) for slot in "xyw")


def leave(pending: dict[int, list[Any]], cotangents: tuple[Any, ...]) -> None:
    """Leave something for the value's node in this pass of autograd."""
    task = torch._C._current_graph_task_id()
    if len(pending) >= _KEPT_PASSES and task not in pending:
        pending.clear()
    pending.setdefault(task, []).append(cotangents)


def left_in(pending: dict[int, list[Any]]) -> list[Any]:
    """What was left in this pass."""
    return pending.pop(torch._C._current_graph_task_id(), []) if pending else []


def _needed(ctx: Any, slots: str) -> str:
    """The slots (the function's first inputs) whose gradient this pass uses.

    ``needs_input_grad`` only tells which inputs require a gradient. ``torch.autograd.grad(energy, positions)`` may use
    fewer, so this asks the engine which nodes it will run.
    """
    nodes, requires = ctx.next_functions, ctx.needs_input_grad
    quick = not torch.is_grad_enabled() and _is_small(ctx.graph, ctx.operator)
    return "".join(
        slot
        for i, slot in enumerate(slots)
        if requires[i] and ((quick and type(nodes[i][0]) is _Leaf) or will_run(nodes[i][0]))
    )


def _is_small(graph: Graph, operator: DirectCalls) -> bool:
    """Whether the kernel costs less than asking the engine about a leaf, which raises an exception.

    A pass that is not differentiated again most likely uses the gradients of all leaves.
    """
    return graph.num_edges * operator.problem.weight_numel < _SMALL_WEIGHTS


def sole_leaves(x: Tensor, y: Tensor, w: Tensor, graph: Graph, operator: DirectCalls) -> str:
    """The slots that require a gradient, if all are leaves and the graph is small; else empty."""
    if not _is_small(graph, operator):
        return ""
    slots = [(slot, t) for slot, t in (("x", x), ("y", y), ("w", w)) if t.requires_grad]
    return "".join(slot for slot, _ in slots) if all(t.is_leaf for _, t in slots) else ""


# The op that orders a traced graph's edges.


def order_for_size(nodes: Tensor, num_out: int, count: int, end: str, spec: str) -> tuple[Tensor, Tensor]:
    """Spans and permutation by one end of a traced graph's edges, if a family's member for its size needs them."""
    spans, perm = torch.ops.equitune.tp_order.default(nodes, num_out, count, end, spec)
    return spans, perm


def _tp_order(nodes: Tensor, num_out: int, count: int, end: str, spec: str) -> tuple[Tensor, Tensor]:
    operator: Any = resolve(spec).for_size(nodes.shape[0], num_out)
    if operator.by_receiver if end == "receiver" else operator.by_sender:
        spans, perm = order_by(end, nodes, count)
        assert perm is not None
        return spans, perm
    return _fake_order(nodes, num_out, count, end, spec)  # which no kernel reads


def _fake_order(nodes: Tensor, num_out: int, count: int, end: str, spec: str) -> tuple[Tensor, Tensor]:
    return nodes.new_empty((count, 3), dtype=torch.int32), nodes.new_empty(nodes.shape, dtype=torch.int32)


def _rows_of_orders(info: Any, in_dims: tuple[Any, ...], nodes: Tensor, *rest: Any) -> tuple[Any, ...]:
    orders = [order_for_size(one, *rest) for one in nodes.unbind(in_dims[0])]
    return tuple(map(torch.stack, zip(*orders, strict=True))), (0, 0)


define_op(
    "tp_order",
    "(Tensor nodes, SymInt num_out, SymInt count, str end, str spec) -> (Tensor, Tensor)",
    run=_tp_order,
    fake=_fake_order,
    vmap=_rows_of_orders,
)
