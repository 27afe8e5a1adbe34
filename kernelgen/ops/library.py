"""What torch sees of an operator, made from its signature: ops of the namespace ``equitune``, and eager calls.

An operator is a function of some inputs, the value, which is differentiable twice. With a cotangent g of the value,
F = <g, value>, and with tangents t of the inputs, S = sum over inputs s of <t_s, dF/ds>. Three ops compute

    forward           the value, which is dF/dg
    backward          first gradients dF/ds
    double_backward   second gradients: of S with respect to the inputs and g

An op gets its operator as text, from which any process can rebuild it. Gradients that its ``outputs`` do not name are
empty tensors. S is linear in the tangents, and F's Hessian is symmetric: gradients of S by tangents are second
gradients along the cotangents. All others of S are third derivatives, which are refused.

Eager calls bypass the ops, which costs less host time: :func:`differentiable`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from kernelgen.compat import COMPILES_VMAP, constant_result, is_eager, is_transforming, register_vmap, run_eagerly
from kernelgen.errors import UnsupportedError
from kernelgen.ops.base import RegisteredOperator, resolve

Maybe = Tensor | None
# What a user who meets a refused derivative may have wanted.
HESSIAN_PRODUCTS = "products of a Hessian with vectors are (torch.autograd.functional.hvp and vhp)"


@dataclass(frozen=True)
class Signature:
    """The arguments of an operator's ops, and the derivatives that follow from what it is.

    name: ``sh`` of the ops ``equitune::sh_forward``, ``sh_backward`` and ``sh_double_backward``.
    slots: one letter for each input; outputs are named by them, and by ``g``.
    inputs, tangents: names of the tensors of these slots.
    rest: declarations of arguments without gradients, tensors first.
    is_multilinear: the value is linear in each input, so that dF/ds does not depend on s.
    noun, instead: what it is, and what a user may differentiate three times instead.
    """

    name: str
    slots: str
    inputs: tuple[str, ...]
    tangents: tuple[str, ...]
    noun: str
    instead: str
    rest: tuple[str, ...] = ()
    is_multilinear: bool = False

    def live(self, tangents: str, outputs: str) -> str:
        """The outputs among S's gradients that are not zero for tangents of these slots alone."""
        if not self.is_multilinear:
            return outputs if tangents else ""
        return "".join(slot for slot in outputs if tangents.replace(slot, ""))

    def backward(self, primal: tuple[Any, ...], rest: tuple[Any, ...], outputs: str, text: str) -> tuple[Maybe, ...]:
        """First gradients by the op: by slot, None for those that ``outputs`` does not name. primal: inputs and g."""
        if len(self.slots) == 1:  # which needs no outputs
            return (call(f"{self.name}_backward", *primal, *rest, text),)
        return only(call(f"{self.name}_backward", *primal, *rest, outputs, text), self.slots, outputs)

    def double_backward(
        self, primal: tuple[Any, ...], tangents: tuple[Maybe, ...], rest: tuple[Any, ...], outputs: str, text: str
    ) -> tuple[Maybe, ...]:
        """The same of second gradients, by the slots of inputs and g."""
        found = call(f"{self.name}_double_backward", *primal, *tangents, *rest, outputs, text)
        return only(found, self.slots + "g", outputs)

    def along_tangents(
        self, primal: tuple[Any, ...], tangents: tuple[Maybe, ...], rest: tuple[Any, ...], outputs: str, text: str
    ) -> tuple[Maybe, ...]:
        """F's Hessian times tangents of inputs and g (None: zero), by the ops, so that torch differentiates it."""
        *of_inputs, of_g = tangents
        terms, live = [], self.live(self.present(of_inputs), outputs)
        if live:
            terms.append(self.double_backward(primal, tuple(of_inputs), rest, live, text))
        first = outputs.replace("g", "")
        if of_g is not None and first:
            terms.append((*self.backward((*primal[:-1], of_g), rest, first, text), None))
        found = [[grad for each in terms if (grad := each[place]) is not None] for place in range(len(tangents))]
        return tuple(functools.reduce(torch.add, grads) if grads else None for grads in found)

    def present(self, tangents: Sequence[Maybe]) -> str:
        """The slots of the given tangents (of the inputs and perhaps g) that are not None."""
        return "".join(slot for slot, t in zip(self.slots + "g", tangents, strict=False) if t is not None)

    def no_third_derivative(self, *_: Any) -> tuple[Any, ...]:
        """Refuse the gradient of second derivatives."""
        raise UnsupportedError(
            f"third derivatives of {self.noun} are not generated, {HESSIAN_PRODUCTS}; detach the second derivatives, "
            f"or differentiate {self.instead} instead"
        )


