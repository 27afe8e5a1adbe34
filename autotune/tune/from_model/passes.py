"""The passes of a model that a user cares for, as functions without arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelgen.errors import InputError

ENERGIES, TRAINING, CALL = "energies and forces", "training step", "the given call"
Passes = dict[str, Callable[[], Any]]


def passes_of(model: torch.nn.Module, batch: Any, training: bool = False) -> Passes:
    """The passes of a model on a batch.

    batch: a tensor or a dict, the model's only argument; a tuple, its arguments; or a function of none that runs all
    that is wanted, such as a step of an optimizer. The model's own outputs count as its forces. If it has outputs that
    can be differentiated and floating inputs that require gradients, their gradients are computed too.
    training: also a step of a loss, the sum of squares of all outputs, with the model in training mode.
    """
    if callable(batch) and not isinstance(batch, Tensor):
        return {CALL: batch}
    arguments = batch if isinstance(batch, tuple) else (batch,)
    found: Passes = {ENERGIES: lambda: _evaluate(model, arguments)}
    if training:
        found[TRAINING] = lambda: _train(model, arguments)
    return found


def _evaluate(model: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
    given = _fresh(arguments)
    outputs = [out for out in _tensors(model(*given)) if out.requires_grad]
    inputs = [tensor for tensor in _tensors(given) if tensor.requires_grad]
    if outputs and inputs:
        torch.autograd.grad([out.sum() for out in outputs], inputs, allow_unused=True)


def _train(model: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
    before = model.training
    model.train()
    try:
        given = _fresh(arguments)
        outputs = [out for out in _tensors(model(*given)) if out.requires_grad]
        inputs = [tensor for tensor in _tensors(given) if tensor.requires_grad]
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        if not outputs or not weights:
            raise InputError("the model has no output that depends on a weight; expected one, or training=False")
        if inputs:
            forces = torch.autograd.grad([out.sum() for out in outputs], inputs, create_graph=True, allow_unused=True)
            outputs += [force for force in forces if force is not None and force.requires_grad]
        # Not backward(): the user's own gradients stay as they are.
        torch.autograd.grad(torch.stack([out.square().sum() for out in outputs]).sum(), weights, allow_unused=True)
    finally:
        model.train(before)


def _fresh(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments without what an earlier call recorded or wrote into a dictionary."""

    def fresh(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().requires_grad_(value.requires_grad)
        return {key: fresh(item) for key, item in value.items()} if type(value) is dict else value

    return tuple(fresh(value) for value in arguments)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating tensors in nested outputs, each once."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
