"""Edges as they are, such as those on which a model ran: a graph that no atoms describe."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True)
class GivenEdges:
    """Edges, and the number of nodes. Make it with :meth:`of`.

    digest: of the edges; two sources with the same one are equal. packed: int32 receivers and senders, compressed, so
    that a worker process gets all it needs with the source.
    """

    num_nodes: int
    num_edges: int
    digest: str
    packed: bytes = field(repr=False, compare=False)

    @classmethod
    def of(cls, sender: torch.Tensor, receiver: torch.Tensor, num_nodes: int) -> GivenEdges:
        """sender, receiver [edges], in any order; senders beyond ``num_nodes`` (ghosts) count as earlier nodes."""
        senders = sender.detach().cpu().numpy().astype(np.int64) % max(1, num_nodes)
        receivers = receiver.detach().cpu().numpy().astype(np.int64)
        order = np.lexsort((senders, receivers))
        data = np.stack([receivers[order], senders[order]]).astype("<i4").tobytes()
        digest = hashlib.sha256(f"{num_nodes} ".encode() + data).hexdigest()[:12]
        return cls(num_nodes, len(order), digest, zlib.compress(data, 1))

    def edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """sender and receiver [edges] int64, sorted by receiver, then sender."""
        both = np.frombuffer(zlib.decompress(self.packed), "<i4").reshape(2, self.num_edges).astype(np.int64)
        return torch.from_numpy(both[1]), torch.from_numpy(both[0])
