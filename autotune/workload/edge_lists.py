"""Graphs that no atoms describe: edges as they are (those on which a model ran, say), or degrees that follow a law."""

from __future__ import annotations

import hashlib
import math
import zlib
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import torch

from autotune.errors import ConfigError

# Quantiles of edges a node between the least and the most, by the law's name.
LAWS = ("power", "lognormal", "hubs")
# Nodes with most edges, of "hubs".
HUBS = 0.01


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


@dataclass(frozen=True)
class DegreeLaw:
    """The configuration model: edges from ``least`` to ``most`` a node, joined at random; senders have equal degrees.

    law: ``power``: the number of nodes with k edges falls as 1/k^2; ``lognormal``: logarithms are normally
    distributed between the two; ``hubs``: one node in a hundred has the most, all others the least.
    """

    num_nodes: int
    law: str
    least: int
    most: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise ConfigError(f"law of degrees is {self.law!r}; expected one of {LAWS}")
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"degrees go from {self.least} to {self.most}; expected at least 1, in ascending order")

    @property
    def num_edges(self) -> int:
        return int(self.degrees().sum())

    def degrees(self) -> torch.Tensor:
        """Edges of each node, [num_nodes] int64, in random order."""
        counts = torch.tensor([self._quantile((i + 0.5) / self.num_nodes) for i in range(self.num_nodes)])
        return counts[torch.randperm(self.num_nodes, generator=torch.Generator().manual_seed(self.seed))]

    def edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """sender and receiver [edges] int64, sorted by receiver, then sender."""
        receiver = torch.arange(self.num_nodes).repeat_interleave(self.degrees())
        generator = torch.Generator().manual_seed(self.seed + 1)
        sender = receiver[torch.randperm(len(receiver), generator=generator)]
        order = torch.argsort(receiver * self.num_nodes + sender, stable=True)
        return sender[order], receiver[order]

    def _quantile(self, share: float) -> int:
        """Edges of the node that stands at this share of all nodes, by ascending degree."""
        least, most = self.least, self.most
        if self.law == "hubs":
            return most if share > 1 - HUBS else least
        if self.law == "power":
            return round(1 / (1 / least - share * (1 / least - 1 / most)))
        widest = NormalDist().inv_cdf(1 - 0.5 / self.num_nodes) or 1.0
        middle, width = math.log(least * most) / 2, math.log(most / least) / 2
        return round(math.exp(middle + width * NormalDist().inv_cdf(share) / widest))
