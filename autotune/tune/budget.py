"""Divide a run's time budget among its workloads, and a workload's share between searches and comparison."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from autotune.workload.workload import Workload

# Most of a workload's time that its comparison takes: peers for which there is none are left out.
COMPARISON_SHARE = 1 / 3


@dataclass
class TimeBudget:
    """Durations of the last workload: its comparison, the set-up of its worker, a trial of its slowest direction."""

    budget_s: float | None
    workloads: int
    begin: float = field(default_factory=time.monotonic)
    comparison_s: float | None = None
    setup_s: float = 0.0
    trial_s: float = 0.0

    def is_spent(self, fewest_trials: int, workload: Workload) -> bool:
        """Whether too little is left for one more workload: to set it up, search it and compare, as the last one."""
        if self.budget_s is None:
            return False
        searches_s = self.trial_s * fewest_trials * len(workload.directions)
        return self.begin + self.budget_s - time.monotonic() < self.setup_s + searches_s + (self.comparison_s or 0.0)

    def next_ends(self) -> tuple[float | None, float | None]:
        """When the next workload's searches and its comparison should end; call once per workload."""
        if self.budget_s is None:
            return None, None
        now = time.monotonic()
        share = max(0.0, self.begin + self.budget_s - now) / self.workloads
        self.workloads -= 1
        kept = COMPARISON_SHARE * share
        kept = kept if self.comparison_s is None else min(self.comparison_s, kept)
        return now + share - kept, now + share
