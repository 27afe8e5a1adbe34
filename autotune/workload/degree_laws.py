"""Random graphs whose degrees follow a law: the configuration model, each node's edges joined to others at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch

from autotune.errors import ConfigError

# Quantiles of edges a node between the least and the most, by the law's name.
LAWS = ("power", "lognormal", "hubs")
# Nodes with most edges, of "hubs".
HUBS = 0.01


@dataclass(frozen=True)
class DegreeLaw:
    """Edges between ``num_nodes`` nodes, from ``least`` to ``most`` a node; senders have the same degrees.

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
