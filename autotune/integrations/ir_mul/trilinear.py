"""Sums over blocks of features, linear in features, weights and results, differentiable any number of times.

With T(x, w, y) = sum of c x w y over all paths, the result of (x, w) is dT/dy. Its gradients are dT/dx of (w, y) and
dT/dw of (x, y), with the result's gradient for y. So these three are each other's derivatives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from kernelgen.compat import is_autocast, run_eagerly, runs_eagerly, without_autocast
from kernelgen.ops.library import will_run

# Of what each derivative of T is made.
FACTORS = {"y": ("x", "w"), "x": ("w", "y"), "w": ("x", "y")}


class Trilinear(ABC):
    """One such T. Features x and y are ``[nodes, dim]`` in layout ``ir_mul``, w is a row of weights."""

    @abstractmethod
    def derivative(self, wanted: str, first: Tensor, second: Tensor) -> Tensor:
        """dT/d``wanted`` of its two factors, written in place block by block; not recorded by autograd."""

    @abstractmethod
    def traceable(self, wanted: str, first: Tensor, second: Tensor) -> Tensor:
        """The same in operations that torch can trace, transform and differentiate."""

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        return _derivative(self, "y", x, w)


def _derivative(form: Trilinear, wanted: str, first: Tensor, second: Tensor) -> Tensor:
    if is_autocast(first):
        with without_autocast(first):
            return _derivative(form, wanted, first, second)
    if not runs_eagerly(first, second):
        return form.traceable(wanted, first, second)
    if torch.is_grad_enabled() and (first.requires_grad or second.requires_grad):
        return _Derivative.apply(form, wanted, first, second)
    return form.derivative(wanted, first, second)


class _Derivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Trilinear, wanted: str, first: Tensor, second: Tensor) -> Tensor:
        ctx.form, ctx.wanted = form, wanted
        # The gradient by one needs the other: where weights have none, features need not be kept.
        by_first, by_second = ctx.needs_input_grad[2:]
        ctx.save_for_backward(first if by_second else None, second if by_first else None)
        return form.derivative(wanted, first, second)

    @staticmethod
    @run_eagerly("autograd calls this outside of compiled graphs, which take traceable forms")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        names = (*FACTORS[ctx.wanted], ctx.wanted)
        given = dict(zip(names, (*ctx.saved_tensors, *gradients), strict=True))
        # Forces need no gradients of the weights, which nodes of a training step's first backward pass could give.
        found = [
            _derivative(ctx.form, name, *(given[factor] for factor in FACTORS[name]))
            if needed and will_run(node[0])
            else None
            for name, needed, node in zip(names, ctx.needs_input_grad[2:], ctx.next_functions, strict=False)
        ]
        return (None, None, *found)


def components(features: Tensor, offset: int, dim: int, mul: int) -> Tensor:
    """A block of features as ``[dim, nodes, mul]``; a view if channels are next to each other in memory."""
    return features.narrow(1, offset, dim * mul).reshape(features.shape[0], dim, mul).transpose(0, 1)


def component_rows(features: Tensor, offset: int, dim: int, mul: int) -> Tensor:
    """The same of features :func:`with_rows`, always a view, by one operation, not recorded by autograd.

    Host time limits small structures, and most operations of a linear layer made views.
    """
    shape, strides = (dim, features.shape[0], mul), (mul, features.stride(0), 1)
    return features.as_strided(shape, strides, features.storage_offset() + offset)


def with_rows(features: Tensor) -> Tensor:
    """The same with channels next to each other in memory, as BLAS needs them."""
    return features if features.stride(1) == 1 or features.shape[1] == 1 else features.contiguous()


def joined(found: dict[int, Tensor], dim: int, like: Tensor) -> Tensor:
    """Blocks by their offsets as one row a node, zeros between them."""
    parts, end = [], 0
    for offset in sorted(found):
        if offset > end:
            parts.append(like.new_zeros(like.shape[0], offset - end))
        parts.append(found[offset])
        end = offset + found[offset].shape[1]
    if dim > end or not parts:
        parts.append(like.new_zeros(like.shape[0], dim - end))
    return torch.cat(parts, 1)
