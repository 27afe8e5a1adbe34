"""Divide a run's time budget among its workloads, and a workload's share between searches and comparison."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

# Share of a workload's time reserved for the comparison, until the first comparison shows how long it takes.
COMPARISON_SHARE = 0.3


@dataclass
class TimeBudget:
    """``comparison_s``: duration of the last comparison."""

    budget_s: float | None
    workloads: int
    begin: float = field(default_factory=time.monotonic)
    comparison_s: float | None = None

    @property
    def is_spent(self) -> bool:
        """Whether the time left is not enough for one more workload: less than the last comparison took."""
        if self.budget_s is None:
            return False
        return self.begin + self.budget_s - time.monotonic() <= (self.comparison_s or 0.0)

    def end_of_searches(self) -> float | None:
        """When the next workload's searches should end; call once per workload."""
        if self.budget_s is None:
            return None
        share = max(0.0, self.begin + self.budget_s - time.monotonic()) / self.workloads
        self.workloads -= 1
        kept = COMPARISON_SHARE * share if self.comparison_s is None else min(self.comparison_s, 0.7 * share)
        return time.monotonic() + share - kept