class Differentiable(ABC):
    """What eager calls differentiate. Its three functions compute without autograd; they take the arguments of ops.

    text: what the functions of the signature get as their last argument.
    """

    signature: ClassVar[Signature]
    text: Any

    @abstractmethod
    def op_forward(self, *arguments: Any) -> Tensor:
        """The value, of inputs and the rest."""

    @abstractmethod
    def op_backward(self, *arguments: Any) -> dict[str, Tensor]:
        """First gradients by slot, of inputs, g, the rest and ``outputs``."""

    @abstractmethod
    def op_double_backward(self, *arguments: Any) -> dict[str, Tensor]:
        """Second gradients by slot, of inputs, g, tangents, the rest and ``outputs``."""


class DifferentiableOperator(RegisteredOperator, Differentiable):
    """An operator with a signature, which has ops.

    dim_out: features of a row of the value. row_slots: slots whose tensors have one row an item, which the operator
    treats separately, so that vmap may merge calls; empty if rows of a call are summed.
    """

    dim_out: int
    row_slots: str = ""

    def sizes(self, inputs: tuple[Any, ...], rest: tuple[Any, ...]) -> tuple[int, int]:
        """The size of a call: rows, such as edges, and rows of the value."""
        return inputs[0].shape[0], inputs[0].shape[0]


# Eager calls through autograd. Each function's arguments are those of the op, with the operator instead of its text.


def differentiable(operator: Differentiable, *arguments: Tensor) -> Tensor:
    """The value of inputs and the rest, differentiable twice."""
    if not is_eager(*arguments):
        return call(f"{operator.signature.name}_forward", *arguments, operator.text)
    if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, arguments)):
        return _Value.apply(operator, *arguments)
    return operator.op_forward(*arguments)


_REQUIRES_GRAD, _IS_NONE = attrgetter("requires_grad"), functools.partial(is_, None)


def gradients(
    operator: Differentiable, inputs: tuple[Any, ...], g: Tensor, rest: tuple[Any, ...], outputs: str
) -> tuple[Maybe, ...]:
    """First gradients by slot in a backward pass, differentiable once."""
    if is_transforming(g):
        return operator.signature.backward((*inputs, g), rest, outputs, operator.text)
    if torch.is_grad_enabled():
        return _Gradients.apply(operator, outputs, *inputs, g, *rest)
    found = operator.op_backward(*inputs, g, *rest, outputs)
    return tuple(map(found.get, operator.signature.slots))


def second_gradients(
    operator: Differentiable, primal: tuple[Any, ...], tangents: tuple[Maybe, ...], rest: tuple[Any, ...], outputs: str
) -> tuple[Maybe, ...]:
    """Second gradients by the slots of inputs and g, along tangents of inputs, differentiable by what is linear."""
    if is_transforming(*tangents):
        return operator.signature.double_backward(primal, tangents, rest, outputs, operator.text)
    if torch.is_grad_enabled():
        return _SecondGradients.apply(operator, outputs, *primal, *tangents, *rest)
    by_slot = operator.op_double_backward(*primal, *tangents, *rest, outputs)
    return tuple(map(by_slot.get, operator.signature.slots + "g"))


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Differentiable, *arguments: Tensor) -> Tensor:
        ctx.save_for_backward(*arguments)
        ctx.operator = operator
        return operator.op_forward(*arguments)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Maybe, ...]:
        operator, arguments = ctx.operator, ctx.saved_tensors
        slots = operator.signature.slots
        count = len(slots)
        outputs = slots if count == 1 else used_slots(ctx, slots)
        if not outputs:
            return (None,) * (1 + len(arguments))
        rest = arguments[count:]
        return None, *gradients(operator, arguments[:count], g, rest, outputs), *(None,) * len(rest)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Differentiable, outputs: str, *arguments: Tensor) -> tuple[Maybe, ...]:
        # A gradient that is not differentiated must arrive as None, so that the kernel omits its tangent.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arguments)
        ctx.operator = operator
        found = operator.op_backward(*arguments, outputs)
        return tuple(map(found.get, operator.signature.slots))

    @staticmethod
    def backward(ctx: Any, *tangents: Maybe) -> tuple[Maybe, ...]:
        operator, arguments = ctx.operator, ctx.saved_tensors
        signature, count = operator.signature, len(tangents) + 1
        outputs = used_slots(ctx, signature.slots + "g")
        if not outputs or all(map(_IS_NONE, tangents)):
            return (None,) * (2 + len(arguments))
        primal, rest = arguments[:count], arguments[count:]
        found = second_gradients(operator, primal, tangents, rest, outputs)
        return None, None, *found, *(None,) * len(rest)


