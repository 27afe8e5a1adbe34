"""The torch ops ``equitune::tp_*``, which make an operator visible to fake tensors, compile and export.

An op gets its operator as text (``Operator.text``), from which any process can rebuild it. A gradient op returns one
tensor for each slot; slots that ``outputs`` does not name are empty tensors. Eager calls bypass these ops:
``kernelgen.ops.autograd`` runs the same operators with less host time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelgen.arithmetic.directions import backward, double_backward, forward
from kernelgen.compat import register_vmap
from kernelgen.errors import UnsupportedError
from kernelgen.ops.base import resolve
from kernelgen.ops.transforms import Rows, add_function, call
from kernelgen.runtime.graph import EdgeOrder, order_by
from kernelgen.runtime.runner import DirectCalls

_GRAPH = (
    "Tensor? sender, Tensor? receiver, Tensor? spans, Tensor? perm, Tensor? sender_spans, Tensor? sender_perm, "
    "SymInt num_out"
)
_TANGENTS = "Tensor? tx, Tensor? ty, Tensor? tw"
SCHEMAS = {
    "tp_forward": f"(Tensor x, Tensor y, Tensor w, {_GRAPH}, str spec) -> Tensor",
    "tp_backward": f"(Tensor x, Tensor y, Tensor w, Tensor g, {_GRAPH}, str outputs, str spec)"
    " -> (Tensor, Tensor, Tensor)",
    "tp_double_backward": f"(Tensor x, Tensor y, Tensor w, Tensor g, {_TANGENTS}, {_GRAPH}, str outputs, str spec)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "tp_order": "(Tensor nodes, SymInt num_out, SymInt count, str end, str spec) -> (Tensor, Tensor)",
}
# Number of arguments for the graph: index tensors and the number of destinations.
GRAPH_ARGUMENTS = 7
# Kept as long as the process lives: deleting it would unregister the ops.
_library = torch.library.Library("equitune", "DEF")

Maybe = Tensor | None


def _operator(text: str) -> DirectCalls:
    return resolve(text)


def _of_size(text: str, y: Tensor, num_out: int) -> DirectCalls:
    """The operator of a text for a graph: a family's operators differ by size."""
    return resolve(text).for_size(y.shape[0], num_out)


def _graph(sender: Maybe, receiver: Maybe, *order_and_size: Any) -> tuple:
    """The arguments of ``Operator.run`` that follow the operands."""
    *order, num_out = order_and_size
    return sender, receiver, num_out, EdgeOrder(*order)


def _tp_forward(x: Tensor, y: Tensor, w: Tensor, *rest: Any) -> Tensor:
    *graph, spec = rest
    operands = (x, None, y, None, w, None, None, None)
    return _of_size(spec, y, graph[-1]).run(forward(), operands, *_graph(*graph))["g"]


