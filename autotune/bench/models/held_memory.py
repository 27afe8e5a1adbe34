"""What a model's forward pass keeps for its gradients, by the part of the model that keeps it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autotune.bench.models.measuring import MIB

# Keeps what no part does: inputs, and sums at the end.
REST = "the model itself"


def held_mib(step: Callable[[], object], model: torch.nn.Module) -> dict[str, float]:
    """Mebibytes that one step's forward pass keeps until its backward pass, by part of the model, largest first.

    A tensor counts once, for the part that kept it first; parameters and buffers do not count, nor does what a backward
    pass keeps or computes again. Nothing for a step that replays a captured graph.
    """
    held: dict[str, int] = {}
    seen = {_place(tensor) for tensor in (*model.parameters(), *model.buffers())}
    inside: list[str] = []

    def keep(tensor: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() == -1 and (place := _place(tensor)) not in seen:
            seen.add(place)
            part = inside[-1] if inside else REST
            held[part] = held.get(part, 0) + tensor.untyped_storage().nbytes()
        return tensor

    with _following(model, inside), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    return {part: round(size / MIB, 4) for part, size in sorted(held.items(), key=lambda item: -item[1])}


def part_of(name: str) -> str:
    """The part that a module belongs to: two levels of its name, without the numbers of layers."""
    levels = (re.sub(r"\d+", "", level).strip("_") for level in name.split("."))
    return ".".join([level for level in levels if level][:2]) or REST


@contextmanager
def _following(model: torch.nn.Module, inside: list[str]) -> Iterator[None]:
    """Keep the parts whose modules are being called in ``inside``, the innermost last.

    Hooks for all modules of the process: compiled ones (TorchScript's) take no others.
    """
    parts = {module: part_of(name) for name, module in model.named_modules()}

    def enter(module: torch.nn.Module, *_: Any) -> None:
        inside.append(parts.get(module) or (inside[-1] if inside else REST))

    def leave(*_: Any) -> None:
        inside.pop()

    entering = register_module_forward_pre_hook(enter)
    leaving = register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        leaving.remove()
        entering.remove()


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
