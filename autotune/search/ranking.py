"""The findings of a search: finished trials, their ranking, and the number of trials without a gain."""

from __future__ import annotations

import math
from typing import Any

from autotune.search.space import Space
from kernelgen.kernels.knobs import Knobs

# A trial is a gain if it is faster than all before by this fraction, which exceeds the noise of two measurements.
GAIN = 0.01


class Findings:
    """``finished``: records by the key of their schedule, in order of arrival."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.finished: dict[str, dict[str, Any]] = {}

    def schedule_of(self, line: dict[str, Any]) -> Knobs:
        """The schedule of a record."""
        return self.space.kind.read(line["schedule"])

    @property
    def ranking(self) -> list[dict[str, Any]]:
        """Records of schedules that passed and were fully measured, fastest first."""
        passed = [line for line in self.finished.values() if line["state"] == "ok" and not line.get("cut")]
        return sorted(passed, key=lambda line: line["time_us"])

    @property
    def best(self) -> dict[str, Any] | None:
        return next(iter(self.ranking), None)

    @property
    def best_us(self) -> float | None:
        return self.best["time_us"] if self.best else None

    @property
    def stale(self) -> int:
        """Number of measured trials since the last gain (:data:`GAIN`)."""
        count, best_us = 0, math.inf
        for line in self.finished.values():
            gained = line["state"] == "ok" and not line.get("cut") and line["time_us"] < best_us * (1 - GAIN)
            count = 0 if gained else count + (line["state"] != "pruned")
            best_us = line["time_us"] if gained else best_us
        return count

    @property
    def default_us(self) -> float | None:
        line = self.finished.get(self.space.default.key)
        return line["time_us"] if line else None

    @property
    def failures(self) -> int:
        return sum(line["state"] not in ("ok", "pruned") for line in self.finished.values())