def _tp_backward(x: Tensor, y: Tensor, w: Tensor, g: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *graph, outputs, spec = rest
    operands = (x, None, y, None, w, None, g, None)
    found = _of_size(spec, y, graph[-1]).run(backward(outputs), operands, *_graph(*graph))
    return _apart(found, "xyw", x)


def _tp_double_backward(
    x: Tensor, y: Tensor, w: Tensor, g: Tensor, tx: Maybe, ty: Maybe, tw: Maybe, *rest: Any
) -> tuple[Tensor, ...]:
    *graph, outputs, spec = rest
    operands = (x, tx, y, ty, w, tw, g, None)
    found = _of_size(spec, y, graph[-1]).run(double_backward(present(tx, ty, tw), outputs), operands, *_graph(*graph))
    return _apart(found, "xywg", x)


def _apart(found: dict[str, Tensor], slots: str, like: Tensor) -> tuple[Tensor, ...]:
    """One tensor for each slot. Those that share memory (small outputs) are copied: torch ops may not return them."""
    whole = {slot: grad.untyped_storage().nbytes() == grad.nbytes for slot, grad in found.items()}
    return tuple(
        like.new_empty(0) if slot not in found else found[slot] if whole[slot] else found[slot].clone()
        for slot in slots
    )


def present(*tangents: Maybe) -> str:
    """The slots of the given tangents (of x, y, w and perhaps g) that are not None."""
    return "".join(slot for slot, tangent in zip("xywg", tangents, strict=False) if tangent is not None)


def _needed(ctx: Any, slots: str) -> str:
    """The slots (the op's first inputs) that require a gradient."""
    return "".join(slot for slot, needed in zip(slots, ctx.needs_input_grad, strict=False) if needed)


def _fake_forward(x: Tensor, y: Tensor, *rest: Any) -> Tensor:
    num_out, spec = rest[-2:]
    operator = _operator(spec)
    return x.new_empty((num_out if operator.is_conv else y.shape[0], operator.problem.dim_out))


def _fake_gradients(slots: str) -> Callable[..., tuple[Tensor, ...]]:
    """The fake function of a gradient op: outputs have the shapes of its first operands x, y, w and g."""

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        outputs = arguments[-2]
        likes = zip(slots, arguments, strict=False)
        return tuple(like.new_empty(like.shape if slot in outputs else (0,)) for slot, like in likes)

    return fake


def _setup_forward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    # Tangents of forward mode may be None too.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:-2])
    ctx.num_out, ctx.spec = inputs[-2:]


def _backward_of_forward(ctx: Any, g: Maybe) -> tuple:
    outputs, rest = _needed(ctx, "xyw"), (None,) * (GRAPH_ARGUMENTS + 1)
    if g is None or not outputs:
        return (None, None, None, *rest)
    x, y, w, *graph = ctx.saved_tensors
    found = call("tp_backward", x, y, w, g, *graph, ctx.num_out, outputs, ctx.spec)
    return (*only(found, "xyw", outputs), *rest)


def _setup_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    # A gradient that is not differentiated must arrive as None, so that the kernel omits its tangent.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:-3])
    ctx.num_out, ctx.outputs, ctx.spec = inputs[-3:]


def _backward_of_backward(ctx: Any, *tangents: Maybe) -> tuple:
    used = [tangent if slot in ctx.outputs else None for slot, tangent in zip("xyw", tangents, strict=True)]
    wanted, given, rest = _needed(ctx, "xywg"), present(*used), (None,) * (GRAPH_ARGUMENTS + 2)
    outputs = double_backward(given, wanted).live_outputs if wanted and given else ""
    if not outputs:
        return (None, None, None, None, *rest)
    x, y, w, g, *graph = ctx.saved_tensors
    found = call("tp_double_backward", x, y, w, g, *used, *graph, ctx.num_out, outputs, ctx.spec)
    return (*only(found, "xywg", outputs), *rest)


def _jvp_of_forward(ctx: Any, *tangents: Maybe) -> Tensor:
    """The sum of one product a tangent, because the product is linear in each operand."""
    operands, rest = ctx.saved_tensors[:3], (*ctx.saved_tensors[3:], ctx.num_out, ctx.spec)
    products = [
        call("tp_forward", *operands[:place], tangent, *operands[place + 1 :], *rest)
        for place, tangent in enumerate(tangents[:3])
        if tangent is not None
    ]
    return functools.reduce(torch.add, products)


def _jvp_of_backward(ctx: Any, *tangents: Maybe) -> tuple[Tensor, ...]:
    """The double backward of the tangents: it equals the change of gradients along them by symmetry."""
    x, y, w, g, *graph = ctx.saved_tensors
    found = along_tangents((x, y, w, g), tangents[:4], ctx.outputs, (*graph, ctx.num_out), ctx.spec)
    # For gradients that do not change along the tangents or are not in ``outputs``.
    zeros = [t.new_zeros(t.shape if slot in ctx.outputs else (0,)) for slot, t in zip("xyw", (x, y, w), strict=True)]
    return tuple(zero if grad is None else grad for zero, grad in zip(zeros, found, strict=False))


def along_tangents(
    primal: tuple[Tensor, ...], tangents: tuple[Maybe, ...], outputs: str, graph: tuple, spec: str
) -> tuple[Maybe, ...]:
    """F's Hessian times tangents of x, y, w and g (None: zero): gradients by the slots in ``outputs``, None elsewhere.

    graph: the ops' arguments for it. Made of the ops, so that torch transforms and differentiates it.
    """
    x, y, w, g = primal
    *xyw, tg = tangents
    given, terms = present(*xyw), []
    live = double_backward(given, outputs).live_outputs if given and outputs else ""
    if live:
        terms.append(only(call("tp_double_backward", x, y, w, g, *xyw, *graph, live, spec), "xywg", live))
    first = outputs.replace("g", "")
    if tg is not None and first:
        terms.append((*only(call("tp_backward", x, y, w, tg, *graph, first, spec), "xyw", first), None))
    return sums_of(terms, 4)


def sums_of(terms: list[tuple[Maybe, ...]], slots: int) -> tuple[Maybe, ...]:
    """The sum of what the terms have for each slot; None where none has anything."""
    found = [[grad for each in terms if (grad := each[slot]) is not None] for slot in range(slots)]
    return tuple(functools.reduce(torch.add, grads) if grads else None for grads in found)


def _setup_double_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], *inputs[7:-3])
    ctx.num_out, ctx.outputs, ctx.spec = inputs[-3:]
    ctx.along = present(*inputs[4:7])


