"""Weights of a product with e3nn's interface: internal or given, as one row or a list, and views of each path."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from kernelgen.errors import InputError

Weight: TypeAlias = "torch.Tensor | list[torch.Tensor] | None"


def check_last(name: str, tensor: torch.Tensor, expected: int) -> None:
    if tensor.ndim == 0 or tensor.shape[-1] != expected:
        raise InputError(f"{name} has shape {tuple(tensor.shape)}; expected a last dimension of {expected}")


class PathWeights:
    """A product's weights, for a module with e3nn's attributes."""

    instructions: Any
    shared_weights: bool
    internal_weights: bool
    weight_numel: int
    weight: torch.Tensor

    def weight_view_for_instruction(self, instruction: int, weight: Weight = None) -> torch.Tensor:
        """The weights of one instruction, a view ``[..., *path_shape]`` of ``weight`` or of the internal ones.

        ValueError, as in e3nn, for an instruction without weights.
        """
        if not self.instructions[instruction].has_weight:
            raise ValueError(f"instruction {instruction} has no weights; those of e3nn's has_weight=True have some")
        views = self.weight_views(weight, yield_instruction=True)
        return next(view for number, _, view in views if number == instruction % len(self.instructions))

    def weight_views(self, weight: Weight = None, yield_instruction: bool = False) -> Iterator[Any]:
        """The weights of each instruction that has some, or (number, instruction, weights), as in e3nn."""
        weight, offset = self._weight_for(weight), 0
        for number, instruction in enumerate(self.instructions):
            if not instruction.has_weight:
                continue
            size = math.prod(instruction.path_shape)
            view = weight.narrow(-1, offset, size).view(*weight.shape[:-1], *instruction.path_shape)
            offset += size
            yield (number, instruction, view) if yield_instruction else view

    def _weight_for(self, weight: Weight) -> torch.Tensor:
        if isinstance(weight, list):
            weight = self._as_one_row(weight)
        if weight is None:
            if self.weight_numel > 0 and not self.internal_weights:
                raise InputError(f"weight is missing; expected {self.weight_numel} weights, there are no internal ones")
            # No paths, no weights: any empty row works.
            return self.weight if self.shared_weights else self.weight.reshape(1, 0)
        check_last("weight", weight, self.weight_numel)
        if (weight.ndim == 1) is not self.shared_weights:
            wanted = f"({self.weight_numel},)" if self.shared_weights else f"(..., {self.weight_numel}), a row an edge"
            raise InputError(f"weight has shape {tuple(weight.shape)}; expected {wanted}")
        return weight

    def _as_one_row(self, weights: list[torch.Tensor]) -> torch.Tensor:
        """Join weights given as one tensor per path, ``[..., *path_shape]`` or ``[..., numel]``."""
        shapes = [instruction.path_shape for instruction in self.instructions if instruction.has_weight]
        if len(weights) != len(shapes):
            raise InputError(f"{len(weights)} tensors of weights were given; expected {len(shapes)}, one a path")
        rows = []
        for given, shape in zip(weights, shapes, strict=True):
            if tuple(given.shape[-len(shape) :]) == shape:
                rows.append(given.flatten(-len(shape)))
            elif given.shape[-1:] == (math.prod(shape),):
                rows.append(given)
            else:
                raise InputError(f"weights of a path have shape {tuple(given.shape)}; expected (..., *{shape})")
        return torch.cat(rows, -1)
