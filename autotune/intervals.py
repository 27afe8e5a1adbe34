"""Whether a difference of two timings is more than noise: raw samples enter, an interval of their ratio leaves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


def paired_ratio_interval(
    ours: Sequence[float], theirs: Sequence[float], level: float = LEVEL, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of ``median(theirs) / median(ours)``; above 1 ours is faster.

    Sample i of both was taken in the same round, so rounds are drawn and not samples: what slows a whole round down
    cancels. Where one has fewer samples, the rounds that both have count. At least two of them.
    """
    rounds = min(len(ours), len(theirs))
    if rounds < 2:
        raise ValueError(f"{rounds} common samples; expected at least two")
    drawn = np.random.default_rng(seed).integers(0, rounds, (RESAMPLES, rounds))
    first, second = (np.median(np.asarray(samples[:rounds], float)[drawn], axis=1) for samples in (ours, theirs))
    low, high = np.quantile(second / first, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
