"""Fits oblivious trees to logarithms of slowdowns, by gradient boosting with squared errors.

Friedman, Greedy function approximation, Annals of Statistics 29 (2001). It takes a second for ten thousand trials with
NumPy alone, and gives the same numbers everywhere, so that a fitted file can be checked against the records.
scikit-learn's histogram boosting ranked held-out problems no better.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.database.model_of_time import STEP, Trees
from autotune.replay.defaults.studies import Trials

# Slowdowns beyond this are alike: nobody chooses among them.
CAP = np.log(3.0)


@dataclass(frozen=True)
class Settings:
    """share: of the features, for a tree. ridge: added to a leaf's weight. bins: at most, of a feature's values."""

    trees: int = 75
    depth: int = 6
    rate: float = 0.2
    ridge: float = 3.0
    share: float = 0.4
    bins: int = 24


def fit_studies(studies: Sequence[Trials], settings: Settings | None = None, seeds: int = 8) -> Trees:
    """The mean of ``seeds`` models. Fast schedules weigh more; a study with many trials weighs less for each."""
    rows = np.concatenate([study.rows for study in studies])
    slow = np.concatenate([study.slowdowns() for study in studies])
    counts = np.concatenate([np.full(len(study.times_us), len(study.times_us)) for study in studies])
    weights = counts**-0.75 * np.exp(-0.5 * slow)
    chosen = settings or Settings()
    return Trees.mean([fit(rows, np.minimum(slow, CAP), weights, chosen, seed) for seed in range(seeds)])


def fit(rows: np.ndarray, wanted: np.ndarray, weights: np.ndarray, settings: Settings, seed: int = 0) -> Trees:
    """One model. rows: [n, features]; wanted, weights: [n]."""
    weights = weights / weights.mean()
    cuts = [_cuts(column, settings.bins) for column in rows.T]
    binned = np.stack([np.searchsorted(cut, column) for cut, column in zip(cuts, rows.T, strict=True)], 1)
    base = round(float(np.average(wanted, weights=weights)) / STEP)
    left, generator = wanted - base * STEP, random.Random(seed)
    useful = [feature for feature, cut in enumerate(cuts) if len(cut)]
    features, thresholds, values = [], [], []
    for _ in range(settings.trees):
        offered = [feature for feature in useful if generator.random() < settings.share] or useful
        asked, leaves = _grow(binned[:, offered], [len(cuts[f]) for f in offered], left * weights, weights, settings)
        size = 1 << settings.depth
        totals, weight = (np.bincount(leaves, what, size) for what in (left * weights, weights))
        steps = np.rint(settings.rate * totals / (weight + settings.ridge) / STEP).astype(np.int64)
        left = left - steps[leaves] * STEP
        features.append([offered[feature] for feature, _ in asked])
        thresholds.append([float(cuts[offered[feature]][place]) for feature, place in asked])
        values.append(steps)
    return Trees(np.array(features), np.array(thresholds), np.array(values), base)


def _cuts(column: np.ndarray, bins: int) -> np.ndarray:
    """Thresholds between the values of a feature; if there are too many, about as many rows between any two."""
    known = np.unique(column)
    between = (known[1:] + known[:-1]) / 2
    if len(between) >= bins:
        wanted = np.quantile(column, np.linspace(0, 1, bins + 1)[1:-1], method="nearest")
        between = between[np.unique(np.minimum(np.searchsorted(known, wanted), len(between) - 1))]
    return np.unique(np.round(between, 5))


def _grow(
    binned: np.ndarray, counts: Sequence[int], gradients: np.ndarray, weights: np.ndarray, settings: Settings
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """One tree: the question of each level, as feature and threshold, and every row's leaf.

    counts: thresholds of each feature. A level takes the question with the largest gain over all of its nodes.
    """
    number, bins = binned.shape[1], settings.bins
    places, leaves = binned + np.arange(number) * bins, np.zeros(len(binned), dtype=np.int64)
    outside = np.arange(bins - 1) >= np.array(counts)[:, None]
    asked: list[tuple[int, int]] = []
    for level in range(settings.depth):
        nodes = 1 << level
        keys = (places + (leaves * (number * bins))[:, None]).ravel()
        below, weight = (
            np.bincount(keys, np.repeat(what, number), nodes * number * bins).reshape(nodes, number, bins).cumsum(2)
            for what in (gradients, weights)
        )
        above, other = below[:, :, -1:] - below, weight[:, :, -1:] - weight
        gains = (below**2 / (weight + settings.ridge) + above**2 / (other + settings.ridge)).sum(0)[:, :-1]
        # Rounded: two questions that divide the rows alike differ in their last digits, and the first of them counts.
        gains = np.where(outside, -1.0, np.round(gains, 6))
        feature, place = divmod(int(gains.argmax()), bins - 1)
        asked.append((feature, place))
        leaves = leaves + (binned[:, feature] > place) * nodes
    return asked, leaves
