"""Divide a run's time budget among its workloads, and a workload's share between searches and comparison."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from autotune.workload.workload import Workload

# Share of a workload's time reserved for the comparison, until the first comparison shows how long it takes.
COMPARISON_SHARE = 0.3


@dataclass(frozen=True)
class Least:
    """The least work on one direction: seconds of its search, and finished trials before it is published.

    The first trials are the default and the schedules known for similar kernels: with fewer, what a model loads already
    may not be among them.
    """

    search_s: float
    trials: int


@dataclass
class TimeBudget:
    """``comparison_s``, ``setup_s``: durations of the last comparison, and of the last set-up of a worker."""

    budget_s: float | None
    workloads: int
    begin: float = field(default_factory=time.monotonic)
    comparison_s: float | None = None
    setup_s: float = 0.0

    def is_spent(self, least: Least, workload: Workload) -> bool:
        """Whether too little is left for one more workload: to set it up, search it and compare, as the last one."""
        if self.budget_s is None:
            return False
        needed = self.setup_s + least.search_s * len(workload.directions) + (self.comparison_s or 0.0)
        return self.begin + self.budget_s - time.monotonic() < needed

    def end_of_searches(self) -> float | None:
        """When the next workload's searches should end; call once per workload."""
        if self.budget_s is None:
            return None
        share = max(0.0, self.begin + self.budget_s - time.monotonic()) / self.workloads
        self.workloads -= 1
        kept = COMPARISON_SHARE * share if self.comparison_s is None else min(self.comparison_s, 0.7 * share)
        return time.monotonic() + share - kept
