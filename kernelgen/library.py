"""The torch ops ``equitune::tp_*``: what makes an operator visible to autograd, fake tensors, compile and export.

An op gets its operator as text (``Operator.text``), from which any process can rebuild it. Every op returns one
tensor for each slot; slots that were not asked for (``outputs``) are empty tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelgen.direction import backward, double_backward, forward
from kernelgen.errors import UnsupportedError
from kernelgen.graph import EdgeOrder

if TYPE_CHECKING:
    from kernelgen.operators import Operator

_GRAPH = "Tensor? sender, Tensor? receiver, Tensor? row_ptr, Tensor? perm, SymInt num_out"
_TANGENTS = "Tensor? tx, Tensor? ty, Tensor? tw"
SCHEMAS = {
    "tp_forward": f"(Tensor x, Tensor y, Tensor w, {_GRAPH}, str spec) -> Tensor",
    "tp_backward": f"(Tensor x, Tensor y, Tensor w, Tensor g, {_GRAPH}, str outputs, str spec)"
    " -> (Tensor, Tensor, Tensor)",
    "tp_double_backward": f"(Tensor x, Tensor y, Tensor w, Tensor g, {_TANGENTS}, {_GRAPH}, str outputs, str spec)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
}
# By text. Every operator of this process is here, so that a graph that was traced or exported finds its own.
OPERATORS: dict[str, Operator] = {}
# Held for as long as the process lives: dropping it would unregister the ops.
_library = torch.library.Library("equitune", "DEF")

Maybe = Tensor | None


def resolve(text: str) -> Operator:
    """The operator of a text, rebuilt if this process has not made it."""
    found = OPERATORS.get(text)
    if found is None:
        from kernelgen.operators import rebuild

        found = OPERATORS[text] = rebuild(text)
    return found


def _order(row_ptr: Maybe, perm: Maybe) -> EdgeOrder | None:
    return None if row_ptr is None else EdgeOrder(row_ptr, perm)


def _tp_forward(
    x: Tensor,
    y: Tensor,
    w: Tensor,
    sender: Maybe,
    receiver: Maybe,
    row_ptr: Maybe,
    perm: Maybe,
    num_out: int,
    spec: str,
) -> Tensor:
    operands = (x, None, y, None, w, None, None)
    return resolve(spec).run(forward(), operands, sender, receiver, num_out, _order(row_ptr, perm))["g"]


def _tp_backward(
    x: Tensor,
    y: Tensor,
    w: Tensor,
    g: Tensor,
    sender: Maybe,
    receiver: Maybe,
    row_ptr: Maybe,
    perm: Maybe,
    num_out: int,
    outputs: str,
    spec: str,
) -> tuple[Tensor, ...]:
    operands = (x, None, y, None, w, None, g)
    found = resolve(spec).run(backward(outputs), operands, sender, receiver, num_out, _order(row_ptr, perm))
    return tuple(found[slot] if slot in found else x.new_empty(0) for slot in "xyw")


def _tp_double_backward(
    x: Tensor,
    y: Tensor,
    w: Tensor,
    g: Tensor,
    tx: Maybe,
    ty: Maybe,
    tw: Maybe,
    sender: Maybe,
    receiver: Maybe,
    row_ptr: Maybe,
    perm: Maybe,
    num_out: int,
    outputs: str,
    spec: str,
) -> tuple[Tensor, ...]:
    direction = double_backward(_present(tx, ty, tw), outputs)
    operands = (x, tx, y, ty, w, tw, g)
    found = resolve(spec).run(direction, operands, sender, receiver, num_out, _order(row_ptr, perm))
    return tuple(found[slot] if slot in found else x.new_empty(0) for slot in "xywg")


def _present(*tangents: Maybe) -> str:
    return "".join(slot for slot, tangent in zip("xyw", tangents, strict=True) if tangent is not None)


def _needed(ctx: Any, slots: str) -> str:
    """The slots (the op's first inputs) whose gradient this backward pass uses.

    ``needs_input_grad`` only says which inputs require a gradient at all. ``torch.autograd.grad(energy, positions)``
    uses fewer: the engine knows which nodes it will run.
    """
    requiring = zip(slots, ctx.needs_input_grad, strict=False)
    if torch.compiler.is_compiling():
        return "".join(slot for slot, needed in requiring if needed)
    nodes = ctx.next_functions
    return "".join(slot for i, (slot, needed) in enumerate(requiring) if needed and _will_run(nodes[i][0]))


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True  # a leaf that autograd.grad was asked for: the engine collects its gradient without running it


def _fake_forward(x: Tensor, y: Tensor, *rest: Any) -> Tensor:
    num_out, spec = rest[-2:]
    operator = resolve(spec)
    return x.new_empty((num_out if operator.is_conv else y.shape[0], operator.problem.dim_out))


def _fake_gradients(slots: str) -> Callable[..., tuple[Tensor, ...]]:
    """Shapes of a backward op: like its first operands, x, y, w and g."""

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        outputs = arguments[-2]
        likes = zip(slots, arguments, strict=False)
        return tuple(like.new_empty(like.shape if slot in outputs else (0,)) for slot, like in likes)

    return fake


def _setup_forward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.num_out, ctx.spec = inputs[7:]


def _backward_of_forward(ctx: Any, g: Maybe) -> tuple:
    outputs = _needed(ctx, "xyw")
    if g is None or not outputs:
        return (None,) * 9
    x, y, w, *graph = ctx.saved_tensors
    found = tp_backward(x, y, w, g, *graph, ctx.num_out, outputs, ctx.spec)
    return (*_only(found, outputs), *(None,) * 6)


def _setup_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    # A gradient that nobody differentiates must arrive as None: its tangent is left out of the kernel.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:8])
    ctx.num_out, ctx.outputs, ctx.spec = inputs[8:]


def _backward_of_backward(ctx: Any, *tangents: Maybe) -> tuple:
    used = [tangent if slot in ctx.outputs else None for slot, tangent in zip("xyw", tangents, strict=True)]
    wanted, present = _needed(ctx, "xywg"), _present(*used)
    outputs = double_backward(present, wanted).live_outputs if wanted and present else ""
    if not outputs:
        return (None,) * 11
    x, y, w, g, *graph = ctx.saved_tensors
    found = tp_double_backward(x, y, w, g, *used, *graph, ctx.num_out, outputs, ctx.spec)
    return (*_only(found, outputs), *(None,) * 7)


def _backward_of_double_backward(ctx: Any, *grads: Maybe) -> tuple:
    raise UnsupportedError(
        "third derivatives of a tensor product are not generated; detach the second derivatives, "
        "or differentiate problem.reference() of e3nn instead"
    )


def _only(found: tuple[Tensor, ...], outputs: str) -> tuple[Maybe, ...]:
    return tuple(grad if slot in outputs else None for slot, grad in zip("xywg", found, strict=False))


def _define(name: str, run: Callable, fake: Callable, gradient: Callable, setup: Callable | None) -> Callable:
    """Register an op; returns the function that calls it."""
    _library.define(name + SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CPU")
    _library.impl(name, run, "CUDA")
    torch.library.register_fake(f"equitune::{name}", fake, lib=_library)
    torch.library.register_autograd(f"equitune::{name}", gradient, setup_context=setup, lib=_library)
    op = getattr(torch.ops.equitune, name).default

    def forward(ctx: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = op(*inputs)
        if setup is not None:
            setup(ctx, inputs, output)
        return output

    parts = {"forward": staticmethod(forward), "backward": staticmethod(gradient)}
    function: Any = type(name, (torch.autograd.Function,), parts)

    def call(*inputs: Any) -> Any:
        # Same op and same gradient as by way of register_autograd, at a third of its time per call.
        if torch.compiler.is_compiling():
            return op(*inputs)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    return call


tp_forward = _define("tp_forward", _tp_forward, _fake_forward, _backward_of_forward, _setup_forward)
tp_backward = _define("tp_backward", _tp_backward, _fake_gradients("xyw"), _backward_of_backward, _setup_backward)
tp_double_backward = _define(
    "tp_double_backward", _tp_double_backward, _fake_gradients("xywg"), _backward_of_double_backward, None
)
