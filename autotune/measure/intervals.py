"""How sure a ratio of two measured times is: raw samples of both enter, an interval and a verdict leave.

Times on a device are neither normal nor free of outliers, and what is published is their median; so the interval is
a bootstrap of the ratio of medians, which assumes no distribution. It knows the spread within the two runs alone, not
what differs from run to run (clocks, temperature, neighbours); the tolerance of a verdict is there for that.
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
    """Percentile bootstrap interval of ``median(theirs) / median(ours)``; above 1, ours are the shorter times.

    ours, theirs: samples of one unit, in any order. paired: sample i of both was taken in one round of one run, so
    rounds are drawn and not samples: what slows a whole round down cancels; only rounds of both count.

    Equal input gives an equal interval. Where either side has too few samples for the level, the interval is (0, inf):
    even the range of n samples holds the true median with a probability of only 1 - 2^(1 - n), which reaches 95% with
    six. InputError for samples that are no times.
    """
    if not 0 < level < 1:
        raise InputError(f"level is {level}; expected a number between 0 and 1, such as {LEVEL}")
    sides = [_times(name, samples) for name, samples in (("ours", ours), ("theirs", theirs))]
    if paired:
        rounds = min(map(len, sides))
        sides = [side[:rounds] for side in sides]
    if any(2.0 ** (1 - len(side)) > 1 - level for side in sides):
        return 0.0, math.inf
    # One stream for both sides, so that a side compared with itself is not paired with equal draws by accident.
    generator = np.random.default_rng(0)
    below = _medians(sides[0], generator)
    above = _medians(sides[1], np.random.default_rng(0) if paired else generator)
    low, high = np.quantile(above / below, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def verdict(interval: tuple[float, float], tolerance: float = TOLERANCE) -> str:
    """``faster`` or ``slower`` (ours) beyond the tolerance, ``same`` within it, else ``unclear``.

    The tolerance is a factor: with 0.02 the same is what lies from 1 / 1.02 to 1.02, so exchanging the sides exchanges
    faster and slower and changes nothing else.
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
    """Of each resample, [RESAMPLES]."""
    return np.median(times[generator.integers(0, len(times), (RESAMPLES, len(times)))], axis=1)
