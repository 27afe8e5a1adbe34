"""Whether a model is still the one that was captured."""

from __future__ import annotations

from typing import Any

import torch


class ModelState:
    """The memory of a model's tensors, its modules, their mode, and what was hung on them.

    A captured graph reads parameters and buffers where they were. So values written in place are seen, and a tensor in
    other memory, of another dtype, another module, hook or ``forward`` is a change.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = list(model.modules())
        self.facts = self._facts()

    def is_still(self) -> bool:
        """Compares every module and tensor."""
        return self._facts() == self.facts

    def _facts(self) -> list[Any]:
        facts: list[Any] = []
        for module in self.modules:
            own = module.__dict__
            facts += (
                type(module),
                module.training,
                "forward" in own,
                *own["_forward_hooks"],
                *own["_forward_pre_hooks"],
            )
            # Written out, since every call asks all modules, of which most have no tensors or no children.
            if tensors := own["_parameters"]:
                for tensor in tensors.values():
                    if tensor is not None:
                        facts += (tensor.data_ptr(), tensor.dtype)
            if tensors := own["_buffers"]:
                for tensor in tensors.values():
                    if tensor is not None:
                        facts += (tensor.data_ptr(), tensor.dtype)
            if children := own["_modules"]:
                facts += map(id, children.values())
        return facts
