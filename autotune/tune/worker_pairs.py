"""Worker processes of a tuning run: for each problem, one that searches and one that compares.

The workloads of one problem share its :class:`WorkerPair`, which is set up anew for each: imports, e3nn's product and
the code that torch compiled for it stay. So winners are measured again in a process that took no part in their search.
"""

from __future__ import annotations

import itertools

from autotune.compare.idle_process import IdleProcess
from autotune.measure.trial import TrialSetting
from autotune.measure.worker import Worker
from autotune.workload.kinds.base import Problem
from autotune.workload.workload import Workload


class WorkerPair:
    """The two processes of one problem. Each starts when first needed, or at :meth:`launch`."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem, self._idle = problem, IdleProcess(problem, device)
        self.searching, self.comparing = Worker(self._idle), Worker(self._idle)

    def launch(self) -> None:
        self.searching.launch()
        self.comparing.launch()

    def search(self, workload: Workload) -> Worker:
        """Start setting up the searching process for a workload; returns it at once."""
        self.searching.reopen(TrialSetting(workload, self._idle.device))
        self.searching.launch()
        return self.searching

    def rest(self) -> None:
        """Release what both hold on the device, and wait until done: neither may disturb the other."""
        for worker in (self.searching, self.comparing):
            worker.reopen(self._idle)
        for worker in (self.searching, self.comparing):
            worker.settle()

    def close(self) -> None:
        self.searching.close()
        self.comparing.close()


class WorkerPairs:
    """The present problem's pair and the next one's, whose imports run in parallel."""

    def __init__(self, device: str) -> None:
        self.device = device
        # On a CPU, imports during a measurement would disturb it.
        self.ahead = device.startswith("cuda")
        self._pairs: dict[Problem, WorkerPair] = {}

    def __enter__(self) -> WorkerPairs:
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self._pairs.values():
            pair.close()

    def of(self, problem: Problem) -> WorkerPair:
        """The problem's pair; ends those of earlier problems, not those that were launched ahead."""
        for other in itertools.takewhile(lambda known: known != problem, tuple(self._pairs)):
            self._pairs.pop(other).close()
        return self._pair(problem)

    def launch(self, *problems: Problem) -> None:
        """Start the processes of problems, if that disturbs no measurement."""
        if self.ahead:
            for problem in problems:
                self._pair(problem).launch()

    def _pair(self, problem: Problem) -> WorkerPair:
        if problem not in self._pairs:
            self._pairs[problem] = WorkerPair(problem, self.device)
        return self._pairs[problem]
