"""What a model's step does with a matrix of each structure (a cell, a strain) at every edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class EdgeProducts(TorchDispatchMode):
    """Watches sums by index into tables of matrices, and batched matrix products.

    most: rows that are summed into one row of a table on average, the most of all sums. batch: the largest batch of
    products of matrices of three rows and columns at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most, self.batch = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.removeprefix("aten::").strip("_")
        table, index = self._sum_by_index(name, args)
        if index is not None and table.dim() == 3:
            self.most = max(self.most, index.numel() / max(1, table.shape[0]))
        if name in ("bmm", "baddbmm") and max(*args[-1].shape[1:], *args[-2].shape[1:]) <= 3:
            self.batch = max(self.batch, args[-1].shape[0])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _sum_by_index(name: str, args: tuple) -> tuple[Any, Any]:
        read: dict[str, Callable[[], tuple[Any, Any]]] = {
            "index_put": lambda: (args[0], args[1][0]),
            "index_put_impl": lambda: (args[0], args[1][0]),
            "index_add": lambda: (args[0], args[2]),
        }
        return read[name]() if name in read else (None, None)
