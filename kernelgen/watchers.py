"""Functions that learn which kernels a process runs: a tuner asks what a model needs.

In: every run of an operator's direction. Out: a call of each watcher, before the kernel is launched. Without watchers a
run pays for one test of an empty list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# Called with the operator, the direction, the number of edges and of result rows, and, for a convolution, sender and
# receiver. A watcher may change this list.
Watcher = Callable[[Any, Any, int, int, Tensor | None, Tensor | None], None]
WATCHERS: list[Watcher] = []
# Called when an operator prepares a direction's kernel, before its first run: rare.
PREPARING: list[Callable[[], None]] = []


def tell(
    operator: Any, direction: Any, num_edges: int, num_out: int, sender: Tensor | None, receiver: Tensor | None
) -> None:
    """Call every watcher."""
    for watcher in tuple(WATCHERS):
        watcher(operator, direction, num_edges, num_out, sender, receiver)


def tell_of_preparing() -> None:
    """Call every function of ``PREPARING``."""
    for function in tuple(PREPARING):
        function()
