"""The worker processes of a run of the tuner: for each problem one that searches and another that compares.

Problems enter, in the order in which they are tuned; :class:`WorkerPair` leaves. Workloads of one problem share its
pair, which is opened for each of them anew: imports, e3nn's product and the code that torch compiles for it stay.
Winners are measured again in a process that took no part in their search.
"""

from __future__ import annotations

from autotune.compare.idle_process import IdleProcess
from autotune.measure.trial import TrialSetting
from autotune.measure.worker import Worker
from autotune.workload.kinds.base import Problem
from autotune.workload.workload import Workload


class WorkerPair:
    """Of one problem. Neither process is started before it is needed, or :meth:`launch` says so."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem, self._idle = problem, IdleProcess(problem, device)
        self.searching, self.comparing = Worker(self._idle), Worker(self._idle)

    def launch(self) -> None:
        self.searching.launch()
        self.comparing.launch()

    def search(self, workload: Workload) -> Worker:
        """The one that searches, being set up for a workload; returns at once."""
        self.searching.reopen(TrialSetting(workload, self._idle.device))
        self.searching.launch()
        return self.searching

    def rest(self) -> None:
        """Give back all that both hold on the device, and wait until they have: neither may disturb the other."""
        for worker in (self.searching, self.comparing):
            worker.reopen(self._idle)
        for worker in (self.searching, self.comparing):
            worker.settle()

    def close(self) -> None:
        self.searching.close()
        self.comparing.close()


class WorkerPairs:
    """The pair at work, and the next problem's, whose imports go on beside it."""

    def __init__(self, device: str) -> None:
        self.device = device
        # Where the clock is the host's own, imports beside a measurement would disturb it.
        self.ahead = device.startswith("cuda")
        self._pairs: dict[Problem, WorkerPair] = {}

    def __enter__(self) -> WorkerPairs:
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self._pairs.values():
            pair.close()

    def of(self, problem: Problem) -> WorkerPair:
        """The problem's pair; those of problems before it end."""
        for other in [known for known in self._pairs if known != problem]:
            self._pairs.pop(other).close()
        return self._pair(problem)

    def launch(self, *problems: Problem) -> None:
        """Start the processes of problems, where that disturbs no measurement."""
        if self.ahead:
            for problem in problems:
                self._pair(problem).launch()

    def _pair(self, problem: Problem) -> WorkerPair:
        return self._pairs.setdefault(problem, WorkerPair(problem, self.device))