class _SecondGradients(torch.autograd.Function):
    """Their gradients by tangents are second gradients along the cotangents; all others are third derivatives."""

    @staticmethod
    def forward(ctx: Any, operator: Differentiable, outputs: str, *arguments: Maybe) -> tuple[Maybe, ...]:
        slots = operator.signature.slots + "g"
        first, last = len(slots), 2 * len(slots) - 1
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arguments[:first], *arguments[last:])
        ctx.operator, ctx.along = operator, operator.signature.present(arguments[first:last])
        found = operator.op_double_backward(*arguments, outputs)
        return tuple(map(found.get, slots))

    @staticmethod
    def backward(ctx: Any, *cotangents: Maybe) -> tuple[Maybe, ...]:
        signature, count = ctx.operator.signature, len(cotangents)
        if used_slots(ctx, signature.slots + "g"):
            return signature.no_third_derivative()
        primal, rest = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        wanted = used_slots(ctx, ctx.along, first=count)
        found = signature.along_tangents(primal, cotangents, rest, wanted, ctx.operator.text)
        return *(None,) * (2 + count), *found[:-1], *(None,) * len(rest)


# The ops.


class _Arguments(NamedTuple):
    """Those of an op. primal: the inputs, and g where the op has it; the other fields are empty where it has none."""

    primal: tuple[Tensor, ...]
    tangents: tuple[Maybe, ...]
    rest: tuple[Any, ...]
    outputs: str
    text: str


