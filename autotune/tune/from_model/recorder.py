"""Record which kernels a model runs, on which graphs: in, a block of code; out, a :class:`Recording`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autotune.database.misses import Request, requests_of
from autotune.workload.graphs import GivenEdges
from autotune.workload.kinds.base import SourceOfSize
from autotune.workload.kinds.registry import kernel_kind
from kernelgen.watchers import WATCHERS


@dataclass
class Recording:
    """requests: what ran, in the order of its first run, each with the graph of that run. device: where it ran."""

    requests: dict[Request, GivenEdges | SourceOfSize] = field(default_factory=dict)
    device: torch.device | None = None
    # By number of edges and nodes: graphs that agree in both are of one class, and the first stands for all.
    _graphs: dict[tuple[int, int], GivenEdges] = field(default_factory=dict)

    def note(
        self,
        operator: Any,
        direction: Any,
        num_edges: int,
        num_nodes: int,
        sender: Tensor | None,
        receiver: Tensor | None,
    ) -> None:
        """A watcher: see :mod:`kernelgen.watchers`."""
        if num_edges == 0:
            return
        self.device = operator.device if receiver is None or operator.device.index is not None else receiver.device
        for request in requests_of(operator, direction, num_edges, num_nodes):
            if request not in self.requests:
                self.requests[request] = self._graph(request, sender, receiver)

    def _graph(self, request: Request, sender: Tensor | None, receiver: Tensor | None) -> GivenEdges | SourceOfSize:
        if sender is None or receiver is None:
            return kernel_kind(request.operation).graph_of_size(request.num_edges, 0)
        size = (request.num_edges, request.num_nodes)
        if size not in self._graphs:
            self._graphs[size] = GivenEdges.of(sender, receiver, request.num_nodes)
        return self._graphs[size]


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record every kernel that this process runs in the block, in backward passes too."""
    recording = Recording()
    WATCHERS.append(recording.note)
    try:
        yield recording
    finally:
        WATCHERS.remove(recording.note)
