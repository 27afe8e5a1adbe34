"""Whether a model is still the one that was captured."""

from __future__ import annotations

from typing import Any

import torch


class ModelState:
    """The memory of a model's tensors, its modules and their mode.

    A captured graph reads parameters and buffers where they were. So values written in place are seen, and a tensor in
    other memory, of another dtype, or another module is a change.
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
            facts += (type(module), module.training)
            for tensors in (module._parameters, module._buffers):
                for tensor in tensors.values():
                    if tensor is not None:
                        facts += (tensor.data_ptr(), tensor.dtype)
            facts += map(id, module._modules.values())
        return facts
