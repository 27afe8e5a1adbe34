"""Function transforms: makes the ops of ``equitune`` work under ``torch.func`` and in forward mode.

The gradient formula registered for an op is not enough for ``torch.func.grad``, ``vmap`` and ``jvp``: they need an
autograd function with ``setup_context``, ``vmap`` and ``jvp``. :func:`add_function` makes one for each op from the same
formula. :func:`call` uses the op, or its function if torch transforms the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from kernelgen.compat import COMPILES_VMAP, constant_result, is_transforming, register_vmap, run_eagerly
from kernelgen.errors import UnsupportedError

_FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}
# From an op's arguments and their mapped dimensions to the positions of the tensors ``[rows, features]`` whose rows the
# op treats separately; None if a result of the call sums over rows.
Rows = Callable[[tuple, tuple[int | None, ...]], tuple[int, ...] | None]


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


def add_function(
    library: torch.library.Library,
    name: str,
    gradient: Callable,
    setup: Callable | None,
    jvp: Callable,
    rows: Rows,
) -> None:
    """Make the autograd function, and the rule for vmap, of the op ``equitune::name``.

    gradient, setup: as in ``torch.library.register_autograd``. jvp: takes ctx and a tangent or None for each argument.
    rows: tells which calls vmap may merge into one, with the rows of all items; others take one call an item.
    """

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        if setup is not None:
            setup(ctx, inputs, output)
            ctx.save_for_forward(*ctx.to_save)

    def vmap_of(run: Callable) -> Callable:
        def vmap(info: Any, in_dims: tuple, *arguments: Any) -> tuple:
            mapped = tuple(a if dim is None else a.movedim(dim, 0) for a, dim in zip(arguments, in_dims, strict=True))
            is_mapped = tuple(dim is not None for dim in in_dims)
            places = rows(arguments, in_dims)
            if places is None:
                return _one_by_one(run, info.batch_size, is_mapped, mapped)
            return _by_rows(run, places, info.batch_size, is_mapped, mapped)

        return vmap

    op = getattr(torch.ops.equitune, name).default
    methods = {
        "forward": op,
        "setup_context": setup_context,
        "backward": gradient,
        "jvp": jvp,
        "vmap": vmap_of(functools.partial(call, name)),
    }
    members = {method: staticmethod(function) for method, function in methods.items()}
    _FUNCTIONS[name] = type(name, (torch.autograd.Function,), members)
    # The op's own rule, which compiled code uses, runs while the level that it resolves is still on torch's stack:
    # ``call`` would take the function, and torch finds no rule for that there.
    register_vmap(f"equitune::{name}", vmap_of(op), library)


def _by_rows(run: Callable, places: tuple[int, ...], size: int, is_mapped: tuple[bool, ...], arguments: tuple) -> tuple:
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


def _one_by_one(run: Callable, size: int, is_mapped: tuple[bool, ...], arguments: tuple) -> tuple:
    """One call an item."""
    if size == 0:
        raise UnsupportedError("vmap was given no items; this product takes at least one")
    pairs = list(zip(arguments, is_mapped, strict=True))
    items = [run(*(a[i] if mapped else a for a, mapped in pairs)) for i in range(size)]
    stacked = tuple(torch.stack(parts) for parts in zip(*map(_several, items), strict=True))
    return (stacked[0], 0) if isinstance(items[0], Tensor) else (stacked, (0,) * len(stacked))


def _several(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found