def _backward_of_double_backward(ctx: Any, *cotangents: Maybe) -> tuple:
    """By the tangents, in which it is linear: second derivatives along the cotangents. The others are third ones."""
    if used_slots(ctx, "xywg"):
        return no_third_derivative()
    used = [t if slot in ctx.outputs else None for slot, t in zip("xywg", cotangents, strict=True)]
    x, y, w, g, *graph = ctx.saved_tensors
    wanted = used_slots(ctx, ctx.along, first=4)
    found = along_tangents((x, y, w, g), tuple(used), wanted, (*graph, ctx.num_out), ctx.spec)
    return (*(None,) * 4, *found[:3], *(None,) * (GRAPH_ARGUMENTS + 2))


def _rows(slots: str) -> Rows:
    """The rule for vmap of an op whose tensors have these slots, see ``kernelgen.ops.transforms.Rows``."""

    def rows(arguments: tuple, in_dims: tuple[int | None, ...]) -> tuple[int, ...] | None:
        operator = _operator(arguments[-1])
        if operator.is_conv:
            return None
        if not operator.shared_weights:
            return tuple(range(len(slots)))
        weights = [place for place, slot in enumerate(slots) if slot == "w"]
        sums = slots != "xyw" and "w" in arguments[-2]
        if sums or any(in_dims[place] is not None for place in weights):
            return None
        return tuple(place for place in range(len(slots)) if place not in weights)

    return rows


# What a user who meets a refused derivative may have wanted.
HESSIAN_PRODUCTS = "products of a Hessian with vectors are (torch.autograd.functional.hvp and vhp)"


def no_third_derivative(*_: Any) -> tuple:
    """Refuse the gradient of second derivatives."""
    raise UnsupportedError(
        f"third derivatives of a tensor product are not generated, {HESSIAN_PRODUCTS}; detach the second derivatives, "
        "or differentiate problem.reference() of e3nn instead"
    )


def used_slots(ctx: Any, slots: str, first: int = 0) -> str:
    """The slots whose gradients this pass of autograd uses.

    slots: of a function's inputs, without those that are None: they have no node. first: how many tensors come before.
    """
    nodes = zip(slots, ctx.next_functions[first:], strict=False)
    return "".join(slot for slot, (node, _) in nodes if node is not None and will_run(node))


def will_run(node: Any) -> bool:
    """Whether this autograd pass uses the gradient for ``node``, an entry of ``next_functions``."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True  # a leaf given to autograd.grad: the engine takes its gradient without running the node


def only(found: tuple[Tensor, ...], slots: str, outputs: str) -> tuple[Maybe, ...]:
    """The results, with None for slots that ``outputs`` does not name."""
    return tuple(grad if slot in outputs else None for slot, grad in zip(slots, found, strict=True))


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


def _rows_of_orders(info: Any, in_dims: tuple, nodes: Tensor, *rest: Any) -> tuple:
    orders = [order_for_size(one, *rest) for one in nodes.unbind(in_dims[0])]
    return tuple(torch.stack(part) for part in zip(*orders, strict=True)), (0, 0)


def define(
    name: str, schema: str, run: Callable, fake: Callable, gradient: Callable, setup: Callable | None, **rules: Any
) -> None:
    """Register one op of the namespace ``equitune`` for both devices, fake tensors, autograd and function transforms.

    rules: ``jvp`` and ``rows`` of ``kernelgen.ops.transforms.add_function``.
    """
    _define(name, schema, run, fake)
    torch.library.register_autograd(f"equitune::{name}", gradient, setup_context=setup, lib=_library)
    add_function(_library, name, gradient, setup, **rules)


def _define(name: str, schema: str, run: Callable, fake: Callable) -> None:
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CPU")
    _library.impl(name, run, "CUDA")
    torch.library.register_fake(f"equitune::{name}", fake, lib=_library)


define(
    *("tp_forward", SCHEMAS["tp_forward"], _tp_forward, _fake_forward, _backward_of_forward, _setup_forward),
    jvp=_jvp_of_forward,
    rows=_rows("xyw"),
)
define(
    *("tp_backward", SCHEMAS["tp_backward"], _tp_backward, _fake_gradients("xyw")),
    *(_backward_of_backward, _setup_backward),
    jvp=_jvp_of_backward,
    rows=_rows("xywg"),
)
define(
    *("tp_double_backward", SCHEMAS["tp_double_backward"], _tp_double_backward, _fake_gradients("xywg")),
    *(_backward_of_double_backward, _setup_double_backward),
    jvp=no_third_derivative,
    rows=_rows("xywgxyw"),
)
_define("tp_order", SCHEMAS["tp_order"], _tp_order, _fake_order)
register_vmap("equitune::tp_order", _rows_of_orders, _library)