class _Op:
    """One op of a signature: its schema, and what is alike in all. Each has a gradient and a jvp besides.

    primal, tangents: slots of its tensors. results: of its results.
    """

    name: ClassVar[str]

    def __init__(self, signature: Signature, primal: str, tangents: str, results: str) -> None:
        self.signature, self.primal, self.tangents, self.results = signature, primal, tangents, results
        # With one input there is nothing to choose among first gradients, and a second one always has its tangent.
        self.has_outputs = self.name == "double_backward" or len(results) > 1
        self.implied = (results,) if self.name == "backward" and not self.has_outputs else ()
        optional = "?" if len(signature.slots) > 1 else ""
        declared = [
            *(f"Tensor {name}" for name in (*signature.inputs, "g")[: len(primal)]),
            *(f"Tensor{optional} {name}" for name in signature.tangents[: len(tangents)]),
            *signature.rest,
            *(["str outputs"] if self.has_outputs else []),
            "str spec",
        ]
        returned = ", ".join(["Tensor"] * len(results))
        self.schema = f"({', '.join(declared)}) -> " + (returned if len(results) == 1 else f"({returned})")
        self.count = len(declared)
        self.saved = sum(each.startswith("Tensor") for each in signature.rest)

    def run(self, *arguments: Any) -> Tensor | tuple[Tensor, ...]:
        operator = resolve(arguments[-1])
        if operator.members:
            given = self.split(arguments)
            operator = operator.for_size(*operator.sizes(given.primal, given.rest))
        found = getattr(operator, f"op_{self.name}")(*arguments[:-1], *self.implied)
        if self.name == "forward":
            return found
        like = arguments[0]
        return _one_or_all(tuple(found[slot] if slot in found else like.new_empty(0) for slot in self.results))

    def fake(self, *arguments: Any) -> Tensor | tuple[Tensor, ...]:
        given = self.split(arguments)
        if self.name == "forward":
            return self.new_value(Tensor.new_empty, given.primal, given.rest, given.text)
        likes = zip(self.results, given.primal, strict=False)
        return _one_or_all(tuple(like.new_empty(like.shape if slot in given.outputs else (0,)) for slot, like in likes))

    def new_value(
        self, new: Callable[..., Tensor], inputs: tuple[Any, ...], rest: tuple[Any, ...], text: str
    ) -> Tensor:
        """A tensor of the value's shape."""
        operator = resolve(text)
        return new(inputs[0], (operator.sizes(inputs, rest)[1], operator.dim_out))

    def split(self, arguments: tuple[Any, ...]) -> _Arguments:
        first, last = len(self.primal), -2 if self.has_outputs else -1
        second = first + len(self.tangents)
        outputs = arguments[-2] if self.has_outputs else self.results
        return _Arguments(arguments[:first], arguments[first:second], arguments[second:last], outputs, arguments[-1])

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # Cotangents and tangents that are zero must arrive as None, so that kernels omit them.
        ctx.set_materialize_grads(False)
        primal, tangents, rest, ctx.outputs, ctx.text = self.split(inputs)
        ctx.save_for_backward(*primal, *rest[: self.saved])
        ctx.rest = rest[self.saved :]
        if tangents:
            ctx.along = self.signature.present(tangents)

    def kept(self, ctx: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """The primal tensors and the rest of :meth:`setup`."""
        saved, count = ctx.saved_tensors, len(self.primal)
        return saved[:count], (*saved[count:], *ctx.rest)

    def padded(self, *found: Maybe) -> tuple[Maybe, ...]:
        """Gradients of the first arguments, and None for the others."""
        return (*found, *(None,) * (self.count - len(found)))

    def rows(self, arguments: tuple[Any, ...], in_dims: tuple[int | None, ...]) -> tuple[int, ...] | None:
        """Places of the tensors ``[rows, features]`` whose rows the op treats separately in a call with these mapped
        dimensions; None if a result of the call sums over rows.
        """
        given = self.split(arguments)
        by_row = resolve(given.text).row_slots
        slots = self.primal + self.tangents
        shared = any(dim is not None and slot not in by_row for slot, dim in zip(slots, in_dims, strict=False))
        if not by_row or shared or not set(given.outputs) <= set(by_row):
            return None
        return tuple(place for place, slot in enumerate(slots) if slot in by_row)


class _Forward(_Op):
    name = "forward"

    def gradient(self, ctx: Any, *cotangents: Maybe) -> tuple[Any, ...]:
        (g,), outputs = cotangents, _needed(ctx, self.signature.slots)
        if g is None or not outputs:
            return self.padded()
        primal, rest = self.kept(ctx)
        return self.padded(*self.signature.backward((*primal, g), rest, outputs, ctx.text))

    def jvp(self, ctx: Any, *tangents: Maybe) -> Tensor:
        primal, rest = self.kept(ctx)
        of_inputs = tangents[: len(primal)]
        if not self.signature.is_multilinear:
            # It equals the gradient of S with respect to g, for any g.
            g = self.new_value(Tensor.new_zeros, primal, rest, ctx.text)
            found = self.signature.double_backward((*primal, g), of_inputs, rest, "g", ctx.text)[-1]
            assert found is not None
            return found
        changes = [
            call(f"{self.signature.name}_forward", *primal[:place], t, *primal[place + 1 :], *rest, ctx.text)
            for place, t in enumerate(of_inputs)
            if t is not None
        ]
        return functools.reduce(torch.add, changes)


class _Backward(_Op):
    name = "backward"

    def gradient(self, ctx: Any, *cotangents: Maybe) -> tuple[Any, ...]:
        slots = self.signature.slots
        tangents = tuple(t if slot in ctx.outputs else None for slot, t in zip(slots, cotangents, strict=True))
        live = self.signature.live(self.signature.present(tangents), _needed(ctx, slots + "g"))
        if not live:
            return self.padded()
        primal, rest = self.kept(ctx)
        return self.padded(*self.signature.double_backward(primal, tangents, rest, live, ctx.text))

    def jvp(self, ctx: Any, *tangents: Maybe) -> Tensor | tuple[Tensor, ...]:
        """The second gradients along the tangents: by symmetry they are the change of the first ones."""
        primal, rest = self.kept(ctx)
        found = self.signature.along_tangents(primal, tangents[: len(primal)], rest, ctx.outputs, ctx.text)
        return _one_or_all(
            tuple(
                t.new_zeros(t.shape if slot in ctx.outputs else (0,)) if change is None else change
                for slot, t, change in zip(self.signature.slots, primal, found, strict=False)
            )
        )


class _DoubleBackward(_Op):
    name = "double_backward"

    def gradient(self, ctx: Any, *cotangents: Maybe) -> tuple[Any, ...]:
        """By the tangents alone: second gradients along the cotangents."""
        if used_slots(ctx, self.primal):
            return self.signature.no_third_derivative()
        used = tuple(t if slot in ctx.outputs else None for slot, t in zip(self.primal, cotangents, strict=True))
        primal, rest = self.kept(ctx)
        wanted = used_slots(ctx, ctx.along, first=len(primal))
        found = self.signature.along_tangents(primal, used, rest, wanted, ctx.text)
        return self.padded(*(None,) * len(primal), *found[:-1])

    def jvp(self, ctx: Any, *tangents: Maybe) -> tuple[Any, ...]:
        return self.signature.no_third_derivative()


def _one_or_all(results: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return results[0] if len(results) == 1 else results


def only(found: tuple[Tensor, ...], slots: str, outputs: str) -> tuple[Maybe, ...]:
    """The results, with None for slots that ``outputs`` does not name."""
    return tuple(grad if slot in outputs else None for slot, grad in zip(slots, found, strict=True))


def _needed(ctx: Any, slots: str) -> str:
    """The slots (the op's first inputs) that require a gradient."""
    return "".join(slot for slot, needed in zip(slots, ctx.needs_input_grad, strict=False) if needed)


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


# Registration.

# While a model is traced to be exported with its forces, where receivers do not decrease: for how many edges and nodes
# schedules are chosen.
EXPORTED_SIZE: ContextVar[tuple[int, int] | None] = ContextVar("EXPORTED_SIZE", default=None)


@contextmanager
def exported_for(num_edges: int, num_nodes: int) -> Iterator[None]:
    """Trace the kernels that a GPU would run for energies and forces of a graph of about this size.

    What is traced takes graphs of any size whose ``receiver`` does not decrease, and has no second derivatives.
    """
    token = EXPORTED_SIZE.set((num_edges, num_nodes))
    try:
        yield
    finally:
        EXPORTED_SIZE.reset(token)


# Kept as long as the process lives: deleting it would unregister the ops.
_library = torch.library.Library("equitune", "DEF")


def define(signature: Signature) -> None:
    """Register the ops of a signature for both devices, fake tensors, autograd and function transforms."""
    slots, all_slots = signature.slots, signature.slots + "g"
    ops: tuple[Any, ...] = (
        _Forward(signature, primal=slots, tangents="", results="g"),
        _Backward(signature, primal=all_slots, tangents="", results=slots),
        _DoubleBackward(signature, primal=all_slots, tangents=slots, results=all_slots),
    )
    for op in ops:
        name = f"{signature.name}_{op.name}"
        define_op(name, op.schema, run=op.run, fake=op.fake)
        torch.library.register_autograd(f"equitune::{name}", op.gradient, setup_context=op.setup, lib=_library)
        _add_function(name, op)


def define_op(
    name: str, schema: str, *, run: Callable[..., Any], fake: Callable[..., Any], vmap: Callable[..., Any] | None = None
) -> None:
    """Register one op of ``equitune`` for both devices and fake tensors. vmap: its rule, if it has one."""
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CPU")
    _library.impl(name, run, "CUDA")
    torch.library.register_fake(f"equitune::{name}", fake, lib=_library)
    if vmap is not None:
        register_vmap(f"equitune::{name}", vmap, _library)


# Function transforms: makes the ops of ``equitune`` work under ``torch.func`` and in forward mode.
#
# The gradient formula registered for an op is not enough for ``torch.func.grad``, ``vmap`` and ``jvp``: they need an
# autograd function with ``setup_context``, ``vmap`` and ``jvp``. :func:`_add_function` makes one for each op from the
# same formula. :func:`call` uses the op, or its function if torch transforms the call.


_FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}


def call(name: str, *arguments: Any) -> Any:
    """Call the op ``equitune::name``, or its autograd function if an active transform needs that."""
    needs_function = _is_beyond_compile() if torch.compiler.is_compiling() else is_transforming()
    if needs_function:
        return _apply(name, *arguments)
    return getattr(torch.ops.equitune, name).default(*arguments)


@constant_result
def _is_beyond_compile() -> bool:
    """Whether a transform is active that torch.compile cannot trace through the ops: any but vmap, or any at all."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return forward_ad._current_level >= 0 or any(
        not COMPILES_VMAP or level.key() != TransformType.Vmap for level in stack
    )


@run_eagerly(
    "torch.compile does not trace Equitune's kernels through torch.func.grad, jacrev, jvp and the like, "
    "they run eagerly: compile with fullgraph=False, or what is inside of the transform"
)
def _apply(name: str, *arguments: Any) -> Any:
    return _FUNCTIONS[name].apply(*arguments)


def _add_function(name: str, op: Any) -> None:
    """Make the autograd function of the op ``equitune::name``, and its rule for vmap.

    Calls that :meth:`_Op.rows` allows are merged into one, with the rows of all items; others take one call an item.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        op.setup(ctx, inputs, output)
        ctx.save_for_forward(*ctx.to_save)

    def vmap_of(run: Callable[..., Any]) -> Callable[..., Any]:
        def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, ...]:
            mapped = tuple(a if dim is None else a.movedim(dim, 0) for a, dim in zip(arguments, in_dims, strict=True))
            is_mapped = tuple(dim is not None for dim in in_dims)
            places = op.rows(arguments, in_dims)
            if places is None:
                return _one_by_one(run, info.batch_size, is_mapped, mapped)
            return _by_rows(run, places, info.batch_size, is_mapped, mapped)

        return vmap

    itself = getattr(torch.ops.equitune, name).default
    methods = {
        "forward": itself,
        "setup_context": setup_context,
        "backward": op.gradient,
        "jvp": op.jvp,
        "vmap": vmap_of(functools.partial(call, name)),
    }
    members = {method: staticmethod(function) for method, function in methods.items()}
    _FUNCTIONS[name] = type(name, (torch.autograd.Function,), members)
    # The op's own rule, which compiled code uses, runs while the level that it resolves is still on torch's stack:
    # ``call`` would take the function, and torch finds no rule for that there.
    register_vmap(f"equitune::{name}", vmap_of(itself), _library)


