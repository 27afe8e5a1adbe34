"""The model of time: a sum of oblivious decision trees, as arrays.

All nodes of one level of an oblivious tree ask the same question, so a tree of depth d is d features, d thresholds and
2^d values, and a prediction is d comparisons and one look-up a tree (Prokhorenkova et al., CatBoost, NeurIPS 2018).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Values of leaves are kept as whole multiples of this.
STEP = 1e-5


@dataclass(frozen=True, eq=False)
class Trees:
    """features, thresholds: [trees, depth]; values: [trees, 2^depth], in steps of :data:`STEP`.

    The sum of all trees' values is the natural logarithm of a schedule's time over the least of its study. It is the
    mean of ``models`` models, each with as many consecutive trees, that were fitted with different seeds.
    """

    features: np.ndarray
    thresholds: np.ndarray
    values: np.ndarray
    base: int
    models: int = 1

    def predict(self, rows: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
        """Logarithms of the slowdown of schedules. rows: their features, [schedules, features]."""
        return (self.base + self._leaves(rows).sum(1)) * STEP

    def cautious(self, rows: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
        """As :meth:`predict`, plus the standard deviation of the models: what they disagree about is a risk."""
        leaves = self._leaves(rows)
        each = leaves.reshape(len(leaves), self.models, -1).sum(2) * self.models
        return (self.base + leaves.sum(1) + each.std(1)) * STEP

    def _leaves(self, rows: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
        given = np.asarray(rows, dtype=float)
        bits = given[:, self.features] > self.thresholds
        leaves = np.left_shift(bits, np.arange(self.features.shape[1])).sum(2)
        return self.values[np.arange(len(self.values)), leaves]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; :meth:`from_dict` reads it back."""
        arrays = {name: getattr(self, name).tolist() for name in ("features", "thresholds", "values")}
        return {"base": self.base, "models": self.models, **arrays}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trees:
        features, values = (np.array(data[name], dtype=np.int64) for name in ("features", "values"))
        thresholds = np.array(data["thresholds"], dtype=float)
        if features.shape != thresholds.shape or values.shape != (len(features), 1 << features.shape[1]):
            raise ValueError(f"trees of shapes {features.shape}, {thresholds.shape} and {values.shape}")
        models = int(data["models"])
        if models < 1 or len(features) % models:
            raise ValueError(f"{len(features)} trees of {models} models")
        return cls(features, thresholds, values, int(data["base"]), models)

    @classmethod
    def mean(cls, models: Sequence[Trees]) -> Trees:
        """One model that predicts the mean of several of the same depth and number of trees."""
        values = np.concatenate([np.rint(model.values / len(models)).astype(np.int64) for model in models])
        features = np.concatenate([model.features for model in models])
        thresholds = np.concatenate([model.thresholds for model in models])
        return cls(features, thresholds, values, round(sum(model.base for model in models) / len(models)), len(models))
