"""Confidence interval and verdict for the ratio of two measured times, from raw samples.

Times on a device are not normally distributed and have outliers, and medians are published. So the interval is a
bootstrap of the ratio of medians, which assumes no distribution. It covers the spread within the two runs, not
differences between runs (clocks, temperature, other load); the verdict's tolerance allows for those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernelgen.errors import InputError

LEVEL = 0.95
RESAMPLES = 2000
TOLERANCE = 0.02
FASTER, SLOWER, SAME, UNCLEAR = VERDICTS = ("faster", "slower", "same", "unclear")


def ratio_interval(
    ours: Sequence[float], theirs: Sequence[float], level: float = LEVEL, *, paired: bool = False
) -> tuple[float, float]:
    """Percentile bootstrap interval of ``median(theirs) / median(ours)``; above 1, ours is faster.

    ours, theirs: samples in one unit, in any order. paired: sample i of both comes from one round of one run. Then
    rounds are resampled, not samples, so that what slows a whole round cancels; only rounds with both count.

    Equal input gives an equal interval. If either side has too few samples for the level, the interval is (0, inf):
    even the range of n samples contains the true median with a probability of only 1 - 2^(1 - n), which reaches 95% at
    six. InputError if samples are not valid times.
    """
    if not 0 < level < 1:
        raise InputError(f"level is {level}; expected a number between 0 and 1, such as {LEVEL}")
    sides = [_times(name, samples) for name, samples in (("ours", ours), ("theirs", theirs))]
    if paired:
        rounds = min(map(len, sides))
        sides = [side[:rounds] for side in sides]
    if any(2.0 ** (1 - len(side)) > 1 - level for side in sides):
        return 0.0, math.inf
    # Unless paired, one random stream for both sides: equal streams would pair the draws of equal samples.
    generator = np.random.default_rng(0)
    below = _medians(sides[0], generator)
    above = _medians(sides[1], np.random.default_rng(0) if paired else generator)
    low, high = np.quantile(above / below, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def verdict(interval: tuple[float, float], tolerance: float = TOLERANCE) -> str:
    """``faster`` or ``slower`` (ours) beyond the tolerance, ``same`` within it, else ``unclear``.

    The tolerance is a factor: with 0.02, ratios from 1 / 1.02 to 1.02 are the same. So exchanging the sides only
    exchanges faster and slower.
    """
    if not tolerance >= 0:
        raise InputError(f"tolerance is {tolerance}; expected a number that is not negative, such as {TOLERANCE}")
    low, high = interval
    if low > 1 + tolerance:
        return FASTER
    if high < 1 / (1 + tolerance):
        return SLOWER
    return SAME if 1 / (1 + tolerance) <= low and high <= 1 + tolerance else UNCLEAR


def _times(name: str, samples: Sequence[float]) -> NDArray[np.float64]:
    times = np.asarray(samples, dtype=np.float64)
    if times.ndim != 1 or not times.size or not np.isfinite(times).all() or times.min() <= 0:
        raise InputError(
            f"{name} are {times.size} samples of shape {times.shape}, not all of them positive finite numbers; "
            "expected a list of times, samples_us of a stored row for one"
        )
    return times


def _medians(times: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Median of each resample, [RESAMPLES]."""
    return np.median(times[generator.integers(0, len(times), (RESAMPLES, len(times)))], axis=1)