def _by_rows(
    run: Callable[..., Any], places: tuple[int, ...], size: int, is_mapped: tuple[bool, ...], arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """One call on the rows of all ``size`` items; the first dimension of mapped arguments is the item."""
    whole = list(arguments)
    for place in places:
        tensor = arguments[place]
        if tensor is not None:
            whole[place] = (tensor if is_mapped[place] else tensor.expand(size, *tensor.shape)).flatten(0, 1)
    rows = arguments[places[0]].shape[-2]
    found = run(*whole)
    # Results that the caller does not want are empty, with one dimension.
    apart = [t.unflatten(0, (size, rows)) if t.dim() == 2 else t for t in _several(found)]
    dims = [0 if t.dim() == 3 else None for t in apart]
    return (apart[0], dims[0]) if isinstance(found, Tensor) else (tuple(apart), tuple(dims))


def _one_by_one(
    run: Callable[..., Any], size: int, is_mapped: tuple[bool, ...], arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """One call an item."""
    if size == 0:
        raise UnsupportedError("vmap was given no items; this product takes at least one")
    pairs = list(zip(arguments, is_mapped, strict=True))
    items = [run(*(a[i] if mapped else a for a, mapped in pairs)) for i in range(size)]
    stacked = tuple(torch.stack(parts) for parts in zip(*map(_several, items), strict=True))
    return (stacked[0], 0) if isinstance(items[0], Tensor) else (stacked, (0,) * len(stacked))


def _several(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found
